"""The wheels that go to the devices: meshd's own, built from this checkout unless carried along, and what `--wheels DIR` holds.

The stamp names what is installed: two builds of the same sources are the same (a wheel's RECORD lists the hash of each file;
the zip around it carries times). Raises LocalError.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from meshd.errors import LocalError

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Cargo:
    """``own`` is meshd's wheel; ``others`` were carried along, so that no device needs the network."""

    own: Path
    others: tuple[Path, ...] = ()

    @property
    def version(self) -> str:
        return self.own.name.split("-")[1]

    def for_arch(self, arch: str) -> tuple[Path, ...]:
        """Without the wheels of other machines (torch alone is 200 MB)."""
        return (self.own, *(wheel for wheel in self.others if fits(wheel.name, arch)))

    def stamp(self, *, engine: bool, system_site_packages: bool) -> str:
        """Names an environment made of this."""
        text = f"{_record(self.own)} {engine} {system_site_packages} {sorted(wheel.name for wheel in self.others)}"
        return f"{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def pack(self, arch: str, place: Path) -> Path:
        """A tar of them in ``place``, made once for each kind of machine."""
        path = place / f"wheels-{arch}.tar"
        if not path.exists():
            part = path.with_suffix(".part")
            with tarfile.open(part, "w") as tar:
                for wheel in self.for_arch(arch):
                    tar.add(wheel, wheel.name)
            part.rename(path)
        return path


def fits(wheel: str, arch: str) -> bool:
    """Whether a wheel's platform tag may be this machine's."""
    platform = wheel.removesuffix(".whl").rpartition("-")[2]
    machines = ("x86_64", "amd64", "aarch64", "arm64", "armv7l", "armv6l", "i686", "ppc64le", "s390x", "riscv64")
    named = [machine for machine in machines if machine in platform]
    same = {"amd64": "x86_64", "arm64": "aarch64"}
    return not named or same.get(arch, arch) in [same.get(machine, machine) for machine in named]


def find(folder: Path | None, place: Path) -> Cargo:
    """What to carry: the newest meshd in ``folder``, else one built into ``place``."""
    if folder is None:
        return Cargo(build(ROOT, place))
    found = sorted(folder.glob("*.whl"))
    own = [wheel for wheel in found if wheel.name.startswith("meshd-")]
    if not found:
        raise LocalError(f"--wheels {folder}: no wheels there; fill it with: pip wheel -w {folder} '{ROOT}[engine]'")
    if len(own) > 1:
        raise LocalError(f"--wheels {folder}: {len(own)} wheels of meshd; leave the one that is meant")
    others = tuple(wheel for wheel in found if wheel not in own)
    return Cargo(own[0] if own else build(ROOT, place), others)


def build(source: Path, place: Path) -> Path:
    """A wheel of a checkout."""
    if not (source / "pyproject.toml").exists():
        raise LocalError(f"{source} is not a checkout of meshd; name a folder with its wheel: --wheels DIR")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "-w",
        str(place),
    ]
    ended = subprocess.run(  # noqa: S603 - our own words
        [*pip, str(source)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    found = sorted(place.glob("meshd-*.whl"))
    if ended.returncode or not found:
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        raise LocalError(f"no wheel can be built from {source}: {lines[-1] if lines else 'pip said nothing'}")
    return found[0]


def _record(wheel: Path) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            return hashlib.sha256(archive.read(name)).hexdigest()
    except (OSError, StopIteration, zipfile.BadZipFile) as error:
        raise LocalError(f"{wheel} is not a wheel: {error}") from None
