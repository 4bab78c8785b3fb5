"""The rate of an engine's tokens."""

from hypothesis import given
from hypothesis import strategies as st

from meshd.inference.rate import WINDOW_S, Rate


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 9)), max_size=30), st.floats(0, 9))
def test_the_rate_is_the_mean_over_the_window(added: list[tuple[float, int]], later_s: float) -> None:
    rate, now, seen = Rate(), 0.0, []
    for pause_s, count in added:
        now += pause_s
        rate.add(count, now)
        seen.append((now, count))
    now += later_s
    assert rate.per_s(now) == sum(count for at, count in seen if now <= at + WINDOW_S) / WINDOW_S
