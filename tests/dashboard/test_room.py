"""A room of four real daemons in a real browser: it appears, it answers, a node dies, and nobody reloads anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshd.cli.local_room import LocalRoom
from tests.dashboard.browser import Browser, until

pytestmark = [pytest.mark.browser, pytest.mark.daemon]

PATIENCE_S = 60.0
NAME_AND_STATE = (
    "[...document.querySelectorAll('.node')].map((n) => [n.querySelector('b').textContent, n.dataset.state])"
)
STATES = f"Object.fromEntries({NAME_AND_STATE})"
AGE = "document.querySelector('#routing-age').textContent"


@pytest.fixture(scope="module")
def room() -> Iterator[LocalRoom]:
    with LocalRoom("hash:30,step_ms=60,layer_mb=1") as found:
        for number, layers in enumerate(("0..15", "15..30") * 2, 1):
            found.add(f"n{number}", "--layers", layers, "--capacity-mb", "200")
        found.wait(nodes=4, replicas=2, timeout_s=PATIENCE_S)
        yield found


def test_the_room_answers_and_survives_a_death_before_our_eyes(browser: Browser, room: LocalRoom) -> None:
    page = browser.page(room.nodes["n1"].url)
    page.until(f"Object.values({STATES}).filter((state) => state === 'alive').length === 4", PATIENCE_S)
    assert page.text("#hive") == "healthy"
    assert page.text("#coverage").split() == ["\N{MULTIPLICATION SIGN}", "2"] * 2

    page.type("#chat-text", "Tell me about lighthouses")
    page.press("Enter", 13)
    page.until("document.querySelector('.theirs .words')?.textContent.length > 5", PATIENCE_S)
    page.until("document.querySelector('#route .way.running')")
    assert page.js("document.querySelectorAll('.node[data-hop=true]').length") == 2
    route = [hop.split()[0] for hop in page.text(".way-words").split(" → ")]
    victim = next(name for name in reversed(route) if name != "n1")

    room.kill(victim)
    page.until(f"{STATES}['{victim}'] === 'suspect'", PATIENCE_S)
    page.until(f"{STATES}['{victim}'] === 'dead'", PATIENCE_S)
    assert page.text("#hive") == "healthy (no redundancy)"
    page.until("document.querySelector('.theirs .how').textContent.includes('tok/s')", PATIENCE_S)
    assert f"{victim} lost" in page.text(".theirs .recovery")
    assert "hang on" in page.text("#finding-list")
    assert f"{victim} is dead" in page.text("#event-list").replace("\n", " ")
    assert len(page.text(".theirs .words")) > 100

    page.until("document.querySelector('#routing-rows [data-status=proven]')", PATIENCE_S)
    shares = page.js(
        "[...document.querySelectorAll('.share-words')].reduce((sum, each) => sum + parseInt(each.textContent), 0)"
    )
    assert 98 <= shares <= 102
    assert "explore share: 0.3" in page.text("#routing-settings")
    assert page.js(f"{AGE} === 'now' || parseInt({AGE}) <= 4")

    room.start(victim)
    page.until(f"{STATES}['{victim}'] === 'alive'", PATIENCE_S)
    until(lambda: page.text("#hive") == "healthy", "healthy again", PATIENCE_S)
    assert page.console == []
    page.close()
