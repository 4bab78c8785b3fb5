"""The files in deploy/ that people copy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from meshd.config import Config, load
from meshd.fleet.hosts import read_file
from meshd.fleet.settings import settings, text_of

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
OPTIONS = {field.name for field in dataclasses.fields(Config)}


def test_every_line_of_the_settings_example_is_accepted(tmp_path: Path) -> None:
    text = (DEPLOY / "examples/meshd.toml").read_text()
    everything = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    assert everything.count(" = ") > 10
    for content in (text, everything):
        path = tmp_path / "meshd.toml"
        path.write_text(content.replace("/etc/meshd/keys", str(path)))
        (tmp_path / "mesh.key").touch()  # addresses off loopback are refused without one
        assert load(["--config", str(path), "--state-dir", str(tmp_path)], {}).model == "smollm2-135m"


def test_the_fleet_example_is_accepted(tmp_path: Path) -> None:
    devices = read_file(DEPLOY / "examples/fleet.toml")
    assert len(devices) == 4
    for device in devices:  # by the device's meshd, too
        path = tmp_path / "meshd.toml"
        path.write_text(text_of(settings(device, model="m", flags=(), seeds=(), before="")))
        assert load(["--config", str(path), "--state-dir", str(tmp_path)], {}).model == "m"


def test_compose_sets_variables_that_exist() -> None:
    named = set(re.findall(r"\bMESHD_([A-Z_]+):", (DEPLOY / "compose.yaml").read_text()))
    assert {name.lower() for name in named} <= OPTIONS
