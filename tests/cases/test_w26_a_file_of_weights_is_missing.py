"""An index names a file that is not there: the node whose layers are in it refuses, naming both; the others serve.

How each tensor's presence and shape is checked is tests/inference/stage/test_loading.py and tests/models/test_shard.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshd.cli.local_room import LocalRoom
from meshd.models.pull import pull
from meshd.models.store import ModelStore
from tests.rooms import PATIENCE_S, noise, tried, until

pytestmark = [pytest.mark.daemon, pytest.mark.torch]


def test_it_is_refused_where_it_is_needed_and_only_there(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the engine extra")
    from tests.inference.stage.checkpoints import reference

    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    reference("llama", folder)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = files["model.layers.3.mlp.up_proj.weight"]
    (folder / gone).unlink()
    store = ModelStore(tmp_path / "models")
    model = pull(str(folder), store)
    with LocalRoom(
        model.name, store=store.root, common=["--threads", "1", "--capacity-mb", "200", "--offline"]
    ) as room:
        room.add("n1", "--layers", "0..2")
        room.add("n2", "--layers", "2..4")

        def state(name: str) -> tuple[str, str]:
            with room.client(name) as client:
                status = tried(lambda: client.get("/status")) or {"state": "", "reason": ""}
            return status["state"], status["reason"]

        until(lambda: state("n1")[0] == "ready", "the first half is ready", 3 * PATIENCE_S)

        def says_what_is_missing() -> bool:
            now, reason = state("n2")  # once: in between it tries again
            return gone in reason and "layer 3" in reason and now != "ready"

        until(says_what_is_missing, "the second half says what is missing", 3 * PATIENCE_S)
        with room.client("n1") as client:
            assert client.get("/mesh/hive")["missing"] == [[2, 4]]
        assert "Traceback" not in noise(room, "n1") + noise(room, "n2")
