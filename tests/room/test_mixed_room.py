"""A wide node beside two halves that do not share its middle: every legal route, and only those, gives the model's answer."""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.cli.models import ensure
from meshd.client import Client, RequestFailed
from meshd.inference.hash_stage import reference
from tests.rooms import FLAGS, PATIENCE_S

pytestmark = pytest.mark.daemon

PROMPT = "The lighthouse keeper said"
TOKENS = 12


def mixed(room: LocalRoom, layers: int, cut: int, *flags: str) -> None:
    """n1 the first part, n2 everything, n3 the last part."""
    for name, held in (("n1", f"0..{cut}"), ("n2", f"0..{layers}"), ("n3", f"{cut}..{layers}")):
        room.add(name, "--layers", held, *flags)
    room.wait(nodes=3, replicas=2, timeout_s=3 * PATIENCE_S)


def answers(client: Client, layers: int, cut: int) -> list[list[int]]:
    """The answer by every legal route, whose ranges are checked; illegal ones are refused by name."""
    made = []
    for route, ranges in (
        (["n2"], [[0, layers]]),
        (["n1", "n3"], [[0, cut], [cut, layers]]),
        (["n1", "n2"], [[0, cut], [cut, layers]]),  # the wide node goes on inside its range
    ):
        answer = client.post("/chain", {"prompt": PROMPT, "max_tokens": TOKENS, "route": route})
        assert [hop["name"] for hop in answer["route"]] == route
        assert [hop["layers"] for hop in answer["route"]] == ranges
        made.append(answer["tokens"])
    for route in (["n1"], ["n3"], ["n3", "n1"], ["n1", "n1"], ["n2", "n3"], ["n1", "nobody"]):
        with pytest.raises(RequestFailed) as caught:
            client.post("/chain", {"prompt": PROMPT, "max_tokens": TOKENS, "route": route})
        assert (caught.value.http_status, caught.value.error["code"]) == (409, "bad_route"), route
    return made


def test_the_rehearsal_model() -> None:
    with LocalRoom("hash:40,step_ms=2,layer_mb=1") as room:
        mixed(room, 40, 22, *FLAGS)
        with room.client("n1") as client:
            expected = reference(tuple(PROMPT.encode()), TOKENS, 40)
            assert answers(client, 40, 22) == [expected] * 3


@pytest.mark.model
def test_a_real_model() -> None:
    spec, store = ensure("smollm2-135m")
    with LocalRoom(spec.name, store=store, common=["--threads", "1"]) as room:
        mixed(room, 30, 16, "--capacity-mb", "1500")
        with room.client("n3") as client:
            one, halves, hybrid = answers(client, 30, 16)
    assert halves == one == hybrid
