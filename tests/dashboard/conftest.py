"""The browser, once for all tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.browser import Browser, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium; skips where there is none."""
    if chromium() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser() as running:
        yield running
