"""Who is to be equipped: from the command line, a list, or a TOML file. Raises UsageError naming the line or the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshd.errors import UsageError
from meshd.vocabulary import LayerRange

_KEYS: Final = frozenset({"host", "user", "port", "layers", "capacity_mb", "flags"})
_DESTINATION: Final = re.compile(
    r"(?:(?P<user>[^@\s:\[\]]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^@:\s\[\]]+))(?::(?P<port>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Device:
    """One machine and what only it is told. ``flags`` are `meshd start`'s; ``layers`` pins a range."""

    host: str
    user: str | None = None
    port: int | None = None
    layers: str | None = None
    capacity_mb: int | None = None
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")

    @property
    def where(self) -> tuple[str, str | None, int | None]:
        """What makes it the same device in two lists."""
        return self.host, self.user, self.port


def parse(text: str) -> Device:
    """``USER@HOST[:PORT]``; the user may be left to ssh's own configuration, IPv6 stands in brackets."""
    found = _DESTINATION.fullmatch(text.strip())
    # A leading dash would be an option to ssh.
    if found is None or (found["host"] or found["six"]).startswith("-") or (found["user"] or "").startswith("-"):
        raise UsageError(f"{text.strip()!r} is not USER@HOST[:PORT]")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"{text.strip()!r}: {port} is no port")
    return Device(found["six"] or found["host"], found["user"], port)


def read_file(path: Path) -> list[Device]:
    """A TOML file (``.toml``) or a list, one device a line, ``#`` comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"-f {path}: {error}") from None
    if path.suffix == ".toml":
        return _from_toml(text, path)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if word := line.partition("#")[0].strip():
            try:
                found.append(parse(word))
            except UsageError as error:
                raise UsageError(f"{path}, line {number}: {error.message}") from None
    return found


def gather(words: Iterable[str], file: Path | None) -> list[Device]:
    """All that were named, each once; what the file says of a device counts for its name on the line too."""
    listed = read_file(file) if file is not None else []
    devices = {device.where: device for device in [parse(word) for word in words]}
    devices |= {device.where: device for device in listed}
    return list(devices.values())


def _from_toml(text: str, path: Path) -> list[Device]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    tables = document.get("device")
    if set(document) - {"device"} or not isinstance(tables, list):
        raise UsageError(f"{path}: expected [[device]] tables and nothing else")
    return [_from_table(table, f"{path}: device {number}") for number, table in enumerate(tables, 1)]


def _from_table(table: Any, where: str) -> Device:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: {table!r} is no [[device]] table")
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r} (known: {', '.join(sorted(_KEYS))})")
    if not isinstance(table.get("host"), str):
        raise UsageError(f"{where}: host is missing")
    named = parse(table["host"])
    user, port = table.get("user", named.user), table.get("port", named.port)
    capacity_mb, layers, flags = table.get("capacity_mb"), table.get("layers"), table.get("flags", [])
    if isinstance(flags, str):
        flags = flags.split()
    for key, value, kind in (
        ("user", user, str),
        ("port", port, int),
        ("capacity_mb", capacity_mb, int),
        ("layers", layers, str),
    ):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(f"{where}: {key} = {value!r} is not {'text' if kind is str else 'a whole number'}")
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        raise UsageError(f'{where}: flags is not text or a list such as ["--threads", "2"]')
    if layers is not None and layers != "auto":
        try:
            LayerRange.parse(layers)
        except ValueError as error:
            raise UsageError(f"{where}: layers: {error}") from None
    return Device(named.host, user, port, layers, capacity_mb, tuple(flags))


def settings_of(flags: Sequence[str], where: str) -> dict[str, str | bool]:
    """`meshd start`'s flags as keys of meshd.toml: ``--kv-reserve 0.3 --no-mdns`` -> kv_reserve, mdns. The values are judged by
    the device's own meshd. Raises UsageError for what is not a flag."""
    found: dict[str, str | bool] = {}
    words = list(flags)
    while words:
        word = words.pop(0)
        if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word):
            raise UsageError(f"{where}: {word!r} is not a flag of meshd start")
        name, has_value, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if has_value:
            found[key] = value
        elif words and not words[0].startswith("--"):
            found[key] = words.pop(0)
        elif key.startswith("no_"):
            found[key.removeprefix("no_")] = False
        else:
            found[key] = True
    return found
