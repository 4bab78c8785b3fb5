"""Settings: four sources, one table, errors that name their source."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from meshd.cli import run
from meshd.config import Config, load
from meshd.errors import LocalError, UsageError
from meshd.vocabulary import Endpoint, LayerRange


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"MESHD_STATE_DIR": str(tmp_path)}


def test_defaults_are_those_of_the_contract(env: dict[str, str]) -> None:
    config = load([], env)
    assert (config.http, config.mesh) == (Endpoint("127.0.0.1", 8090), Endpoint("127.0.0.1", 8091))
    assert (config.target_replicas, config.kv_reserve, config.lane_fraction) == (2, 0.2, 0.6)
    assert (config.route_explore_share, config.route_weight_alpha, config.route_stats_half_life) == (0.3, 1.0, 600)
    assert (config.max_sessions, config.max_queue, config.preset, config.detector) == (64, 32, "room", "swim")
    assert (config.mdns, config.admit, config.deterministic, config.open_read) == (True, True, True, False)


def test_a_mesh_key_opens_the_addresses(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mesh.key").write_text("x")
    assert load([], env).http == Endpoint("0.0.0.0", 8090)


def test_flag_beats_environment_beats_file(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "meshd.toml").write_text('kv_reserve = 0.5\nname = "file"\nmdns = false\njoin = ["a:1", "b:2"]\n')
    config = load(["--name", "flag"], {**env, "MESHD_NAME": "env", "MESHD_KV_RESERVE": "0.4"})
    assert (config.name, config.kv_reserve, config.mdns) == ("flag", 0.4, False)
    assert config.join == (Endpoint("a", 1), Endpoint("b", 2))
    assert load(["--mdns"], env).mdns


@pytest.mark.parametrize("text", ["0..15", "0-15"])
def test_ranges_in_both_spellings(text: str, env: dict[str, str]) -> None:
    assert load(["--layers", text], env).layers == LayerRange(0, 15)
    assert load(["--layers", "auto"], env).layers is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--layers", "15..0"], "--layers"),
        (["--kv-reserve", "nan"], "--kv-reserve"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "bf17"], "bf17"),
        (["--device", "cuda"], "on the CPU only"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--model", "../x"], "--model: '../x' is not a model name; a folder or a .gguf is pulled first"),
        (["--model", "m@int9"], "'int9' is not one of bf16"),
        (["--name", "a b"], "--name"),
        (["--http", "0.0.0.0:1"], "--http 0.0.0.0:1 is not loopback"),
        (["--advertise", "0.0.0.0:8091"], "--advertise: '0.0.0.0:8091' is no address that a peer can reach"),
        (["--advertise", "[::]"], "--advertise: '[::]' is no address"),
        (["--http", "127.0.0.1:x"], "'x' is not a port"),
        (["--http", "..:1"], "--http: '..' cannot be the name of a host"),
        (["--mesh", f"{'a' * 300}:1"], "--mesh: 'aaa"),
        (["--join", "n1:1,..:1"], "--join: '..' cannot be the name of a host"),
        (["--join", "http://n1:8090"], "mesh address"),
        (["--join", "n1:8090"], "n1:8091"),
        (["--http", "127.0.0.1:5", "--join", "n1:5"], "HTTP port"),
        (["--http", "127.0.0.1:5", "--mesh", "127.0.0.1:5"], "both"),
        (["--config", "/nonexistent/toml"], "--config"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_values_name_their_flag(argv: list[str], named: str, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=re.escape(named)) as caught:
        load(argv, env)
    assert "\n" not in caught.value.message


def test_a_key_file_that_is_not_there(env: dict[str, str]) -> None:
    with pytest.raises(LocalError, match=r"--mesh-key: .*meshd key new") as caught:
        load(["--mesh-key", "/nonexistent/key"], env)
    assert not isinstance(caught.value, UsageError)  # the flag is right, the device lacks the file


@pytest.mark.parametrize(
    ("mode", "words"), [(0o644, "can be read by others"), (0o600, "is damaged"), (None, "it is a folder")]
)
def test_a_key_file_that_cannot_be_used_names_its_flag(
    mode: int | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "k"
    if mode is None:
        key.mkdir()
    else:
        key.write_text("x")
        key.chmod(mode)
    argv = ["start", "--http", "127.0.0.1:0", "--mesh", "127.0.0.1:0", "--no-mdns", "--state-dir", str(tmp_path / "s")]
    assert run([*argv, "--mesh-key", str(key)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("meshd: --mesh-key: ")
    assert words in said
    assert ("chmod" in said) == (mode == 0o644)


def test_a_state_folder_that_is_none_names_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(LocalError, match="--state-dir") as caught:
            load([], {"MESHD_STATE_DIR": str(tmp_path / place)})
        assert not isinstance(caught.value, UsageError)
    with pytest.raises(UsageError, match=r"--config: .* cannot be read"):
        load(["--config", str(tmp_path)], {"MESHD_STATE_DIR": str(tmp_path)})


def test_a_block_list_that_cannot_be_read_whole_lets_nobody_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later the last good list stays in force; at the start there is none."""
    (tmp_path / "blocked").write_text("a1b2\n")
    argv = ["start", "--http", "127.0.0.1:0", "--mesh", "127.0.0.1:0", "--no-mdns", "--state-dir", str(tmp_path)]
    assert run(argv) == 1
    assert f"block list {tmp_path / 'blocked'}, line 1: 'a1b2' is not a node id" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--mesh-key", "--state-dir"])
def test_a_folder_that_may_not_be_searched_names_the_flag(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may search any folder, so the refusal is played."""

    def stat(path: Path, **_: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(LocalError, match=f"{flag}: {tmp_path}/[a-z.]* cannot be looked at: Permission denied"):
        load([flag, str(tmp_path / "k" if flag == "--mesh-key" else tmp_path)], {})


@pytest.mark.parametrize("text", ["~nobody.of.that.name/x", "a\0b", ""])
def test_what_is_no_path_is_wrong_usage(text: str, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--state-dir"):
        load(["--state-dir", text], env)


def test_unknown_key_and_wrong_value_in_the_file(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "meshd.toml").write_text("kv_resreve = 0.5\n")
    with pytest.raises(UsageError, match="kv_resreve"):
        load([], env)
    (tmp_path / "meshd.toml").write_text("kv_reserve = 5\n")
    with pytest.raises(UsageError, match=r"meshd\.toml: kv_reserve"):
        load([], env)


@pytest.mark.parametrize("text", ["[::1]:7002", "::1", "[::1]"])
def test_ipv6_literals(text: str, env: dict[str, str]) -> None:
    assert load(["--join", text], env).join[0].host == "::1"
    assert load(["--mesh", "[::1]:7001"], env).mesh == Endpoint("::1", 7001)
    assert str(Endpoint("::1", 7001)) == "[::1]:7001"


def test_insecure_lan_opens_other_addresses_without_a_key(env: dict[str, str]) -> None:
    assert load(["--insecure-lan", "--http", "0.0.0.0:80"], env).http == Endpoint("0.0.0.0", 80)


def test_help_tells_a_default_of_one_too(capsys: pytest.CaptureFixture[str], env: dict[str, str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"], env)
    about = capsys.readouterr().out.split("  --route-weight-alpha ")[1].split("\n  --")[0]
    assert "(default: 1.0)" in about


def test_every_setting_has_a_flag_and_a_help_line(capsys: pytest.CaptureFixture[str], env: dict[str, str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"], env)
    shown = capsys.readouterr().out
    for name in Config.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in shown
