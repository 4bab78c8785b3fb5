"""Fetches a model's files from the Hugging Face hub, or from a mirror of it, and goes on after a break.

Owns which files are wanted (safetensors, JSON and the tokenizer; never pickles, never code) and the partial files. The hub's
protocol is ``huggingface_hub``'s, imported here and only when called. Its own download throws a broken file away when the process
ends; here what came stays in the partial folder under a name made of the file's etag, and the next call asks for the rest. The
commit of the first answer is kept for all files, so a push in between cannot mix two models.

Errors: ModelNotFound, ModelRefused, LocalError when the hub cannot be reached, StoreFull.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from meshd.errors import LocalError, ModelNotFound, ModelRefused
from meshd.models.headers import INDEX_FILE, JSON_CAP_BYTES, SINGLE_FILE, parse_index_untrusted, parse_json_untrusted
from meshd.models.manifest import TOKENIZER_FILES
from meshd.models.progress import Progress
from meshd.models.spec import refuse_unsafe

SMALL_FILES: Final = ("config.json", "generation_config.json", *TOKENIZER_FILES)

ATTEMPTS = 5  # in a row that brought nothing
PAUSE_S = 1.0
TIMEOUT_S = 20.0  # without a byte

_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")


def default_endpoint() -> str:
    """The hub that ``HF_ENDPOINT`` names, else the public one."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class _Remote:
    """One file of the repository, as the hub describes it before it is fetched."""

    name: str
    url: str
    commit: str
    etag: str
    size_bytes: int


class HubRepository:
    """One repository at one commit, fetched into ``partial``."""

    def __init__(self, repository: str, partial: Path, endpoint: str | None = None) -> None:
        self.repository = repository
        self.partial = partial
        self.endpoint = endpoint or default_endpoint()
        self._commit = "main"

    def fetch(self, progress: Progress | None, require_room: Callable[[int], None]) -> list[Path]:
        """Fetch what is not here yet; all files of the model. Small ones first: a refusal then costs no gigabytes."""
        config = self._describe("config.json")
        if config is None:
            raise ModelRefused(f"{self.repository} has no config.json: not a model that transformers loads")
        self._commit = config.commit
        paths = [self._fetch(config, None)]
        refuse_unsafe(parse_json_untrusted(_read(paths[0]), "config.json"))
        for name in SMALL_FILES[1:]:
            remote = self._describe(name)
            if remote is not None:
                paths.append(self._fetch(remote, None))
        single = self._describe(SINGLE_FILE)
        weights = [single] if single is not None else self._shards(paths)
        total = sum(remote.size_bytes for remote in weights)
        held = sum(self._held_bytes(remote) for remote in weights)
        require_room(total - held)
        done = 0
        for remote in weights:
            report = None if progress is None else _Total(progress, done, total)
            paths.append(self._fetch(remote, report))
            done += remote.size_bytes
        return paths

    def _shards(self, paths: list[Path]) -> list[_Remote]:
        index = self._describe(INDEX_FILE)
        if index is None:
            raise ModelRefused(
                f"{self.repository} has no {SINGLE_FILE} and no {INDEX_FILE}: only safetensors are loaded"
            )
        paths.append(self._fetch(index, None))
        names = sorted(set(parse_index_untrusted(_read(paths[-1]), INDEX_FILE).values()))
        found = [(name, self._describe(name)) for name in names]
        for name, remote in found:
            if remote is None:
                raise ModelRefused(f"{self.repository}: {INDEX_FILE} names {name}, which is not in the repository")
        return [remote for _, remote in found if remote is not None]

    def _describe(self, name: str) -> _Remote | None:
        """What the hub says of a file; None when there is none of that name."""
        import huggingface_hub  # noqa: PLC0415  heavy, and not for the daemon
        from huggingface_hub import errors  # noqa: PLC0415  see above

        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self._commit, endpoint=self.endpoint)
        try:
            about = huggingface_hub.get_hf_file_metadata(url, endpoint=self.endpoint, retry_on_errors=True)
        except errors.GatedRepoError as error:
            raise LocalError(
                f"{self.repository} is gated: accept its terms on {self.endpoint}, then set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFound(
                f"{self.endpoint} has no model {self.repository!r} (or it is private: set HF_TOKEN)"
            ) from error
        except errors.EntryNotFoundError:
            return None
        except errors.HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == 404:  # a mirror that gives no reason
                return None
            raise LocalError(f"{self.endpoint} refuses {self.repository}/{name}: {_line(error)}") from error
        except Exception as error:  # the library lets its HTTP client's own errors through, whichever that is
            raise LocalError(f"{self.endpoint} cannot be reached for {self.repository}: {_line(error)}") from error
        if about.size is None:
            raise LocalError(f"{self.endpoint} does not say the size of {self.repository}/{name}")
        commit = about.commit_hash or self._commit
        return _Remote(name, url, commit, about.etag or f"{commit} {name}", about.size)

    def _held_bytes(self, remote: _Remote) -> int:
        for path in (self._whole(remote), self._part(remote)):
            if path.is_file():
                return min(path.stat().st_size, remote.size_bytes)
        return 0

    def _whole(self, remote: _Remote) -> Path:
        return self.partial / _key(remote) / remote.name

    def _part(self, remote: _Remote) -> Path:
        return self.partial / _key(remote) / f"{remote.name}.part"

    def _fetch(self, remote: _Remote, report: _Total | None) -> Path:
        """The file, whole and checked. What of it is here already is not asked for again."""
        whole, part = self._whole(remote), self._part(remote)
        if whole.is_file():
            return whole
        whole.parent.mkdir(parents=True, exist_ok=True)
        if part.is_file() and part.stat().st_size > remote.size_bytes:
            part.unlink()
        with part.open("ab", buffering=0) as file:
            self._stream(remote, file, report)
        if _SHA256.match(remote.etag) and _sha256(part) != remote.etag:
            part.unlink()
            raise LocalError(f"{self.repository}/{remote.name} came damaged (its SHA-256 is another); pull again")
        part.replace(whole)
        return whole

    def _stream(self, remote: _Remote, file: FileIO, report: _Total | None) -> None:
        """Append to ``file`` until it is whole. Breaks are retried as long as each try brings something."""
        have, failures = file.tell(), 0
        while have < remote.size_bytes:
            try:
                self._receive(remote, file, have, report)
            except Exception as error:  # as in _describe
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk's own words: the store names them
                gained = file.tell() > have
                failures = 1 if gained else failures + 1
                if failures >= ATTEMPTS:
                    raise LocalError(
                        f"{self.repository}/{remote.name}: the download broke ({_line(error)}); "
                        "pull again to go on from there"
                    ) from error
                time.sleep(PAUSE_S)
            have = file.tell()

    def _receive(self, remote: _Remote, file: FileIO, have: int, report: _Total | None) -> None:
        """One answer, as far as it comes. Each piece is written as it arrives: a break costs what was in flight."""
        from huggingface_hub import utils  # noqa: PLC0415  see _describe

        headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        # The hub's own address each time: it redirects to a storage host with a signature that expires, and the client keeps
        # the token to itself there.
        session = utils.get_session()
        with session.stream("GET", remote.url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as answer:
            utils.hf_raise_for_status(answer)
            if have and answer.status_code != 206:  # a server that knows no ranges begins again
                file.truncate(0)
                have = 0
            for piece in answer.iter_raw():
                have += len(piece)
                if have > remote.size_bytes:
                    raise LocalError(
                        f"{self.repository}/{remote.name} is longer than the {remote.size_bytes} bytes announced"
                    )
                file.write(piece)
                if report is not None:
                    report.at(have)


@dataclass(frozen=True, slots=True)
class _Total:
    """Progress of one file within all of them."""

    progress: Progress
    before_bytes: int
    total_bytes: int

    def at(self, done_bytes: int) -> None:
        self.progress("download", self.before_bytes + done_bytes, self.total_bytes)


def _key(remote: _Remote) -> str:
    """A folder per version of a file: bytes of another commit are never continued."""
    return hashlib.sha256(f"{remote.etag} {remote.size_bytes}".encode()).hexdigest()[:16]


def _read(path: Path) -> bytes:
    if path.stat().st_size > JSON_CAP_BYTES:
        raise ModelRefused(f"{path.name} is larger than {JSON_CAP_BYTES} bytes")
    return path.read_bytes()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
