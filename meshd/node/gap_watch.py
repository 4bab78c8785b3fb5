"""The alarm of a room: `gap_critical` when layers of the model lose their last replica, `covered` when all are back.

A room that is only forming has gaps too; nobody is told of those.
"""

from __future__ import annotations

from meshd.directory import Directory
from meshd.eventlog import EventLog
from meshd.routing.candidates import missing
from meshd.vocabulary import LayerRange, ModelSpec


class GapWatch:
    """Looks at every new directory. ``look`` is cheap where nothing that serves has changed."""

    def __init__(self, log: EventLog) -> None:
        self._log: EventLog | None = log
        self._digest = ""
        self._version = -1
        self._whole = False  # since this model is served all layers were held once
        self._gaps: list[LayerRange] = []

    def stop(self) -> None:
        """This node leaves: that its own layers go is no alarm here, and whoever stays tells of it."""
        self._log = None

    def look(self, directory: Directory, spec: ModelSpec | None) -> None:
        """``spec``: the model that this node serves, if any."""
        if spec is None or (directory.version, spec.digest) == (self._version, self._digest):
            return
        if spec.digest != self._digest:
            self._whole, self._gaps = False, []
        self._version, self._digest = directory.version, spec.digest
        held = [member.advert.layers for member in directory.holders(spec.digest)]
        gaps = missing((layers for layers in held if layers is not None), LayerRange(0, spec.num_layers))
        self._tell(gaps, spec)
        self._gaps = gaps
        self._whole = self._whole or not gaps

    def _tell(self, gaps: list[LayerRange], spec: ModelSpec) -> None:
        if self._log is None or not self._whole or gaps == self._gaps:
            return
        if not gaps:
            self._log.emit("covered", text=f"every layer of {spec.name} has a replica again", model=spec.name)
            return
        ranges = ", ".join(map(str, gaps))
        self._log.emit(
            "gap_critical",
            level="error",
            text=f"no replica of layers {ranges} of {spec.name} is left: start a device that holds them",
            model=spec.name,
            missing=[gap.json() for gap in gaps],
        )
