"""What `meshd start` can be told: one table, read from flags, environment, file and defaults, in that order.

A field of `Config` is a flag (``--kv-reserve``), a key of ``meshd.toml`` (``kv_reserve``) and a variable
(``MESHD_KV_RESERVE``); its metadata carries the parser and the help text, so none of the four can drift from the others.
Wrong values and unknown keys raise UsageError naming where they came from (exit 2).

argparse, not typer: this module is in the daemon, which stays small (typer and rich cost 20 MB and 0.2 s).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import platformdirs

from meshd.errors import LocalError, UsageError
from meshd.vocabulary import Endpoint, LayerRange, is_model_name, is_node_name

HTTP_PORT: Final = 8090
MESH_PORT: Final = 8091
_DTYPES: Final = ("bf16", "fp16", "fp32", "int8")


def _endpoint(default_port: int) -> Callable[[str], Endpoint]:
    def parse(text: str) -> Endpoint:
        if "://" in text:
            raise ValueError(f"{text!r} is a URL; give HOST:PORT")
        return _named(Endpoint.parse(text, default_port))

    return parse


def _named(endpoint: Endpoint) -> Endpoint:
    """A host that can be asked for: an empty or endless part of a name is no error of the resolver but one of its own kind."""
    try:
        endpoint.host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{endpoint.host[:200]!r} cannot be the name of a host") from None
    return endpoint


def _advertised(text: str) -> Endpoint:
    """Told to peers as it is: an address that stands for all of a device is to each of them its own."""
    endpoint = _endpoint(0)(text)
    try:
        nowhere = ipaddress.ip_address(endpoint.host.partition("%")[0]).is_unspecified
    except ValueError:
        nowhere = False
    if nowhere:
        raise ValueError(f"{text!r} is no address that a peer can reach; give the one of an interface, or leave it out")
    return endpoint


def _join_list(text: str) -> tuple[Endpoint, ...]:
    """Mesh addresses. A URL or the HTTP port is what people paste by mistake: say which port is meant."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if "://" in part:
            raise ValueError(f"{part!r} is a URL; give the mesh address, HOST:{MESH_PORT} by default")
        endpoint = _named(Endpoint.parse(part, MESH_PORT))
        if endpoint.port == HTTP_PORT:
            raise ValueError(f"{part!r} is the HTTP port; give the mesh port, {endpoint.host}:{MESH_PORT} by default")
        found.append(endpoint)
    if not found:
        raise ValueError("no address given")
    return tuple(found)


def _layers(text: str) -> LayerRange | None:
    return None if text.strip() == "auto" else LayerRange.parse(text)


def _model(text: str) -> str:
    # The hash model's options (layer_mb and so on) are not part of its name; its own parser judges them.
    if text.startswith("hash:"):
        return text
    if not is_model_name(text):
        raise ValueError(
            f"{text!r} is not a model name; a folder or a .gguf is pulled first (meshd pull), which prints its name"
        )
    _, variant, dtype = text.partition("@")
    if variant and dtype not in _DTYPES:
        raise ValueError(f"{text!r}: {dtype!r} is not one of {', '.join(_DTYPES)}")
    return text


def _name(text: str) -> str:
    if not is_node_name(text):
        raise ValueError(f"{text!r} is not a name (letters, digits, dot, dash, underscore; at most 64)")
    return text


def _bool(text: str) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in value:
        raise ValueError(f"{text!r} is not true or false")
    return value[text.strip().lower()]


def _whole(low: int, high: int = 1 << 40) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise ValueError(f"{text} is not between {low} and {high}")
        return number

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not low <= number <= high:  # also false for nan
            raise ValueError(f"{text} is not between {low:g} and {high:g}")
        return number

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def _device(text: str) -> str:
    if text in ("cuda", "mps"):
        raise ValueError(f"{text!r}: the engine computes on the CPU only as yet; leave it at auto, or say cpu")
    return _choice("auto", "cpu")(text)


def _path(text: str) -> Path:
    if not text or "\0" in text:  # "" would be the folder that the daemon happens to start in
        raise ValueError(f"{text!r} is not a path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~nobody/x
        raise ValueError(f"{text!r}: {error}") from None


def is_there(path: Path, flag: str) -> bool:
    """There is such a file. Raises LocalError naming the flag where this user may not even look."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LocalError(f"{flag}: {path} cannot be looked at: {error.strerror or error}") from None
    return True


def _option(parse: Callable[[str], Any], default: Any, metavar: str, text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": text})


def default_state_dir() -> Path:
    """Where state belongs on this platform."""
    return Path(platformdirs.user_data_dir("meshd", appauthor=False))


def default_name() -> str:
    """The host's name with what a node name may not hold replaced."""
    raw = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return raw[:64] or "node"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one daemon. None means: decided at start from the machine or the room."""

    model: str | None = _option(
        _model, None, "M", "model to serve; absent from the store = permission to fetch it (default: the room's)"
    )
    layers: LayerRange | None = _option(_layers, None, "A..B|auto", "pinned layer range (default: auto, elected)")
    offline: bool = _option(_bool, False, "", "fetch weights from neighbours only, never from the model's source")
    capacity_mb: int | None = _option(
        _whole(0), None, "N", "memory for weights and KV in MB (2^20), without the runtime (default: measured)"
    )
    target_replicas: int = _option(_whole(1, 64), 2, "N", "how many replicas each layer should have")
    kv_reserve: float = _option(_number(0, 0.9), 0.2, "F", "share of the capacity kept for KV")
    lane_fraction: float = _option(
        _number(0, 1), 0.6, "F", "hold the whole model when it is below this share of capacity"
    )
    http: Endpoint | None = _option(
        _endpoint(HTTP_PORT), None, "HOST:PORT", "HTTP address (default: 127.0.0.1:8090; with a mesh key 0.0.0.0:8090)"
    )
    mesh: Endpoint | None = _option(
        _endpoint(MESH_PORT),
        None,
        "HOST:PORT",
        "UDP gossip and TCP links (default: 127.0.0.1:8091; with a mesh key 0.0.0.0:8091)",
    )
    advertise: Endpoint | None = _option(
        _advertised, None, "HOST[:PORT]", "address that peers reach this node at (default: per interface)"
    )
    join: tuple[Endpoint, ...] = _option(_join_list, (), "HOST:PORT[,...]", "mesh addresses of nodes to join")
    next: tuple[Endpoint, ...] = _option(
        _join_list, (), "HOST:PORT[,...]", "static next-stage replicas (mesh addresses)"
    )
    mdns: bool = _option(_bool, True, "", "find peers on the local network by mDNS")
    mesh_key: Path | None = _option(_path, None, "FILE", "mesh key file (default: STATE-DIR/mesh.key)")
    insecure_lan: bool = _option(_bool, False, "", "allow other than loopback addresses without a mesh key")
    api_key_file: Path | None = _option(_path, None, "FILE", "more API keys, a line each: infer|read|admin KEY")
    open_read: bool = _option(_bool, False, "", "reading endpoints need no key")
    admit: bool = _option(_bool, True, "", "probe a peer's shard before routing to it")
    kv: str = _option(
        _choice("sticky", "stateless"),
        "sticky",
        "sticky|stateless",
        "keep a session on its route, or re-route each token",
    )
    device: str = _option(_device, "auto", "auto|cpu|cuda|mps", "where the layers run (cuda, mps: not built yet)")
    dtype: str = _option(
        _choice("auto", *_DTYPES),
        "auto",
        "auto|bf16|fp16|fp32|int8",
        "arithmetic (auto: the checkpoint's)",
    )
    threads: int | None = _option(_whole(1, 1024), None, "N", "compute threads (default: cores - 1)")
    deterministic: bool = _option(_bool, True, "", "bit-equal answers alone, batched and replayed")
    context: int | None = _option(_whole(16), None, "N", "longest prompt + answer in tokens (default: the model's)")
    max_sessions: int = _option(_whole(1, 65536), 64, "N", "sessions with state at once")
    max_queue: int = _option(_whole(1, 65536), 32, "N", "steps waiting beyond a batch before new sessions are refused")
    max_batch: int | None = _option(_whole(1, 4096), None, "N", "sessions in one step (default: max-sessions)")
    prefix_cache_mb: int | None = _option(
        _whole(0), None, "N", "prefix cache size, 0 = off (default: part of the KV reserve)"
    )
    prefix_cache_ttl: float = _option(_number(0, 1e9), 3600.0, "S", "seconds an unused prefix is kept")
    drain_battery: int = _option(
        _whole(0, 100), 15, "N", "hand work over below so many percent of battery without mains, 0 = never"
    )
    route_explore_share: float = _option(_number(0, 1), 0.3, "F", "share of requests that scout a route")
    route_weight_alpha: float = _option(
        _number(0, 100), 1.0, "F", "exponent of speed when choosing among proven routes"
    )
    route_stats_half_life: float = _option(_number(1, 1e9), 600.0, "S", "half-life of a route's samples in seconds")
    route_min_sample_tokens: int = _option(_whole(1, 1 << 20), 8, "N", "shorter answers are no sample")
    route_seed: int | None = _option(_whole(0), None, "N", "fixed seed for route choice (for tests)")
    preset: str = _option(_choice("room", "lan", "test"), "room", "room|lan|test", "gossip timing")
    detector: str = _option(_choice("swim", "window"), "swim", "swim|window", "failure detector")
    name: str = _option(_name, "", "TEXT", "label of this node (default: host name)")
    state_dir: Path | None = _option(
        _path, None, "DIR", "identity, epoch, peers, models, statistics (default: the platform's)"
    )
    config: Path | None = _option(_path, None, "FILE", "settings file (default: STATE-DIR/meshd.toml if there)")
    event_log: str = _option(_choice("json", "text"), "text", "json|text", "form of the event log on stdout")
    log_level: str = _option(
        _choice("debug", "info", "warning", "error"), "info", "debug|info|warning|error", "least severity logged"
    )

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.state_dir if self.state_dir is not None else default_state_dir()

    @property
    def batch(self) -> int:
        """Sessions in one step of the engine."""
        return self.max_batch if self.max_batch is not None else self.max_sessions

    @property
    def mesh_key_path(self) -> Path:
        return self.mesh_key if self.mesh_key is not None else self.state / "mesh.key"


_FIELDS: Final = {f.name: f for f in fields(Config)}
_SWITCHES: Final = frozenset(name for name, f in _FIELDS.items() if f.metadata["parse"] is _bool)


def flag_of(key: str) -> str:
    """``kv_reserve`` -> ``--kv-reserve``."""
    return "--" + key.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see meshd start --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="meshd start",
        description="Run this device's node in the foreground until SIGTERM or SIGINT (drain and leave; again: at once).",
        epilog="Each flag is also a key of meshd.toml (with _) and a variable MESHD_FLAG. Flag > variable > file > default.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for key, option in _FIELDS.items():
        text = option.metadata["help"]
        plain = option.default is None or option.default in ((), "") or isinstance(option.default, bool)
        if not plain and "(default" not in text:
            text += f" (default: {option.default})"
        if key in _SWITCHES:
            on_off = f" (default: {'on' if option.default else 'off'})"
            parser.add_argument(flag_of(key), dest=key, action=argparse.BooleanOptionalAction, help=text + on_off)
        else:
            parser.add_argument(
                flag_of(key), dest=key, metavar=option.metadata["metavar"], help=text.replace("%", "%%")
            )
    return parser


def _parse_value(key: str, raw: Any, where: str) -> Any:
    """One value from text or from TOML's own types."""
    option = _FIELDS[key]
    if key in _SWITCHES and isinstance(raw, bool):
        return raw
    text = ",".join(map(str, raw)) if isinstance(raw, list) else str(raw)
    try:
        return option.metadata["parse"](text)
    except ValueError as problem:
        raise UsageError(f"{where}: {problem}") from None


def _from_file(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise UsageError(f"--config: no file {path}") from None
        return {}
    except OSError as problem:
        reason = f"{path} cannot be read: {problem.strerror or problem}"
        if required:
            raise UsageError(f"--config: {reason}") from None
        raise LocalError(f"{reason}; choose another folder with --state-dir") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UsageError(f"{path}: {problem}") from None
    unknown = sorted(set(table) - set(_FIELDS) - {"config"})
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}")
    return {key: _parse_value(key, raw, f"{path}: {key}") for key, raw in table.items()}


def load(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The settings of this start; ``--help`` prints and exits 0 as argparse does.

    Raises UsageError, and LocalError for a key file that is not there and a state folder that cannot be read."""
    given = {key: _parse_value(key, raw, flag_of(key)) for key, raw in vars(_parser().parse_args(argv)).items()}
    env = {
        key: _parse_value(key, environ[f"MESHD_{key.upper()}"], f"MESHD_{key.upper()}")
        for key in _FIELDS
        if environ.get(f"MESHD_{key.upper()}")
    }
    early: Config = replace(Config(), **{**env, **given})
    path = early.config or early.state / "meshd.toml"
    file = _from_file(path, required=early.config is not None)
    return settled(replace(Config(), **{**file, **env, **given}))


def settled(config: Config) -> Config:
    """Fill in what follows from the rest, and refuse what cannot be combined."""
    keyed = is_there(config.mesh_key_path, "--mesh-key" if config.mesh_key is not None else "--state-dir")
    if config.mesh_key is not None and not keyed:
        raise LocalError(f"--mesh-key: no file {config.mesh_key}; make one with `meshd key new`")
    host = "0.0.0.0" if keyed else "127.0.0.1"
    http = config.http or Endpoint(host, HTTP_PORT)
    mesh = config.mesh or Endpoint(host, MESH_PORT)
    for endpoint, flag in ((http, "--http"), (mesh, "--mesh")):
        if not keyed and not endpoint.is_loopback and not config.insecure_lan:
            raise UsageError(
                f"{flag} {endpoint} is not loopback and there is no mesh key: make one with `meshd key new`,"
                " or say --insecure-lan"
            )
    if http.port == mesh.port and http.port and http.host == mesh.host:
        raise UsageError(f"--http and --mesh are both {http}")
    for endpoint in config.join:
        if endpoint.port == http.port and http.port:
            raise UsageError(f"--join: {endpoint} is the HTTP port; give the mesh port, {mesh.port} here")
    return replace(config, http=http, mesh=mesh, name=config.name or default_name())
