"""An answer ends where the model ends its turn, and the marker is not part of the text.

Models that double the begin token, or whose config forgets the end token, are tests/inference/test_tokenizer.py.
"""

from __future__ import annotations

import pytest

from meshd.cli.local_room import LocalRoom

pytestmark = [pytest.mark.daemon, pytest.mark.model]
MESSAGES = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
IM_END = 2


def test_a_turn_ends_with_its_end_token(smollm2_room: LocalRoom) -> None:
    with smollm2_room.client("n1") as client:
        whole = client.post("/chain", {"messages": MESSAGES, "max_tokens": 60})
        pieces = list(client.stream(messages=MESSAGES, max_tokens=60))
        chat = client.post("/v1/chat/completions", {"model": "smollm2-135m", "messages": MESSAGES, "temperature": 0})
    assert whole["finish_reason"] == "stop"
    assert whole["tokens"][-1] == IM_END
    assert whole["tokens"].count(IM_END) == 1
    assert "Paris" in whole["text"]
    assert "<|im_end|>" not in whole["text"]
    assert "".join(piece.text for piece in pieces) == whole["text"]
    (choice,) = chat["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", whole["text"])
    assert chat["usage"]["completion_tokens"] == len(whole["tokens"])
