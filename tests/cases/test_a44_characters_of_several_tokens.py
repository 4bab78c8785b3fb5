"""The crab is three tokens to SmolLM2, none of which is text alone: it arrives whole, or cut as one-shot decoding cuts it."""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom
from tests.rooms import streamed

pytestmark = [pytest.mark.daemon, pytest.mark.model]
CRABS = "🦀" * 8
CRAB = [10813, 116, 218]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_pieces_join_to_the_whole(smollm2_room: LocalRoom, tokens: int) -> None:
    with smollm2_room.client("n1") as client:
        seen = streamed(client, prompt=CRABS, max_tokens=tokens)
        pieces = [piece.text for piece in client.stream(CRABS, max_tokens=tokens)]
        whole = client.post("/chain", {"prompt": CRABS, "max_tokens": tokens})
    assert whole["tokens"] == seen.tokens == (CRAB * 3)[:tokens]  # the model goes on with crabs
    crabs, rest = divmod(tokens, 3)
    assert whole["text"] == seen.text == "".join(pieces)
    assert whole["text"].startswith("🦀" * crabs)
    assert whole["text"].rstrip("\N{REPLACEMENT CHARACTER}") == "🦀" * crabs
    assert whole["text"].endswith("\N{REPLACEMENT CHARACTER}") == bool(rest)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:crabs])
