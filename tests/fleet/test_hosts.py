"""Who is to be equipped: the line, the list, the TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import UsageError
from meshd.fleet.hosts import Device, gather, parse, read_file, settings_of

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True)


@given(st.none() | NAMES, NAMES, st.none() | st.integers(1, 65535))
def test_what_is_shown_can_be_given_again(user: str | None, host: str, port: int | None) -> None:
    device = Device(host, user, port)
    assert parse(str(device)) == device


def test_ipv6_stands_in_brackets() -> None:
    assert parse("pi@[fe80::1%eth0]:2222") == Device("fe80::1%eth0", "pi", 2222)
    assert str(Device("fe80::1", "pi", 2222)) == "pi@[fe80::1]:2222"


@pytest.mark.parametrize(
    "text", ["", "a b", "a@b@c", "pi@host:0", "pi@host:65536", "pi@host:x", "-oProxyCommand=x", "-l@host"]
)
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_a_list_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the shelf\npi@one\n\npi@two:2222 # by the window\n")
    assert read_file(path) == [Device("one", "pi"), Device("two", "pi", 2222)]
    path.write_text("pi@one\npi@two three\n")
    with pytest.raises(UsageError, match="line 2"):
        read_file(path)


def test_a_table_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        '[[device]]\nhost = "one"\nuser = "pi"\nport = 22\nlayers = "0..15"\ncapacity_mb = 900\nflags = ["--threads", "2"]\n'
        '[[device]]\nhost = "pi@two:2222"\nflags = "--no-mdns"\n'
    )
    assert read_file(path) == [
        Device("one", "pi", 22, "0..15", 900, ("--threads", "2")),
        Device("two", "pi", 2222, flags=("--no-mdns",)),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[[device]]\nuser = "pi"\n', "host is missing"),
        ('[[device]]\nhost = "a"\nlayer = "0..1"\n', "'layer'"),
        ('[[device]]\nhost = "a"\ncapacity_mb = "much"\n', "capacity_mb"),
        ('[[device]]\nhost = "a"\nport = true\n', "port"),
        ('[[device]]\nhost = "a"\nlayers = "all"\n', "layers"),
        ('[[device]]\nhost = "a"\nflags = [1]\n', "flags"),
        ('host = "a"\n', "device"),
        ("[[device]\n", "fleet.toml"),
        ('device = [1, "one"]', "device 1: 1 is no"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=named):
        read_file(path)


def test_each_device_comes_once_and_the_file_knows_it_best(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[[device]]\nhost = "pi@one"\ncapacity_mb = 900\n')
    assert gather(["pi@one", "pi@two", "pi@two"], path) == [Device("one", "pi", capacity_mb=900), Device("two", "pi")]


def test_flags_become_keys_of_the_settings_file() -> None:
    flags = ["--threads", "2", "--no-mdns", "--kv=stateless", "--open-read"]
    assert settings_of(flags, "x") == {"threads": "2", "mdns": False, "kv": "stateless", "open_read": True}
    with pytest.raises(UsageError, match="'threads'"):
        settings_of(["threads", "2"], "x")
