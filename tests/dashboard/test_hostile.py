"""Whatever nodes, models and people call themselves, the page runs no script of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from meshd.api.node import Node
from meshd.directory import Directory
from meshd.vocabulary import NodeId, NodeStatus
from tests.api.rig import Rig, member, served
from tests.dashboard.browser import Browser
from tests.fakes.chain import N1, FakeChain

pytestmark = pytest.mark.browser

HOSTILE: Final = (
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg onload=window.hit=1>",
    "<svg><script>window.hit=1</script></svg>",
    "\"><img src=x onerror='window.hit=1'>",
    "'><script>window.hit=1</script>",
    "</title><script>window.hit=1</script>",
    "</style><script>window.hit=1</script>",
    "</textarea><script>window.hit=1</script>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<iframe src=javascript:parent.hit=1>",
    "javascript:window.hit=1",
    "<a href='javascript:window.hit=1' autofocus onfocus=window.hit=1>x</a>",
    "<input autofocus onfocus=window.hit=1>",
    "<details open ontoggle=window.hit=1>",
    "<video><source onerror=window.hit=1></video>",
    "<body onload=window.hit=1>",
    "<math><mi xlink:href='javascript:window.hit=1'>x</mi></math>",
    "<object data='data:text/html,<script>parent.hit=1</script>'>",
    "<style>@import 'javascript:window.hit=1';</style>",
    "`-window.hit=1-`${window.hit=1}",
    "{{constructor.constructor('window.hit=1')()}}",
    "__proto__",
    "\u202egpj.exe\x00\x1b[31m",
    "&lt;script&gt;window.hit=1&lt;/script&gt;&#60;img src=x onerror=window.hit=1&#62;",
)
READY = "document.querySelectorAll('.node').length > 2"


def quiet(page_console: list[str]) -> list[str]:
    """What the console said, without the failed loads that a test brings about on purpose."""
    return [line for line in page_console if "Failed to load resource" not in line]


class HostileRig(Rig):
    def node(self) -> Node:
        return replace(super().node(), routing=lambda _: routing())


def routing() -> dict[str, Any]:
    """A table as the planner makes it, of hostile names."""
    hop = {"node": "0" * 32, "name": "", "layers": [0, 30]}
    arms = [
        {
            "signature": f"{text}|{text}[0:30]",
            "hops": [{**hop, "name": text}],
            "tps": 1.0,
            "prior_tps": 1.0,
            "coefficient": 1.0,
            "expected_share": 0.04,
            "samples": 1,
            "weight": 1.0,
            "status": text,
        }
        for text in HOSTILE
    ]
    return {
        "config": {text: text for text in HOSTILE},
        "models": {HOSTILE[0]: {"epoch": HOSTILE[1], "candidates": arms}},
    }


@pytest.fixture(scope="module")
def url() -> object:
    """A node whose room, model, routes, events, findings and answers are all hostile."""
    assert len(HOSTILE) == 25
    members = [member(N1, HOSTILE[0], (0, 15), model=HOSTILE[1], version=HOSTILE[2])]
    for number, text in enumerate(HOSTILE[1:], 1):
        node = NodeId(f"{number:032x}")
        layers = None if number % 3 == 0 else ((0, 15), (15, 30))[number % 2]
        members.append(
            member(
                node,
                text,
                layers,
                state=list(NodeStatus)[number % 5],
                admitted=(True, False, None)[number % 3],
                model=text,
                version=text,
                dtype=text,
                arith=text,
            )
        )
    rig = HostileRig(FakeChain(tuple("".join(HOSTILE).encode())), directory=Directory(N1).replace(members))
    rig.facts = type(rig.facts)(state="ready", name=HOSTILE[0], version=HOSTILE[1], warnings=HOSTILE)
    for text in HOSTILE:
        rig.log.emit(text, name=text, text=text)
        rig.log.emit("suspect", name=text)
        rig.log.emit("quarantine", name=text, text=text)
        rig.log.emit("failed", name=text, reason=text)
        rig.log.emit("route", session=text, mode=text, signature=f"{text}|{text}[0:15]->{text}[15:30]")
        swap = {"layers": [0, 15], "from": text, "to": text, "reason": text}
        rig.log.emit("failover", session=text, swaps=[swap])
    with served(rig) as found:
        yield found


def test_hostile_names_models_and_events_run_no_script(browser: Browser, url: str) -> None:
    page = browser.page(url, height=3000)
    page.until(READY)
    page.until("document.querySelectorAll('#event-list li').length > 10")
    for selector in (".node", ".answer"):
        page.js(f"document.querySelectorAll('{selector}').forEach((each) => each.click())")
    page.until("document.querySelectorAll('#routing-rows tr').length === 25")
    shown = page.text("#nodes") + page.text("#others")
    assert all(text in shown for text in (HOSTILE[0], HOSTILE[1]))  # as the text that it is
    assert (
        page.js(
            "document.querySelectorAll('main script, main iframe, main img, main object, main video, main style').length"
        )
        == 0
    )
    assert page.js("window.hit") is None
    assert page.js("({}).polluted") is None
    assert (page.dialogs, quiet(page.console)) == ([], [])
    page.close()


def test_hostile_prompts_and_answers_run_no_script(browser: Browser, url: str) -> None:
    page = browser.page(url)
    page.until(READY)
    for number, text in enumerate(HOSTILE, 1):
        page.type("#chat-text", text.replace("\x00", "").replace("\x1b", "") or "x")
        page.press("Enter", 13)
        done = "[...document.querySelectorAll('.theirs .how')].filter((how) => /tokens|failed/.test(how.textContent)).length"
        page.until(f"{done} >= {number} || document.querySelectorAll('.theirs .how.failed').length >= {number}")
        page.js("document.querySelectorAll('.theirs .words.waiting').length === 0")
    assert page.js("document.querySelectorAll('.mine').length") == len(HOSTILE)
    assert HOSTILE[0] in page.text(".mine .words")
    assert page.js("document.querySelectorAll('main script, main iframe, main img, main object').length") == 0
    assert page.js("window.hit") is None
    assert (page.dialogs, quiet(page.console)) == ([], [])
    page.close()
