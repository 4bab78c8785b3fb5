"""``meshd doctor``: what is wrong or slow in the room, and the command that cures it.

The findings are `meshd.doctor`'s; this module fetches the documents, tries the peers' addresses from here, and prints.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from meshd.cli.room import Json, Url, connect, console
from meshd.cli.tables import headline
from meshd.doctor.diagnosis import diagnose
from meshd.doctor.finding import Documents, Finding, Probe, span
from meshd.doctor.layers import hangs_on
from meshd.vocabulary import Endpoint

FINDINGS: Final = 3
_TRY_S: Final = 2.0
_AT_ONCE: Final = 16
_STYLE: Final = {"error": "red", "warning": "yellow"}


def doctor(
    url: Url = None,
    as_json: Json = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Try every peer's addresses and clock from here.")
    ] = True,
) -> None:
    """What is wrong or slow, and the command that cures it. Exit 0 fine, 3 findings, 1 could not look."""
    with connect(url, timeout_s=10) as room:
        document = room.get("/mesh/room?events=1")
    peers = document["peers"]
    documents = Documents.of(
        document["status"],
        peers,
        document["hive"],
        document["routing"],
        events=document.get("events", ()),
        probes=probes(peers["peers"], peers["self"]) if probe else (),
        t=document.get("t", 0.0),
    )
    found, hanging = diagnose(documents), hangs_on(documents)
    if as_json:
        told = {
            "node": document["status"]["name"],
            "status": document["hive"]["status"],
            "findings": [finding.json() for finding in found],
            "what_if": hanging,
        }
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        console.print(shown(document["hive"], found, hanging))
    if found:
        raise typer.Exit(FINDINGS)


def shown(hive: Mapping[str, Any], found: Iterable[Finding], hanging: Iterable[Mapping[str, Any]]) -> RenderableType:
    """A block a finding, then what would be gone without each node."""
    lines: list[RenderableType] = [headline(hive)]
    for finding in found:
        lines.append(Text(f"\n{finding.severity}: {finding.text}", style=_STYLE[finding.severity]))
        lines.append(Text(f"  {finding.remedy}"))
        lines.append(Text(f"  $ {finding.command}", style="bold"))
    if len(lines) == 1:
        lines.append(Text("nothing is wrong", style="green"))
    lines.append(Text("\nwhat if a node dies"))
    gone = [f"  without {each['name']}: layers {', '.join(map(span, each['layers']))} are gone" for each in hanging]
    if not gone:
        whole = str(hive["status"]).startswith("healthy")
        gone = ["  any one of them: every layer is still there" if whole else "  layers are missing already"]
    return Group(*lines, *(Text(line) for line in gone))


# --- trying -----------------------------------------------------------------------------------------------------------


def probes(peers: Iterable[Mapping[str, Any]], me: Mapping[str, Any] | None) -> list[Probe]:
    """Every living peer tried from here, several at once."""
    living = [peer for peer in peers if peer["state"] in ("alive", "suspect", "draining")]
    off_host = not _loopback(str((me or {}).get("mesh") or ""))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda peer: _probe(peer, off_host), living))


def _probe(peer: Mapping[str, Any], off_host: bool) -> Probe:
    mesh, http = str(peer.get("mesh") or ""), _http_base(peer)
    outcome, offset = ("", None)
    # A page that listens on its own device only is a choice, not a fault.
    if http and not (off_host and _loopback(http.removeprefix("http://"))):
        outcome, offset = _try_http(http)
    return Probe(str(peer["name"]), http=outcome, mesh=_try_tcp(mesh) if mesh else "", clock_offset_s=offset)


def _http_base(peer: Mapping[str, Any]) -> str:
    """Where its HTTP is: what listens everywhere is reached where its links are."""
    try:
        http = Endpoint.parse(str(peer.get("http") or "").removeprefix("http://"))
        host = Endpoint.parse(str(peer.get("mesh") or "")).host if http.host in ("0.0.0.0", "::") else http.host
    except ValueError:
        return ""
    return f"http://{Endpoint(host, http.port)}"


def _try_http(base: str) -> tuple[str, float | None]:
    try:
        answer = httpx.get(f"{base}/healthz", timeout=_TRY_S, trust_env=False)
        date = answer.headers.get("date")
        return "ok", None if date is None else parsedate_to_datetime(date).timestamp() - time.time()
    except httpx.TimeoutException:
        return "timeout", None
    except httpx.ConnectError as error:
        return "refused" if "refused" in str(error) else str(error), None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:  # its address, its answer, its date
        return str(error) or type(error).__name__, None


def _try_tcp(mesh: str) -> str:
    try:
        endpoint = Endpoint.parse(mesh)
        with socket.create_connection((endpoint.host, endpoint.port), timeout=_TRY_S):
            return "ok"
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _loopback(address: str) -> bool:
    try:
        return Endpoint.parse(address).is_loopback
    except ValueError:
        return False
