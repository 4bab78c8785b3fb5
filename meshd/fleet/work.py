"""What all commands share: the devices, who asks each, many at a time, and one failure that stops nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Ledger
from meshd.fleet.outcome import Outcome, Progress
from meshd.fleet.ssh import Asker, DeviceFailed

LOOK_EVERY_S: Final = 0.5
UNDECIDED: Final = "yet"  # how the reason of an observer ends that waits for its election, or for a room with a model


@dataclass(slots=True)
class Worker:
    """One device under work."""

    device: Device
    asker: Asker
    outcome: Outcome
    progress: Progress

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        return self.asker.ask(do, **request)

    def doing(self, text: str) -> None:
        self.progress.doing(self.outcome, text)

    def did(self, text: str) -> None:
        self.progress.did(self.outcome, text)


class Fleet:
    """The devices of this command. ``wait_s``: how long a device may take until it serves."""

    def __init__(
        self,
        devices: Iterable[Device],
        ask: Callable[[Device], Asker],
        ledger: Ledger,
        *,
        parallel: int = 8,
        wait_s: float = 600.0,
    ) -> None:
        self.outcomes = [Outcome(device) for device in devices]
        progress = Progress(self.outcomes)
        self.workers = [Worker(outcome.device, ask(outcome.device), outcome, progress) for outcome in self.outcomes]
        self.ledger, self.parallel, self.wait_s = ledger, parallel, wait_s

    @property
    def well(self) -> list[Worker]:
        """Those that have not failed."""
        return [worker for worker in self.workers if not worker.outcome.error]

    def each(self, work: Callable[[Worker], None], workers: Iterable[Worker] | None = None) -> None:
        """Do it on all that are well, `parallel` at a time; who fails is marked and left out from then on."""
        with ThreadPoolExecutor(self.parallel) as pool:
            list(pool.map(lambda worker: attempt(work, worker), self.well if workers is None else list(workers)))


def attempt(work: Callable[[Worker], None], worker: Worker) -> None:
    """Do it; a failure is the device's outcome."""
    try:
        work(worker)
    except DeviceFailed as failed:
        worker.progress.failed(worker.outcome, str(failed))
    except (
        KeyError,
        TypeError,
        ValueError,
        OSError,
    ) as error:  # an answer of another version, or a file that is in the way
        worker.progress.failed(worker.outcome, f"unexpected: {type(error).__name__}: {error}")


def until(condition: Callable[[], Any], wait_s: float, lacking: Callable[[], str]) -> Any:
    """Ask until it is so; its value. Raises DeviceFailed with what is lacking."""
    give_up = time.monotonic() + wait_s
    while not (value := condition()):
        if time.monotonic() >= give_up:
            raise DeviceFailed(f"not within {wait_s:g} s: {lacking()}")
        time.sleep(LOOK_EVERY_S)
    return value


def came_up(worker: Worker, *, version: str, before: int | None, wait_s: float) -> dict[str, Any]:
    """Wait until the device's new daemon serves: another process, this version, its own node id. What it says of itself."""
    seen: dict[str, Any] = {}

    def up() -> dict[str, Any] | None:
        seen.clear()
        seen.update(worker.ask("look"))
        fresh = "status" in seen and seen["pid"] != before and seen["status"]["version"] == version
        return seen if fresh and has_place(seen["status"]) else None

    def lacking() -> str:
        if "status" not in seen:
            words = str(seen.get("last_words", "")).strip()
            return f"{seen.get('silent')}; its log ends: {words}" if words else str(seen.get("silent"))
        status = seen["status"]
        if status["version"] != version:
            return f"meshd {status['version']} runs instead of {version}"
        return f"the node is {status['state']}: {status['reason'] or 'no reason given'}"

    return dict(until(up, wait_s, lacking))


def has_place(status: dict[str, Any]) -> bool:
    """It serves layers, or it is settled that it is an entry without any."""
    state, reason = status["state"], status["reason"] or ""
    return state == "ready" or (state == "observer" and not reason.endswith(UNDECIDED))


def tell(worker: Worker, seen: dict[str, Any], facts: dict[str, Any]) -> None:
    """What the report says of a device that answers."""
    status = seen["status"]
    worker.outcome.facts |= {
        "node_id": status["node_id"],
        "name": status["name"],
        "state": status["state"],
        "reason": status["reason"] or None,
        "layers": status["layers"],
        "version": status["version"],
        "model": status["model"],
        "service": facts["service"],
        "privilege": facts["privilege"],
    }
