"""What is decided before anything is done: clones, rings, who may be restarted, which wheels go where."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.election.settings import Settings
from meshd.errors import LocalError, UsageError
from meshd.fleet import agent
from meshd.fleet.clones import Disk, clones, moved
from meshd.fleet.hosts import Device
from meshd.fleet.ledger import Entry, Ledger
from meshd.fleet.rolling import REDUNDANCY_S, alone_with
from meshd.fleet.rotate import barred_id, rings
from meshd.fleet.wheels import ROOT, Cargo, find, fits
from meshd.fleet.work import has_place

ONE, TWO, THREE = Device("one"), Device("two"), Device("three")
ID = "0123456789abcdef" * 2


def test_of_two_disks_with_one_identity_the_known_device_keeps_it() -> None:
    k, other, none = Disk("k"), Disk("other"), Disk("")
    assert clones({ONE: k, TWO: k, THREE: other}, []) == {TWO: "one"}
    assert clones({ONE: k, TWO: k}, [Entry(TWO, identity="k")]) == {ONE: "two"}
    assert clones({ONE: k}, [Entry(THREE, identity="k")]) == {ONE: "three"}
    assert clones({ONE: k, TWO: none}, [Entry(ONE, identity="k")]) == {}
    here, there = Disk("k", ("b8:27:eb:00:00:01",)), Disk("k", ("b8:27:eb:00:00:02",))
    assert clones({ONE: here, TWO: there}, []) == {TWO: "one"}
    assert moved({ONE: here, TWO: there, THREE: none}, []) == {}


def test_a_device_under_another_address_is_no_copy() -> None:
    macs = ("b8:27:eb:00:00:01", "b8:27:eb:00:00:02")
    known = [Entry(THREE, identity="k", macs=macs)]
    for seen in (macs, macs[:1], ("dc:a6:32:00:00:09", macs[1])):  # a USB adapter comes and goes
        assert clones({ONE: Disk("k", seen)}, known) == {}
        assert moved({ONE: Disk("k", seen)}, known) == {ONE: THREE}
    assert moved({ONE: Disk("k", macs), TWO: Disk("k", macs)}, []) == {TWO: ONE}
    assert moved({THREE: Disk("k", macs)}, known) == {}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True), st.sampled_from("abcd"))
def test_devices_one_step_apart_know_each_others_first_key(old: list[str], new: str) -> None:
    if old == [new]:
        return
    first = next(line for line in old if line != new)
    steps = [[first], *rings(old, new)]
    for before, after in itertools.pairwise(steps):
        assert before[0] in after
        assert after[0] in before
    assert steps[-1] == [new]


def test_a_node_is_barred_by_any_of_its_names(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, [Entry(ONE, ID, "n1"), Entry(TWO, "f" * 32, "n2"), Entry(THREE)])
    assert barred_id(ledger, "one") == barred_id(ledger, "n1") == barred_id(ledger, ID) == (ID, ONE)
    assert barred_id(ledger, "e" * 32) == ("e" * 32, None)
    for word in ("three", "nobody"):
        with pytest.raises(UsageError, match=word):
            barred_id(ledger, word)


def test_a_room_whose_nodes_have_all_just_been_restarted_is_given_time_to_move() -> None:
    election = Settings()
    looks_again_s = 1.25 * election.move_every_s + election.claim_s + election.hold_answer_s
    assert election.cool_down_s + looks_again_s + 60 <= REDUNDANCY_S  # to fetch and load


@pytest.mark.parametrize(
    ("stages", "layers", "alone"),
    [
        ([[0, 15, 2], [15, 30, 2]], [0, 15], []),
        ([[0, 15, 1], [15, 30, 2]], [15, 30], []),
        ([[0, 15, 1], [15, 30, 2]], [0, 20], [[0, 15]]),
        ([[0, 10, 1], [10, 20, 1], [20, 30, 1]], [5, 15], [[5, 10], [10, 15]]),
        ([[0, 30, 1]], None, []),
    ],
)
def test_nobody_is_restarted_who_alone_holds_a_layer(
    stages: list[list[int]], layers: list[int] | None, alone: list[list[int]]
) -> None:
    assert alone_with({"stages": stages}, layers) == alone


@pytest.mark.parametrize(
    ("state", "reason", "settled"),
    [
        ("ready", None, True),
        ("loading", "", False),
        ("failed", "no such model", False),
        ("observer", "holds no layers yet", False),
        ("observer", "no model named, and none in the room yet", False),
        ("observer", "too small for one layer of m: 3 MB short (5 MB needed)", True),
    ],
)
def test_an_entry_is_told_from_a_node_that_waits(state: str, reason: str | None, settled: bool) -> None:
    assert has_place({"state": state, "reason": reason}) is settled


def test_the_ledger_remembers(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    ledger = Ledger.load(folder)
    ledger.flags = "--no-mdns"
    ledger.put(Entry(ONE, ID, "n1"))
    ledger.put(Entry(Device("two", "pi", 22, "0..15", 900, ("--threads", "2"))))
    ledger.put(Entry(ONE, ID, "renamed"))
    ledger.save()
    ledger.set_key(["mesh-key-v1:A"])
    ledger.set_rotation({"new": "mesh-key-v1:B"})
    again = Ledger.load(folder)
    assert (again.entries, again.flags) == (ledger.entries, "--no-mdns")
    assert again.entry(ONE).name == "renamed"
    assert (again.key, again.rotation) == (["mesh-key-v1:A"], {"new": "mesh-key-v1:B"})
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "fleet.json").write_text("{")
    with pytest.raises(LocalError, match="damaged"):
        Ledger.load(folder)


# --- wheels -----------------------------------------------------------------------------------------------------------


def a_wheel(path: Path, *, record: str, date: tuple[int, int, int, int, int, int] = (2020, 1, 1, 0, 0, 0)) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("meshd-1.2.dist-info/RECORD", date), record)
    return path


def test_a_stamp_names_the_content(tmp_path: Path) -> None:
    one = a_wheel(tmp_path / "meshd-1.2-py3-none-any.whl", record="x")
    stamp = Cargo(one).stamp(engine=True, system_site_packages=False)
    assert stamp.startswith("1.2-")
    a_wheel(one, record="x", date=(2021, 1, 1, 0, 0, 0))
    assert Cargo(one).stamp(engine=True, system_site_packages=False) == stamp
    assert Cargo(one).stamp(engine=False, system_site_packages=False) != stamp
    a_wheel(one, record="y")
    assert Cargo(one).stamp(engine=True, system_site_packages=False) != stamp


@pytest.mark.parametrize(
    ("wheel", "arch", "goes"),
    [
        ("meshd-1.2-py3-none-any.whl", "armv7l", True),
        ("torch-2.9-cp311-cp311-manylinux_2_28_x86_64.whl", "x86_64", True),
        ("torch-2.9-cp311-cp311-manylinux_2_28_x86_64.whl", "aarch64", False),
        ("torch-2.9-cp311-cp311-manylinux_2_28_aarch64.whl", "aarch64", True),
        ("torch-2.9-cp311-none-macosx_11_0_arm64.whl", "arm64", True),
        ("psutil-7-cp36-abi3-manylinux_2_12_i686.manylinux2010_i686.whl", "x86_64", False),
    ],
)
def test_a_device_gets_no_wheels_of_other_machines(wheel: str, arch: str, goes: bool) -> None:
    assert fits(wheel, arch) is goes


def test_a_folder_without_a_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no wheels"):
        find(tmp_path, tmp_path)
    for number in (1, 2):
        a_wheel(tmp_path / f"meshd-{number}-py3-none-any.whl", record="x")
    with pytest.raises(LocalError, match="2 wheels of meshd"):
        find(tmp_path, tmp_path)


# --- the program that a device runs -----------------------------------------------------------------------------------


def answer(request: dict[str, object], home: Path, python: str | None = None) -> tuple[dict[str, object] | None, str]:
    """What a device answers, without ssh in between."""
    ended = subprocess.run(
        ["sh", "-c", f"echo welcome; {agent.remote_command(python)}"],
        input=agent.message(request),
        capture_output=True,
        check=False,
        timeout=60,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )
    return agent.answer_in(ended.stdout.decode()), ended.stderr.decode()


def test_a_bare_python_runs_the_devices_half(tmp_path: Path) -> None:
    found, complaint = answer({"do": "facts", "preparations": []}, tmp_path, f"{sys.base_prefix}/bin/python3")
    assert found is not None, complaint
    facts = json.loads(json.dumps(found["facts"]))
    assert (facts["stamp"], facts["key"], facts["identity"], facts["running"], facts["undo"]) == ("", "", "", None, [])
    assert facts["ram_mb"] > 0
    assert list(tmp_path.iterdir()) == []  # looking changes nothing


def test_a_device_without_python_says_so(tmp_path: Path) -> None:
    found, _ = answer({"do": "facts", "preparations": []}, tmp_path, "/no/such/python")
    assert found is not None
    assert "no Python 3.11" in str(found["trouble"])


def test_what_a_login_shell_prints_is_no_answer() -> None:
    assert agent.answer_in("welcome\n\nlast login yesterday\n") is None


# --- what each half may need ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "more"),
    [("fleet/device", ("meshd.fleet.device",)), ("fleet", ("meshd.fleet", "meshd.errors", "meshd.vocabulary"))],
)
def test_neither_half_needs_anything_installed(folder: str, more: tuple[str, ...]) -> None:
    wrong = []
    for path in sorted((ROOT / "meshd" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            foreign = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
            wrong += [f"{path.name} imports {name}" for name in foreign if not name.startswith(more)]
    assert wrong == []
