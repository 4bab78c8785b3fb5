"""What is told where ``--join`` finds nobody."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from meshd.node.join_check import JoinCheck
from meshd.vocabulary import Endpoint


@pytest.mark.parametrize(("heard_after_s", "told"), [(1e9, 1), (4.0, 0), (0.0, 0)])
def test_that_nobody_answers_is_told_once(heard_after_s: float, told: int) -> None:
    said: list[str] = []

    async def main() -> None:
        began = trio.current_time()
        late = 0.0
        check = JoinCheck(
            [Endpoint("127.0.0.1", 9)], lambda: trio.current_time() - began + late >= heard_after_s, said.append
        )
        await check.run()
        assert list(check.warnings) == said
        late = 1e9
        assert check.warnings == ()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))
    assert len(said) == told
    assert all("127.0.0.1:9 (--join)" in text and "meshd key show" in text for text in said)


def test_who_names_nobody_waits_for_nobody() -> None:
    async def main() -> float:
        await JoinCheck([], lambda: False, pytest.fail).run()
        return trio.current_time()

    assert trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) == 0.0
