"""The lines by which a node says where it is and what it serves: `listening` once, `ready` for each thing it is ready for."""

from __future__ import annotations

from meshd.directory import Directory
from meshd.eventlog import EventLog
from meshd.node.status import settled
from meshd.vocabulary import Endpoint, LayerRange, ModelSpec


class Announcer:
    """``told`` is what it last was ready for, "" before that."""

    def __init__(self, log: EventLog, http: Endpoint, mesh: Endpoint) -> None:
        self.told = ""
        self._log = log
        self._url, self._mesh = f"http://{http}", str(mesh)

    def listening(self, *, alone: bool) -> None:
        """``alone``: no other device can reach it, so the line says how they get in."""
        hint = "loopback only; to form a room with other devices: meshd key new" if alone else None
        text = f"{self._url} mesh {self._mesh}" + (f" ({hint})" if hint else "")
        self._log.emit("listening", text=text, http=self._url, mesh=self._mesh, hint=hint)

    def ready(
        self,
        state: tuple[str, str],
        spec: ModelSpec | None,
        layers: LayerRange | None,
        directory: Directory,
        *,
        expects: bool,
    ) -> None:
        """Say it if ``state`` (state, reason) is one to stay in and this was not said last. ``expects``: see `settled`."""
        what = f"{spec.name if spec else 'no model'} {layers or 'no layers'}"
        if what == self.told or not settled(*state, expects=expects):
            return
        self.told = what
        healthy = sum(member.state == "alive" for member in directory.peers)
        text = f"{what} {self._url} mesh {self._mesh} {healthy} peers healthy"
        # A node that stays an entry looks like one that serves, but for this.
        reason = state[1] if layers is None else ""
        if reason:
            text += f"; {reason}"
        self._log.emit(
            "ready",
            text=text,
            http=self._url,
            mesh=self._mesh,
            layers=layers.json() if layers else None,
            reason=reason or None,
        )
