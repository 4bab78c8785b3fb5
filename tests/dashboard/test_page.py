"""The dashboard over a node of fakes: the key, the fallback, the keyboard, the sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from meshd.api.guards import Access, ApiKey, Guards, Right
from meshd.api.node import Node
from tests.api.rig import Rig, served
from tests.dashboard.browser import Browser, Page
from tests.fakes.chain import N2, FakeChain

pytestmark = pytest.mark.browser

KEY = "correct-horse-battery-staple"
NODES = "document.querySelectorAll('.node').length"
WIDTHS = (380, 1400)


@dataclass
class TellingRig(Rig):
    """Emits an event about n2 whenever it is told to drain: the log belongs to the server's thread."""

    told: str = ""

    def node(self) -> Node:
        async def drain() -> None:
            self.log.emit(self.told, node=N2, name="n2")

        return replace(super().node(), drain=drain)

    def tell(self, url: str, event: str) -> None:
        self.told = event
        assert httpx.post(f"{url}/admin/drain").status_code == 200


@pytest.fixture(scope="module")
def rig() -> TellingRig:
    return TellingRig(FakeChain(tuple(b"an answer")))


@pytest.fixture(scope="module")
def url(rig: TellingRig) -> Iterator[str]:
    with served(rig) as found:
        yield found


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    opened = browser.page(url)
    opened.until(f"{NODES} === 2")
    yield opened
    opened.close()


def test_a_key_is_asked_for_once_a_tab(browser: Browser) -> None:
    guards = Guards(Access((ApiKey.of(KEY, Right.INFER),), trust_loopback=False))
    with served(Rig(), guards=guards) as url:
        page = browser.page(url)
        page.until("document.querySelector('#key-dialog')?.open")
        assert page.js(NODES) == 0
        page.type("#key-text", "a wrong one")
        page.press("Enter", 13)
        page.until("document.querySelector('#key-why').textContent.includes('not known')")
        page.type("#key-text", KEY)
        page.press("Enter", 13)
        page.until(f"{NODES} === 2")
        page.send("Page.reload")
        page.until(f"{NODES} === 2")
        assert not page.js("document.querySelector('#key-dialog')?.open")
        page.close()


def test_a_key_in_the_link_is_taken_and_hidden(browser: Browser) -> None:
    guards = Guards(Access((ApiKey.of(KEY, Right.INFER),), trust_loopback=False))
    with served(Rig(), guards=guards) as url:
        page = browser.page(f"{url}/#key={KEY}")
        page.until(f"{NODES} === 2")
        assert KEY not in page.js("location.href")
        page.close()


def test_events_come_as_they_happen_or_with_the_document(page: Page, rig: TellingRig, url: str) -> None:
    page.until("document.body?.dataset.feed === 'live'")
    rig.tell(url, "suspect")
    page.until("document.querySelector('#event-list').textContent.includes('n2 does not answer')")
    page.send("Network.enable")
    page.send("Network.setBlockedURLs", {"urls": ["*/events*"]})
    page.send("Page.reload")
    page.until("document.body?.dataset.feed === 'polling'")
    rig.tell(url, "failed")
    page.until("document.querySelector('#event-list').textContent.includes('n2 is dead')")


def test_nothing_is_asked_of_anybody_else(page: Page, url: str) -> None:
    page.until("document.body?.dataset.feed === 'live'")
    asked = page.js("performance.getEntriesByType('resource').map((each) => each.name)")
    assert asked
    assert [each for each in asked if not each.startswith(f"{url}/")] == []
    assert page.console == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_fits_and_every_text_can_be_read(page: Page, width: int, dark: bool) -> None:
    page.size(width, 900)
    page.scheme(dark=dark)
    assert page.js("document.documentElement.scrollWidth") == width  # at once, before anything is drawn anew
    assert page.js(CONTRAST) == []


def test_everything_that_can_be_clicked_has_a_name_and_is_reached_by_keyboard(page: Page) -> None:
    unnamed = "[...document.querySelectorAll('button, input, textarea, [role=img]')].filter((each) => !each.closest('[hidden]')"
    named = "(each.innerText || each.getAttribute('aria-label') || each.labels?.length || each.placeholder)"
    assert page.js(f"{unnamed} && !{named}).map((each) => each.outerHTML)") == []
    page.js("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(12):
        page.press("Tab", 9)
        reached.append(page.js("document.activeElement.id || document.activeElement.className"))
    assert "node" in reached
    assert "chat-text" in reached
    page.js("document.querySelector('.node').focus()")
    page.press("Enter", 13)
    page.until("!document.querySelector('#detail').hidden")
    assert "0.50 ms a layer" in page.text("#detail")


def test_an_error_is_told_where_the_answer_would_be(browser: Browser) -> None:
    from meshd.errors import StageUnavailable
    from meshd.vocabulary import LayerRange

    with served(Rig(FakeChain(error=StageUnavailable([LayerRange(15, 30)])))) as url:
        page = browser.page(url)
        page.until(f"{NODES} === 2")
        page.type("#chat-text", "hello")
        page.press("Enter", 13)
        page.until("document.querySelector('.how.failed')")
        assert "stage 15..30 unavailable" in page.text(".how.failed")
        page.close()


# Texts whose contrast with what is painted behind them is below 4.5 (large or bold-large ones: 3), as WCAG counts it.
CONTRAST = """(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const [r, g, b, a = 1] = rgb(getComputedStyle(at).backgroundColor);
      if (a > 0.5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(each);
    if (!own || !each.checkVisibility() || each.closest('.visually-hidden, .skip') || each instanceof SVGElement) continue;
    const [a, b] = [light(rgb(style.color)), light(behind(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) bad.push([each.className, each.textContent, ratio]);
  }
  return bad;
})()"""
