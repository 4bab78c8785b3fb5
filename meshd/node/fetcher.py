"""Fetches a model, or the part of it that some layers need, from the neighbours that have it.

Owns whom to ask and what to do with answers: `meet` brings a model's small files (manifest, config, tokenizer, qspec), which
is all that an entry needs; `fetch` brings the tensors of a range, from several neighbours at once. Every tensor is proven by its
SHA-256 in the manifest, the manifest by the digest that was asked for; only the qspec is taken at a neighbour's word, as nothing
can prove it. A neighbour that dies costs what it had not sent; one whose bytes are wrong is named and not asked again before its
daemon was started anew (its disk may be another by then). What came stays on the disk and is not fetched twice.

Errors: ModelNotFound (no neighbour has it), ModelRefused, StoreFull, StateError, LinkLost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import trio

from meshd.directory import Directory, Member
from meshd.errors import BadFrame, LocalError, MeshdError, ModelNotFound, ModelRefused, UsageError
from meshd.links.wire import Links, Message, Stream
from meshd.models.disk import disk_errors
from meshd.models.hash_model import parse_hash_model
from meshd.models.manifest import Manifest, as_dtype, parse_manifest_untrusted
from meshd.models.qspec_file import QspecFile
from meshd.models.shard import IncomingShard, companions_of
from meshd.models.store import QSPEC_FILE, ModelStore, StoredModel
from meshd.node.model import Served
from meshd.node.share_wire import Offer, ask_file, ask_manifest, offer_untrusted, piece_untrusted
from meshd.node.transfer import Source, Transfer, stalled
from meshd.vocabulary import LayerRange, NodeId, NodeStatus

NEIGHBOURS: Final = 4  # asked at once
OFFER_S: Final = 10.0

Progress = Callable[[float], None]
OnEvent = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Found:
    """A neighbour's offer whose manifest is the right one."""

    node: NodeId
    offer: Offer
    manifest: Manifest


class Fetcher:
    """See the module. One fetch at a time; a second one waits."""

    def __init__(
        self,
        store: ModelStore,
        links: Links,
        *,
        directory: Callable[[], Directory],
        on_event: OnEvent = lambda _name, _fields: None,
    ) -> None:
        self._store = store
        self._links = links
        self._directory = directory
        self._on_event = on_event
        self._one_at_a_time = trio.Lock()
        self.barred: dict[NodeId, int] = {}  # neighbours whose bytes were wrong, and in which run (epoch)
        self.received_bytes = 0

    async def meet(self, digest: str) -> Served:
        """The model without any layers: enough to be an entry, to elect and to probe."""
        async with self._one_at_a_time:
            offers = await self._offers(digest)
            for _, offer in offers:
                computed = _rehearsal(offer.rehearsal, digest)
                if computed is not None:
                    return computed
            stored = await trio.to_thread.run_sync(self._store.by_digest, digest)
            if stored is None:
                shard, found = await self._begin(digest, await self._proven(digest, offers))
                stored = await self._install(shard, found, digest, None)
            return Served(stored.spec, stored.path)

    async def fetch(self, digest: str, layers: LayerRange, progress: Progress = lambda _share: None) -> StoredModel:
        """The model in the store with everything that ``layers`` need. ``progress`` hears 0..1."""
        async with self._one_at_a_time:
            found = await self._proven(digest, await self._offers(digest))
            shard, chosen = await self._begin(digest, found)
            wanted = await trio.to_thread.run_sync(shard.wanted, layers)
            await trio.to_thread.run_sync(shard.require_room, layers)
            sources = [Source(f.node, frozenset(_names(shard, f.offer.held))) for f in found]
            transfer = Transfer(shard, wanted, self._base(chosen), self._links, progress=progress, on_liar=self._bar)
            try:
                await transfer.run(sources)
            finally:
                self.received_bytes += transfer.received_bytes
            return await self._install(shard, chosen, digest, layers)

    async def qspec(self, digest: str) -> None:
        """Bring the qspec of a model that is in the store without one."""
        stored = await trio.to_thread.run_sync(self._store.by_digest, digest)
        if stored is None:
            raise ModelNotFound(f"no model {digest} in the store")
        last: MeshdError = ModelNotFound("no neighbour has a qspec of this model")
        for node, offer in await self._offers(digest):
            if QSPEC_FILE not in offer.files:
                continue
            try:
                content = await self._file(node, digest, QSPEC_FILE, offer.files[QSPEC_FILE])
                await trio.to_thread.run_sync(self._keep_qspec, stored, content)
            except MeshdError as error:
                last = error
            else:
                return
        raise last

    # --- who has it ---------------------------------------------------------------------------------------------------

    async def _offers(self, digest: str) -> list[tuple[NodeId, Offer]]:
        """What the nearest neighbours say they have. Raises ModelNotFound when none has anything."""
        trusted = [m for m in holders(self._directory(), digest) if self.barred.get(m.node_id) != m.advert.epoch]
        asked = trusted[: 2 * NEIGHBOURS]
        answers: dict[NodeId, Offer] = {}

        async def ask(node: NodeId) -> None:
            try:
                with trio.fail_after(OFFER_S):
                    stream = await (await self._links.get(node)).open(ask_manifest(digest), bulk=True)
                    try:
                        await stream.end()
                        message = await stream.receive()
                    finally:
                        stream.cancel()
                if message is not None:
                    answers[node] = offer_untrusted(message)
            except BadFrame as error:
                self._bar(node, error.message)
            except (MeshdError, trio.TooSlowError):
                return  # another neighbour will do

        async with trio.open_nursery() as nursery:
            for member in asked:
                nursery.start_soon(ask, member.node_id)
        if not answers:
            raise ModelNotFound(f"no neighbour that can be reached has model {digest}")
        return [(m.node_id, answers[m.node_id]) for m in asked if m.node_id in answers]

    async def _proven(self, digest: str, offers: list[tuple[NodeId, Offer]]) -> list[_Found]:
        """The offers whose manifest belongs to ``digest``."""
        found: list[_Found] = []
        for node, offer in offers:
            try:
                manifest = await trio.to_thread.run_sync(_manifest_of, offer, digest)
            except ModelRefused as error:
                self._bar(node, error.message)
            else:
                found.append(_Found(node, offer, manifest))
            if len(found) == NEIGHBOURS:
                break
        if not found:
            raise ModelNotFound(f"no neighbour offers a sound manifest of model {digest}")
        return found

    # --- what comes ---------------------------------------------------------------------------------------------------

    async def _begin(self, digest: str, found: list[_Found]) -> tuple[IncomingShard, _Found]:
        """The shard with its small files, from the first neighbour whose files are the manifest's."""
        last: MeshdError = ModelNotFound(f"no neighbour gave the files of model {digest}")
        stored = await trio.to_thread.run_sync(self._store.by_digest, digest)
        if stored is not None:
            return await self._begin_with_own(stored, found[0]), found[0]
        for each in found:
            try:
                small = {
                    name: await self._file(each.node, digest, name, size) for name, size in each.offer.files.items()
                }
                base = self._base(each)
                return await trio.to_thread.run_sync(IncomingShard, self._store, base, each.offer.manifest, small), each
            except ModelRefused as error:
                self._bar(each.node, error.message)
                last = error
            except LocalError:
                raise  # this device's disk: no neighbour helps
            except MeshdError as error:  # it is gone, busy or stalled: the next one may not be
                last = error
        raise last

    async def _begin_with_own(self, stored: StoredModel, found: _Found) -> IncomingShard:
        """The shard with the small files that are here already. Where they are not the manifest's any more, nobody lied."""
        small = await trio.to_thread.run_sync(companions_of, stored)
        try:
            return await trio.to_thread.run_sync(
                IncomingShard, self._store, self._base(found), found.offer.manifest, small
            )
        except ModelRefused as error:
            raise ModelRefused(
                f"the copy of {stored.name} in {stored.path} was changed here ({error.message}): put the file back, or "
                f"'meshd rm {stored.name.partition('@')[0]}' and fetch it again"
            ) from error

    async def _file(self, node: NodeId, digest: str, name: str, size: int) -> bytes:
        """One small file of exactly ``size`` bytes."""
        stream: Stream = await (await self._links.get(node)).open(ask_file(digest, name), bulk=True)
        content = bytearray()
        try:
            await stream.end()
            while (message := await _next(stream)) is not None:
                _, at, data = piece_untrusted(message)
                if at != len(content) or len(content) + len(data) > size:
                    raise BadFrame(f"{name} came in pieces that do not fit")
                content += data
        finally:
            stream.cancel()
        if len(content) != size:
            raise BadFrame(f"{name} came with {len(content)} of {size} bytes")
        self.received_bytes += size
        return bytes(content)

    async def _install(
        self, shard: IncomingShard, found: _Found, digest: str, layers: LayerRange | None
    ) -> StoredModel:
        name = await trio.to_thread.run_sync(self._free_name, found)
        await trio.to_thread.run_sync(shard.install, name, layers)
        stored = await trio.to_thread.run_sync(self._store.by_digest, digest)
        if stored is None:
            raise ModelRefused(f"{name} was fetched and is not in the store")
        return stored

    def _free_name(self, found: _Found) -> str:
        """The neighbour's name for the model, unless another model has it here: that one must not be replaced."""
        name, base = found.offer.name, self._base(found)
        taken = self._store.find(name)
        if taken is None or taken.manifest.spec.digest == base:
            return name
        return f"{name[:180]}-{base[:8]}"

    def _keep_qspec(self, stored: StoredModel, content: bytes) -> None:
        path = self._store.partial(f"qspec {stored.manifest.spec.digest}") / QSPEC_FILE
        with disk_errors(self._store.root):
            path.write_bytes(content)
        QspecFile(path, stored.manifest.spec)
        self._store.add_qspec(stored, path)

    @staticmethod
    def _base(found: _Found) -> str:
        """The digest of the files; a variant's own digest names no files."""
        return found.manifest.spec.digest

    def _bar(self, node: NodeId, reason: str) -> None:
        directory = self._directory()
        member = directory.get(node)
        if member is not None:
            self.barred[node] = member.advert.epoch
        label = directory.label(node)
        self._on_event(
            "liar", {"text": f"{label} gave wrong bytes: {reason}", "peer": node, "peer_name": label, "reason": reason}
        )


def holders(directory: Directory, digest: str) -> list[Member]:
    """Who may have the model's files, nearest first; those that run it before those that only enter it."""
    found = [
        member
        for member in directory.peers
        if digest == member.advert.digest
        and member.state in (NodeStatus.ALIVE, NodeStatus.SUSPECT, NodeStatus.DRAINING)
        and member.incompatible is None
    ]
    return sorted(
        found,
        key=lambda m: (m.last_resort, m.advert.layers is None, m.rtt_ms if m.rtt_ms is not None else 1e3, m.node_id),
    )


def _rehearsal(text: str, digest: str) -> Served | None:
    try:
        model = parse_hash_model(text)
    except UsageError:
        return None
    return Served(model.spec, rehearsal=model) if model.digest == digest else None


def _manifest_of(offer: Offer, digest: str) -> Manifest:
    """The offered manifest, if it is that of ``digest`` or of the model of which ``digest`` is a variant."""
    manifest = parse_manifest_untrusted(offer.manifest)
    spec = as_dtype(manifest.spec, offer.dtype) if offer.dtype else manifest.spec
    if spec.digest != digest:
        raise ModelRefused(f"a manifest for digest {manifest.spec.digest} came, {digest} was asked for")
    return manifest


def _names(shard: IncomingShard, held: tuple[LayerRange, ...]) -> set[str]:
    """The tensors a neighbour has. A range beyond the model's end is nothing it could have."""
    layers = shard.manifest.spec.num_layers
    return {name for part in held if part.end <= layers for name in shard.names(part)}


async def _next(stream: Stream) -> Message | None:
    with stalled():
        return await stream.receive()
