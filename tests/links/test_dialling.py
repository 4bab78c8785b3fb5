"""Back-off grows, is bounded, and does not outlive the outage."""

from meshd.links.dialling import FIRST_S, LONGEST_S, MAX_NODES, Backoff
from meshd.vocabulary import Endpoint, NodeId

NODE = NodeId("a" * 32)
HERE, THERE = Endpoint("10.0.0.1", 1), Endpoint("10.0.0.2", 1)


def test_waits_double_up_to_a_bound() -> None:
    backoff = Backoff()
    now, waits = 0.0, []
    for _ in range(30):
        backoff.failed(NODE, [HERE], "refused", now)
        failure = backoff.blocks(NODE, [HERE], now)
        assert failure is not None
        waits.append(failure.until - now)
        now = failure.until
        assert backoff.blocks(NODE, [HERE], now) is None
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert max(waits) == waits[-1] == LONGEST_S


def test_a_new_address_or_a_sign_of_life_ends_it() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.failed(NODE, [HERE], "refused", 0.0)
    assert backoff.blocks(NODE, [THERE, HERE], 0.1) is None
    assert backoff.blocks(NODE, [HERE], 0.1) is not None
    backoff.failed(NODE, [THERE], "refused", 0.1)
    failure = backoff.blocks(NODE, [THERE], 0.1)
    assert failure is not None
    assert failure.times == 1
    backoff.heard(NODE)
    assert backoff.blocks(NODE, [THERE], 0.1) is None


def test_the_table_is_bounded() -> None:
    backoff = Backoff()
    for n in range(MAX_NODES + 10):
        backoff.failed(NodeId(f"{n:032x}"), [HERE], "refused", 0.0)
    assert backoff.blocks(NodeId(f"{0:032x}"), [HERE], 0.0) is None
    assert backoff.blocks(NodeId(f"{MAX_NODES + 9:032x}"), [HERE], 0.0) is not None
