"""Each thing that can be wrong is found, alone, with the command that cures it; a healthy room has none."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from meshd.doctor.finding import Documents, Finding, Probe
from meshd.doctor.layers import hangs_on
from meshd.vocabulary import BARRED
from tests.doctor.documents import findings, healthy, hive, peer


def changed(index: int, status: dict[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    """The healthy room with one node changed."""
    nodes = healthy()
    nodes[index] = {**nodes[index], **more, "status": {**nodes[index]["status"], **(status or {})}}
    return nodes


def only(found: list[Finding]) -> Finding:
    assert [finding.code for finding in found] == [found[0].code], found
    finding = found[0]
    assert finding.text
    assert finding.remedy
    assert shlex.split(finding.command)
    return finding


def test_a_healthy_room_has_no_findings() -> None:
    assert findings(probes=tuple(Probe(f"n{i}", "ok", "ok", 0.4) for i in (2, 3, 4))) == []


MISSING = hive(status="broken: layers 15..30 missing", missing=[[15, 30]])
ON_BATTERY = {"on_ac": False, "battery_pct": 80, "temp_c": 60.0}

# code, the room, what the command must hold, who is named
CASES: list[tuple[str, Callable[[], list[Finding]], str, tuple[str, ...]]] = [
    ("no_model", lambda: findings(of=hive(model=None, digest=None, status="no model")), "--model", ()),
    ("missing_layers", lambda: findings(healthy()[::2], of=MISSING), "meshd start --model tiny --layers 15..30", ()),
    (
        "missing_layers",
        lambda: findings(of={**MISSING, "loading": [{"name": "n4", "layers": [15, 30], "progress": 0.5}]}),
        "meshd wait --ready",
        ("n4",),
    ),
    (
        "missing_layers",
        lambda: findings(changed(3, state="draining")[:4:3], of=MISSING),
        "meshd resume --url http://10.0.0.4:8090",
        ("n4",),
    ),
    (
        "single_replica",
        lambda: findings(changed(3, state="draining"), of=hive(single=[[15, 22, "n2"], [22, 30, "n2"]])),
        "meshd resume --url http://10.0.0.4:8090",
        ("n2", "n4"),
    ),
    (
        "single_replica",
        lambda: findings(of=hive(status="healthy (no redundancy)", single=[[15, 22, "n4"], [22, 30, "n4"]])),
        "meshd start --model tiny --layers 15..30 --join 10.0.0.1:8091",
        ("n4",),
    ),
    (
        "not_admitted",
        lambda: findings(
            changed(1, admitted=False, admission="off by 12 %"), of=hive(not_admitted=[{"name": "n2", "reason": "off"}])
        ),
        "meshd drain --url http://10.0.0.2:8090 && meshd rm tiny && meshd pull tiny",
        ("n2",),
    ),
    (
        "failed_node",
        lambda: findings(status={"name": "n1", "state": "failed", "reason": "'nope' cannot be pulled"}),
        "meshd status --url http://10.0.0.1:8090 --watch",
        ("n1",),
    ),
    (
        "not_admitted",
        lambda: findings(
            changed(1, admitted=False, model="tiny@int8"), of=hive(not_admitted=[{"name": "n2", "reason": "off"}])
        ),
        "&& meshd rm tiny && meshd pull tiny",
        ("n2",),
    ),
    ("one_way_link", lambda: findings(changed(2, one_way=True)), "sudo ufw allow 8091", ("n3",)),
    ("no_mdns", lambda: findings(status={"mdns": "unavailable: no socket"}), "meshd start --join HOST:8091", ()),
    ("no_mdns", lambda: findings(healthy()[:1], status={"mdns": "on, no peers heard"}), "--join HOST:8091", ()),
    (
        "loopback_only",
        lambda: findings([peer("n1", [0, 30], mesh="127.0.0.1:8091")], status={"mdns": "off"}),
        "meshd key new",
        (),
    ),
    ("version_mix", lambda: findings(changed(1, version="1.10.0")), "git pull && pip install", ("n1", "n3", "n4")),
    (
        "incompatible",
        lambda: findings(changed(3, incompatible="speaks wire version 3")),
        "git pull && pip install",
        ("n4",),
    ),
    ("slow_hop", lambda: findings(changed(1, layer_ms=5.0)), "--layers 15..18", ("n2",)),
    ("slow_hop", lambda: findings(changed(1, rtt_ms=400.0)), "ping -c 20 10.0.0.2", ("n2",)),
    ("jammed_node", lambda: findings(changed(1, {"jammed": True})), "meshd drain --url http://10.0.0.2:8090", ("n2",)),
    (
        "wrong_clock",
        lambda: findings(probes=(Probe("n2", "ok", "ok", -7200.0), Probe("n3", "ok", "ok", 0.0))),
        "timedatectl set-ntp true",
        ("n2",),
    ),
    (
        "wrong_clock",
        lambda: findings(probes=tuple(Probe(f"n{i}", "ok", "ok", 7200.0) for i in (2, 3, 4))),
        "timedatectl set-ntp true",
        ("this device",),
    ),
    ("low_memory", lambda: findings(changed(1, {"ram_free_mb": 100})), "meshd start --capacity-mb 1588", ("n2",)),
    (
        "cloned_identity",
        lambda: findings(
            events=[
                {"ev": "conflict", "node": "x", "name": "n1", "t": 940.0, "addresses": ["10.0.0.1:1", "10.0.0.9:1"]}
            ],
            t=1000.0,
        ),
        "meshd identity new",
        ("n1",),
    ),
    (
        "unreachable_address",
        lambda: findings(changed(1, mesh="127.0.0.1:8091")),
        "meshd start --advertise ADDRESS:8091",
        ("n2",),
    ),
    ("unreachable_address", lambda: findings(probes=(Probe("n2", "ok", "refused"),)), "--advertise", ("n2",)),
    (
        "silent_node",
        lambda: findings(changed(1, state="suspect"), probes=(Probe("n2", "refused", "refused"),)),
        "meshd wait --url http://10.0.0.2:8090",
        ("n2",),
    ),
    ("firewall", lambda: findings(probes=(Probe("n2", "ok", "timeout"),)), "sudo ufw allow 8091/tcp", ("n2",)),
    ("firewall", lambda: findings(probes=(Probe("n2", "timeout", "ok"),)), "sudo ufw allow 8090/tcp", ("n2",)),
    ("lone_dtype", lambda: findings(changed(1, dtype="float32")), "meshd start --dtype bf16", ("n2",)),
    ("overclaim", lambda: findings(changed(1, claim_ratio=0.3)), "meshd drain --url http://10.0.0.2:8090", ("n2",)),
    (
        "throttling_on_battery",
        lambda: findings(changed(1, ON_BATTERY, claim_ratio=0.6)),
        "meshd drain --url http://10.0.0.2:8090",
        ("n2",),
    ),
    ("throttling_on_battery", lambda: findings(changed(1, {**ON_BATTERY, "temp_c": 97.0})), "meshd drain", ("n2",)),
]


@pytest.mark.parametrize(
    ("code", "room", "command", "nodes"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_each_trouble_is_found_alone_with_its_cure(
    code: str, room: Callable[[], list[Finding]], command: str, nodes: tuple[str, ...]
) -> None:
    found = only(room())
    assert found.code == code
    assert command in found.command
    assert found.nodes == nodes


def test_the_newest_version_is_the_one_to_have() -> None:
    """1.10 comes after 1.9, and whoever lacks it is named."""
    remedy = only(findings(changed(1, version="1.10.0"))).remedy
    assert "bring n1, n3, n4 to 1.10.0" in remedy


def test_what_is_fine_is_not_found() -> None:
    quiet = (
        findings(changed(1, ON_BATTERY)),  # on battery, and as fast and cool as ever
        findings(changed(1, layer_ms=2.9)),
        findings(changed(1, state="dead", one_way=True, version="0.1", status={"jammed": True})),  # not here any more
        findings(changed(1, dtype="float32")[:2]),  # of two that differ nobody is the odd one
        findings(changed(1, {"ram_free_mb": 0, "ram_total_mb": 0})),  # has told nothing yet
        findings(healthy(), status={"mdns": "off"}),  # found each other without
    )
    assert quiet == ([],) * len(quiet)


def test_who_is_barred_is_not_broken() -> None:
    barred = hive(not_admitted=[{"name": "n2", "reason": BARRED}])
    assert findings(changed(1, admitted=False, admission=BARRED), of=barred) == []


def test_a_clone_that_is_cured_is_found_no_more() -> None:
    """The event stays among the latest for as long as little else happens."""
    told = {"ev": "conflict", "node": "x", "name": "n1", "t": 940.0, "addresses": ["10.0.0.1:1", "10.0.0.9:1"]}
    assert findings(events=[told], t=2000.0) == []


def test_errors_come_first() -> None:
    found = findings(changed(1, {"jammed": True}, claim_ratio=0.2), of=hive(single=[[0, 15, "n1"]]))
    assert [finding.severity for finding in found] == ["error", "warning", "warning"]


def test_a_hostile_name_cannot_leave_its_word_of_a_command() -> None:
    evil = "x; rm -rf ~ $(id) `id` 'q'"
    for room in (
        findings(changed(1, {"jammed": True}, http=evil, name=evil)),
        findings(of=hive(model=evil, missing=[[0, 15]])),
        findings(changed(1, rtt_ms=900.0, mesh=f"{evil}:1")),
    ):
        words = shlex.split(room[0].command)
        assert evil in words
        assert [word for word in words if "rm -rf" in word] == [evil]


def test_without_which_node_what_is_gone() -> None:
    of = hive(single=[[0, 5, "n1"], [5, 15, "n1"], [15, 20, "n2"], [20, 30, "n1"]])
    documents = Documents.of({}, {"self": None, "peers": []}, of, {})
    assert hangs_on(documents) == [
        {"name": "n1", "layers": [[0, 15], [20, 30]]},
        {"name": "n2", "layers": [[15, 20]]},
    ]
