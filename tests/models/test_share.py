"""Models from neighbours, over links in memory: only what is needed, from several at once, whoever dies or lies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from meshd.directory import Directory, Member
from meshd.errors import Busy, LinkLost, MeshdError, ModelNotFound, ModelRefused, StoreFull
from meshd.models.digest import verify_shard
from meshd.models.hash_model import HashModel
from meshd.models.manifest import as_dtype
from meshd.models.pull import pull
from meshd.models.store import ModelStore, StoredModel
from meshd.node import share_server, transfer
from meshd.node.fetcher import Fetcher
from meshd.node.model import Served
from meshd.node.share_server import ModelShare
from meshd.vocabulary import Advert, Endpoint, LayerRange, NodeId, NodeStatus
from tests.fakes.links import FakeLinks, FakeNet
from tests.models.checkpoints import CONFIG, llama_plans, write_model

WHOLE = LayerRange(0, 4)
ME = NodeId("f" * 32)


@dataclass
class Neighbour:
    """A device that shares its store. ``flip``: it changes a byte of every piece of a tensor that it sends."""

    node_id: NodeId
    store: ModelStore
    digest: str = ""
    served: Served | None = None
    flip: bool = False
    dies_after_pieces: int | None = None
    epoch: int = 1
    busy: bool = False
    pieces: int = 0
    tensors: set[str] = field(default_factory=set)


class Room:
    def __init__(self, *neighbours: Neighbour, state: Path) -> None:
        self.net = FakeNet(latency_s=0.0)
        self.neighbours = neighbours
        self.store = ModelStore.under(state)
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.links: FakeLinks

    def directory(self) -> Directory:
        return Directory(ME).replace(
            [
                Member(
                    Advert(
                        node_id=n.node_id,
                        name=f"n{n.node_id[0]}",
                        epoch=n.epoch,
                        incarnation=1,
                        addresses=(Endpoint("127.0.0.1", 1),),
                        digest=n.digest,
                    ),
                    NodeStatus.ALIVE,
                )
                for n in self.neighbours
            ]
        )

    @asynccontextmanager
    async def running(self) -> Any:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                self.links = self.net.join(ME)
                for neighbour in self.neighbours:
                    nursery.start_soon(self.share, neighbour, self.net.join(neighbour.node_id))
                yield Fetcher(
                    self.store,
                    self.links,
                    directory=self.directory,
                    on_event=lambda name, fields: self.events.append((name, fields)),
                )
                nursery.cancel_scope.cancel()

    async def share(self, neighbour: Neighbour, links: FakeLinks) -> None:
        share = ModelShare(neighbour.store, lambda: neighbour.served)

        async def answer(peer: NodeId, first: Any, stream: Any) -> None:
            send = stream.send

            async def tampered(message: Any) -> None:
                if message.kind == "piece" and first.kind == "models.part":
                    neighbour.pieces += 1
                    if neighbour.dies_after_pieces is not None and neighbour.pieces > neighbour.dies_after_pieces:
                        self.net.kill(neighbour.node_id)
                    if neighbour.flip:
                        body = bytes([message.body[0] ^ 1]) + message.body[1:]
                        message = type(message)(message.kind, message.head, body)
                await send(message)

            stream.send = tampered
            try:
                if neighbour.busy and first.kind == "models.file":
                    raise Busy("too many neighbours fetch from this node")
                await share.serve(peer, first, stream)
            except MeshdError as error:
                stream.fail(error)

        async with trio.open_nursery() as nursery:
            async for peer, first, stream in links.inbound():
                nursery.start_soon(answer, peer, first, stream)


@pytest.fixture
def original(tmp_path: Path) -> StoredModel:
    folder = write_model(tmp_path / "m", llama_plans(tied=True), {**CONFIG, "tie_word_embeddings": True}, files=3)
    return pull(str(folder), ModelStore.under(tmp_path / "a"), record=lambda f: _write(f / "qspec.safetensors"))


def _write(path: Path) -> None:
    path.write_bytes(b"recorded")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints of these tests have a few hundred bytes."""
    monkeypatch.setattr(share_server, "PIECE_BYTES", 50)
    monkeypatch.setattr(transfer, "BATCH_BYTES", 200)
    monkeypatch.setattr(transfer, "_PAUSE_S", 0.01)


def having(original: StoredModel, letter: str, tmp_path: Path, **more: Any) -> Neighbour:
    """A neighbour with a copy of its own."""
    import shutil

    root = tmp_path / f"n{letter}"
    if not root.exists():
        shutil.copytree(original.path.parent.parent, root)
    return Neighbour(NodeId(letter * 32), ModelStore.under(root), original.spec.digest, **more)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario)


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4), WHOLE])
def test_only_what_a_range_needs_is_moved(original: StoredModel, tmp_path: Path, layers: LayerRange) -> None:
    room = Room(*(having(original, letter, tmp_path) for letter in "abc"), state=tmp_path / "me")
    told: list[float] = []

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, layers, told.append)
            assert model.open().held() == (layers,)
            assert verify_shard(model.path, layers, room.store.hashes)
            assert model.qspec.read_bytes() == b"recorded"
            small = sum((model.path / name).stat().st_size for name in _small(model))
            assert fetcher.received_bytes == original.spec.weight_bytes(layers) + small
            assert told == sorted(told)
            assert told[-1] == 1.0
            assert fetcher.barred == {}

    run(scenario)


def _small(model: StoredModel) -> list[str]:
    return [
        p.name
        for p in model.path.iterdir()
        if p.name in {"config.json", "tokenizer.json", "tokenizer_config.json", "qspec.safetensors"}
    ]


def test_an_entry_takes_the_small_files_and_layers_later(original: StoredModel, tmp_path: Path) -> None:
    room = Room(having(original, "a", tmp_path), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            served = await fetcher.meet(original.spec.digest)
            assert served.spec == original.spec
            found = room.store.find(original.name)
            assert found is not None
            assert found.open().held() == ()
            assert found.qspec.is_file()
            model = await fetcher.fetch(original.spec.digest, LayerRange(0, 2))
            assert model.open().held() == (LayerRange(0, 2),)
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert model.open().held() == (WHOLE,)
            assert model.path == served.folder

    run(scenario)


def test_neighbours_with_parts_complete_each_other(original: StoredModel, tmp_path: Path) -> None:
    halves = [having(original, letter, tmp_path) for letter in "ab"]
    partial = []
    for neighbour, layers in zip(halves, (LayerRange(0, 2), LayerRange(2, 4)), strict=True):
        part = Room(neighbour, state=tmp_path / f"half{layers.start}")

        async def take(part: Room = part, layers: LayerRange = layers) -> None:
            async with part.running() as fetcher:
                await fetcher.fetch(original.spec.digest, layers)

        trio.run(take)
        partial.append(Neighbour(neighbour.node_id, part.store, original.spec.digest))
    room = Room(*partial, state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, room.store.hashes)
            assert all(n.pieces for n in partial)

    run(scenario)


def test_a_neighbour_that_dies_costs_only_what_it_had_not_sent(original: StoredModel, tmp_path: Path) -> None:
    dying = having(original, "a", tmp_path, dies_after_pieces=7)
    room = Room(dying, having(original, "b", tmp_path), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, room.store.hashes)
            assert dying.pieces > 7
            small = sum((model.path / name).stat().st_size for name in _small(model))
            assert fetcher.received_bytes == original.spec.weight_bytes(WHOLE) + small, "nothing came twice"
            assert fetcher.barred == {}

    run(scenario)


def test_the_only_neighbour_dies_and_the_next_one_goes_on(original: StoredModel, tmp_path: Path) -> None:
    dying = having(original, "a", tmp_path, dies_after_pieces=14)  # the embedding has eleven
    first = Room(dying, state=tmp_path / "me")

    async def breaks() -> None:
        async with first.running() as fetcher:
            with pytest.raises(LinkLost, match="did not come"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            assert first.store.models() == []

    run(breaks)
    second = Room(having(original, "b", tmp_path), state=tmp_path / "me")

    async def goes_on() -> None:
        async with second.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, second.store.hashes)
            small = sum((model.path / name).stat().st_size for name in _small(model))
            assert fetcher.received_bytes < original.spec.weight_bytes(WHOLE) + small, "what had come stayed"

    run(goes_on)


def test_a_neighbour_whose_bytes_are_wrong_is_named_and_not_used(original: StoredModel, tmp_path: Path) -> None:
    liar = having(original, "a", tmp_path, flip=True)
    room = Room(liar, having(original, "b", tmp_path), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, room.store.hashes)
            assert list(fetcher.barred) == [liar.node_id]
            assert [name for name, _ in room.events] == ["liar"]
            assert "na gave wrong bytes" in room.events[0][1]["text"]

    run(scenario)


def test_a_liar_that_was_started_anew_is_asked_again(original: StoredModel, tmp_path: Path) -> None:
    liar = having(original, "a", tmp_path, flip=True)
    room = Room(liar, state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            with pytest.raises(LinkLost, match="damaged"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            liar.flip = False
            with pytest.raises(ModelNotFound):
                await fetcher.fetch(original.spec.digest, WHOLE)
            liar.epoch = 2
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, room.store.hashes)

    run(scenario)


def test_a_file_that_was_changed_here_makes_no_neighbour_a_liar(original: StoredModel, tmp_path: Path) -> None:
    room = Room(*(having(original, letter, tmp_path) for letter in "ab"), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, LayerRange(0, 2))
            before = (model.path / "config.json").read_bytes()
            (model.path / "config.json").write_text("{}")
            with pytest.raises(ModelRefused, match=r"changed here \(config\.json is not.*meshd rm m'"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            assert fetcher.barred == {}
            assert room.events == []
            (model.path / "config.json").write_bytes(before)
            assert verify_shard((await fetcher.fetch(original.spec.digest, WHOLE)).path, WHOLE, room.store.hashes)

    run(scenario)


def test_a_busy_neighbour_is_not_the_last_one(original: StoredModel, tmp_path: Path) -> None:
    room = Room(having(original, "a", tmp_path, busy=True), having(original, "b", tmp_path), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert verify_shard(model.path, WHOLE, room.store.hashes)
            assert fetcher.barred == {}

    run(scenario)


def test_a_qspec_that_finds_no_room_is_an_error_of_ours(
    original: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    room = Room(having(original, "a", tmp_path), state=tmp_path / "me")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    async def scenario() -> None:
        async with room.running() as fetcher:
            await fetcher.fetch(original.spec.digest, LayerRange(0, 2))
            with monkeypatch.context() as patch:
                patch.setattr(Path, "write_bytes", full)
                with pytest.raises(StoreFull, match="full"):
                    await fetcher.qspec(original.spec.digest)

    run(scenario)


def test_only_liars_is_an_error_and_nothing_is_installed(original: StoredModel, tmp_path: Path) -> None:
    room = Room(having(original, "a", tmp_path, flip=True), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            with pytest.raises(LinkLost, match="damaged"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            assert room.store.models() == []
            with pytest.raises(ModelNotFound):
                await fetcher.fetch(original.spec.digest, WHOLE)

    run(scenario)


def test_a_full_disk_is_said_and_the_transfer_goes_on_later(
    original: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from meshd.models.shard import IncomingShard

    room = Room(having(original, "a", tmp_path), state=tmp_path / "me")
    keep, calls = IncomingShard._open, 0

    def full(self: IncomingShard, file: str) -> Any:
        nonlocal calls
        calls += 1
        if 5 <= calls < 7:
            raise OSError(errno.ENOSPC, "no space")
        return keep(self, file)

    monkeypatch.setattr(IncomingShard, "_open", full)

    async def scenario() -> None:
        async with room.running() as fetcher:
            with pytest.raises(StoreFull, match="full"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            assert room.store.models() == []
            calls_so_far = calls
            monkeypatch.setattr(IncomingShard, "_open", keep)
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert calls_so_far >= 5
            assert verify_shard(model.path, WHOLE, room.store.hashes)

    run(scenario)


def test_no_room_is_said_before_anything_is_fetched(
    original: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(having(original, "a", tmp_path), state=tmp_path / "me")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())

    async def scenario() -> None:
        async with room.running() as fetcher:
            with pytest.raises(StoreFull, match="short"):
                await fetcher.fetch(original.spec.digest, WHOLE)
            assert room.neighbours[0].pieces == 0

    run(scenario)


def test_a_variant_is_fetched_as_its_files(original: StoredModel, tmp_path: Path) -> None:
    """int8 is computed from the same files: their digest is the base model's."""
    variant = as_dtype(original.spec, "int8").digest
    neighbour = having(original, "a", tmp_path)
    neighbour.digest = variant
    room = Room(neighbour, state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            served = await fetcher.meet(variant)
            assert served.spec.digest == variant
            model = await fetcher.fetch(variant, LayerRange(1, 3))
            assert model.spec.digest == variant
            assert model.open().held() == (LayerRange(1, 3),)

    run(scenario)


def test_a_rehearsal_model_is_met_by_its_digest(tmp_path: Path) -> None:
    model = HashModel(7, seed=3)
    neighbour = Neighbour(
        NodeId("a" * 32), ModelStore.under(tmp_path / "a"), model.digest, Served(model.spec, rehearsal=model)
    )
    room = Room(neighbour, state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            served = await fetcher.meet(model.digest)
            assert served.rehearsal is not None
            assert (served.rehearsal.num_layers, served.rehearsal.seed) == (7, 3)

    run(scenario)


def test_a_model_of_the_same_name_is_not_replaced(original: StoredModel, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other" / "m", llama_plans(), CONFIG)
    mine = pull(str(other), ModelStore.under(tmp_path / "me"))
    assert mine.name == original.name
    room = Room(having(original, "a", tmp_path), state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            model = await fetcher.fetch(original.spec.digest, WHOLE)
            assert model.name == f"{original.name}-{original.spec.digest[:8]}"
            kept = room.store.find(mine.name)
            assert kept is not None
            assert kept.spec.digest == mine.spec.digest

    run(scenario)


def test_nobody_has_it(original: StoredModel, tmp_path: Path) -> None:
    empty = Neighbour(NodeId("a" * 32), ModelStore.under(tmp_path / "x"), original.spec.digest)
    room = Room(empty, state=tmp_path / "me")

    async def scenario() -> None:
        async with room.running() as fetcher:
            with pytest.raises(ModelNotFound):
                await fetcher.meet(original.spec.digest)

    run(scenario)
