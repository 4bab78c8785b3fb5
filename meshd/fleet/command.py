"""The command line of `deploy/mass-equip`. Exit status: 0 done, 1 some device failed (listed), 2 wrong usage."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from meshd.errors import LocalError, MeshdError, UsageError
from meshd.fleet.equip import Equipping, Wish
from meshd.fleet.hosts import Device, gather, settings_of
from meshd.fleet.ledger import Ledger, alone, default_folder
from meshd.fleet.outcome import document, table
from meshd.fleet.rotate import Rotation, barred_id
from meshd.fleet.ssh import DeviceFailed, Options, SshSession
from meshd.fleet.upgrade import Upgrade
from meshd.fleet.wheels import find
from meshd.fleet.work import Fleet, Worker, has_place, tell

_COMMANDS = ("equip", "status", "upgrade", "remove", "rotate-key")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see mass-equip --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mass-equip",
        usage="mass-equip [status|upgrade|remove|rotate-key] [USER@HOST[:PORT] ...] [-f FILE] [options]",
        description="Makes machines that answer to SSH into nodes of one room, and looks after them. Without a command: equip."
        " Without devices: all that were equipped from here.",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="USER@HOST[:PORT]", help="devices; the first word may be a command")
    parser.add_argument("-f", dest="file", type=Path, metavar="FILE", help="a list, or [[device]] tables (.toml)")
    parser.add_argument("--model", metavar="M", help="what the room serves (default: as before)")
    parser.add_argument(
        "--flags", metavar="TEXT", help="flags of meshd start for all devices, in one word (default: as before)"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install from these wheels, without the network")
    parser.add_argument(
        "--engine", action=argparse.BooleanOptionalAction, help="with torch (default: where it can be used)"
    )
    parser.add_argument(
        "--system-site-packages", action="store_true", help="use the device's own torch (Jetson) and the like"
    )
    parser.add_argument(
        "--python", metavar="PATH", help="the Python to use there (default: the first of at least 3.11)"
    )
    parser.add_argument("--jump", metavar="HOST", help="reach the devices through this one (ssh -J)")
    parser.add_argument("-i", dest="identity", type=Path, metavar="FILE", help="the SSH key to use")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="devices at a time (default: 8)")
    parser.add_argument(
        "--wait", type=float, default=600, metavar="S", help="how long a device may take to serve (600)"
    )
    parser.add_argument("--fleet", type=Path, metavar="DIR", help=f"what is remembered (default: {default_folder()})")
    parser.add_argument("--dry-run", action="store_true", help="show every change, make none")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--accept-gap", action="store_true", help="restart a device although it alone holds some layers"
    )
    parser.add_argument(
        "--except", dest="barred", metavar="NODE", help="rotate-key: bar this node and give it no new key"
    )
    parser.add_argument(
        "--grace", type=float, default=10, metavar="S", help="rotate-key: how long clients may use the old key (10)"
    )
    parser.add_argument("--purge", action="store_true", help="remove: identity and models too")
    parser.add_argument("--forget", action="store_true", help="remove: forget a device that does not answer, too")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run; the exit status. Errors are one line on stderr."""
    try:
        return _run(argv)
    except MeshdError as error:
        sys.stderr.write(f"mass-equip: {error.message}\n")
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:  # such as no room for the wheels
        sys.stderr.write(f"mass-equip: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    command = options.words.pop(0) if options.words[:1] and options.words[0] in _COMMANDS else "equip"
    if options.parallel < 1:
        raise UsageError("--parallel: at least 1")
    if options.barred and command != "rotate-key":
        raise UsageError("--except: only with rotate-key")
    folder = options.fleet or default_folder()
    with contextlib.nullcontext() if options.dry_run or command == "status" else alone(folder):
        return _with_ledger(command, options, Ledger.load(folder))


def _with_ledger(command: str, options: argparse.Namespace, ledger: Ledger) -> int:
    devices = [_known(ledger, device) for device in gather(options.words, options.file)] or ledger.devices
    if not devices:
        raise UsageError("no device is named, and none was equipped from here yet; see mass-equip --help")
    options.flags = ledger.flags if options.flags is None else options.flags
    _check_flags(options, devices)
    barred, lost = barred_id(ledger, options.barred) if options.barred else ("", None)
    if command == "rotate-key":
        named = {device.where for device in devices}
        devices += [
            device for device in ledger.devices if device.where not in named
        ]  # whoever lacks the new key is lost
        devices = [device for device in devices if lost is None or device.where != lost.where]
    with SshSession(Options(options.jump, options.identity, options.python)) as session, _place() as place:
        fleet = Fleet(devices, session.asker, ledger, parallel=options.parallel, wait_s=options.wait)
        stopped = ""
        try:
            if command == "equip":
                _equip(fleet, session, options, place)
            elif command == "upgrade":
                Upgrade(fleet, _wish(options), find(options.wheels, place), place).run()
            elif command == "rotate-key":
                Rotation(fleet, barred, grace_s=options.grace, dry_run=options.dry_run).run()
            elif command == "remove":
                _remove(fleet, options)
            else:
                _status(fleet)
        except LocalError as error:
            stopped = error.message
        if lost is not None and not stopped and not options.dry_run:
            ledger.forget(lost)
            ledger.save()
        return _report(command, fleet, options, stopped)


def _known(ledger: Ledger, device: Device) -> Device:
    """A device that is named without settings keeps those that it was given before."""
    bare = Device(device.host, device.user, device.port)
    return ledger.entry(device).device if device == bare else device


def _check_flags(options: argparse.Namespace, devices: Sequence[Device]) -> None:
    try:
        words = shlex.split(options.flags)
    except ValueError as error:  # a quote that is not closed
        raise UsageError(f"--flags: {error}") from None
    settings_of(words, "--flags")
    for device in devices:
        settings_of(device.flags, f"{device}: flags")


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mass-equip-") as folder:
        yield Path(folder)


def _wish(options: argparse.Namespace) -> Wish:
    return Wish(
        model=options.model,
        flags=tuple(shlex.split(options.flags)),
        engine=options.engine,
        offline=options.wheels is not None,
        system_site_packages=options.system_site_packages,
        dry_run=options.dry_run,
        accept_gap=options.accept_gap,
    )


def _equip(fleet: Fleet, session: SshSession, options: argparse.Namespace, place: Path) -> None:
    mine = {worker.device.where for worker in fleet.workers}
    others = [device for device in fleet.ledger.devices if device.where not in mine]
    guides = Fleet(others, session.asker, fleet.ledger).workers
    if not options.dry_run:
        fleet.ledger.flags = options.flags
    Equipping(fleet, guides, _wish(options), find(options.wheels, place), place).run()


def _status(fleet: Fleet) -> None:
    def look(worker: Worker) -> None:
        facts = worker.ask("facts", preparations=[])["facts"]
        seen = worker.ask("look")
        worker.outcome.facts |= {"service": facts["service"], "privilege": facts["privilege"], "stamp": facts["stamp"]}
        if facts["boot_warning"]:
            worker.outcome.warnings.append(facts["boot_warning"])
        if "status" not in seen:
            raise DeviceFailed(seen["silent"])
        tell(worker, seen, facts)
        worker.outcome.facts["hive"] = seen["hive"]["status"]
        if not has_place(seen["status"]):
            raise DeviceFailed(f"the node is {seen['status']['state']}: {seen['status']['reason']}")

    fleet.each(look)


def _remove(fleet: Fleet, options: argparse.Namespace) -> None:
    def remove(worker: Worker) -> None:
        if options.dry_run:
            facts = worker.ask("facts", preparations=[])["facts"]
            worker.outcome.changes += [f"undo {name}" for name in facts["undo"]]
            worker.outcome.changes.append("stop meshd, remove it, its boot service, its settings and the mesh key")
            return
        worker.doing("removing")
        for name in worker.ask("remove", purge=options.purge)["undone"]:
            worker.did(f"undid {name}")
        worker.did("removed")
        fleet.ledger.forget(worker.device)

    for worker in fleet.workers:  # one after another: what it held is taken over meanwhile
        fleet.each(remove, [worker])
        if options.forget and not options.dry_run:
            fleet.ledger.forget(worker.device)
    fleet.ledger.save()


def _report(command: str, fleet: Fleet, options: argparse.Namespace, stopped: str) -> int:
    failed = sum(bool(outcome.error) for outcome in fleet.outcomes)
    changed = sum(bool(outcome.changes) for outcome in fleet.outcomes)
    lines = [table(fleet.outcomes, dry_run=options.dry_run, stopped=bool(stopped))]
    if options.json:
        lines = [document(command, fleet.outcomes, dry_run=options.dry_run, stopped=stopped or None)]
    elif changed or failed:
        what = "would change" if options.dry_run else "changed"
        lines.append(f"{len(fleet.outcomes)} devices: {changed} {what}, {failed} failed")
    elif command != "status" and not stopped:
        lines.append("nothing to change")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if stopped and not options.json:
        sys.stderr.write(f"mass-equip: {stopped}\n")
    return 1 if failed or stopped else 0
