"""Who may import whom: the structure, held by a test rather than by good intentions."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meshd"

# Modules that neither read a clock, nor open a socket, nor start a thread: time and randomness are arguments.
PURE = [
    "meshd.vocabulary",
    "meshd.errors",
    "meshd.directory",
    "meshd.roster",
    *("meshd.links." + m for m in ("frame", "flow", "assemble", "multiplex", "wire", "fields", "fault")),
    *(
        "meshd.gossip." + m
        for m in ("member", "wire", "suspicion", "membership", "detector", "rumours", "health_wire", "core")
    ),
    *("meshd.routing." + m for m in ("candidates", "prior", "stats", "policy", "penalties", "bandit", "planner")),
    *("meshd.election." + m for m in ("capacity", "coverage", "elect", "claims", "holds", "rebalance", "plan")),
    *("meshd.admission." + m for m in ("book", "qspec")),
    *("meshd.doctor." + m for m in ("finding", "layers", "nodes", "network", "diagnosis")),
    *(
        "meshd.chain." + m
        for m in ("messages", "codec", "plan", "session", "detours", "evidence", "hop", "recovery", "request")
    ),
    *("meshd.client." + m for m in ("entries", "answer", "talk")),
    *("meshd.inference." + m for m in ("batch", "gathering", "engine", "text", "detokenize")),
]
IO = ["socket", "ssl", "threading", "subprocess", "trio", "asyncio", "time", "random", "torch", "numpy", "httpx", "h11"]
# random.Random as a type of an argument and time's constants are harmless, but a pure module needs neither at run time.
DAEMON_MUST_NOT_LOAD = [
    "torch",
    "transformers",
    "numpy",
    "httpx",
    "anyio",
    "typer",
    "rich",
    "huggingface_hub",
    "gguf",
    "safetensors",
    "tokenizers",
]

# package -> packages it may import from. Everything may import vocabulary and errors.
SEAMS = {"directory"}
ALLOWED = {
    "links": {"identity"},
    "identity": set(),
    "gossip": {"links", "identity"} | SEAMS,
    "routing": SEAMS,
    "election": SEAMS,
    "admission": {"links", "inference"} | SEAMS,
    "models": set(),
    "inference": {"links", "models"},
    "chain": {"links", "inference", "routing"} | SEAMS,
    "api": {"links", "chain", "inference", "routing", "models", "eventlog", "doctor"} | SEAMS,
    "doctor": set(),
    "metrics": {"api", "chain", "inference"},
    "fleet": set(),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def targets(path: Path, known: set[str]) -> set[str]:
    """The modules of ``known`` that one imports, for type checking and inside functions too. ``from package import module`` is
    the module, not the package."""
    found = {name for name in imports(path) if name in known}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= inside
            if len(inside) == len(node.names):
                found.discard(node.module or "")
    return found


def test_packages_meet_only_at_the_seams() -> None:
    wrong = []
    for name, path in modules():
        package = name.split(".")[1] if "." in name else ""
        if package not in ALLOWED:
            continue
        for target in imports(path):
            if not target.startswith("meshd."):
                continue
            other = target.split(".")[1]
            if other not in ALLOWED[package] | {package, "vocabulary", "errors"}:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_neither_modules_nor_packages_import_each_other_in_a_circle() -> None:
    known = {name for name, _ in modules()}
    graph = {name: targets(path, known) - {name} for name, path in modules()}
    assert not (circle := circle_in(graph)), " imports ".join(circle)
    packages: dict[str, set[str]] = {}
    for name, found in graph.items():
        packages.setdefault(top(name), set()).update(top(target) for target in found if top(target) != top(name))
    del packages["meshd"]  # the version, which everybody may ask for
    assert not (circle := circle_in({name: found - {"meshd"} for name, found in packages.items()})), " imports ".join(
        circle
    )


def top(module: str) -> str:
    """The package of a module, or the module beside the packages."""
    return ".".join(module.split(".")[:2])


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """A path that ends where it began; [] when nothing can be reached from itself."""
    clear: set[str] = set()  # leads into no circle

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        for target in sorted(graph[name] - clear):
            if circle := walk(target, [*path, name]):
                return circle
        clear.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def test_a_circle_is_found_with_its_way() -> None:
    assert circle_in({"a": {"b", "c"}, "b": set(), "c": {"d"}, "d": {"e"}, "e": {"c"}}) == ["c", "d", "e", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_only_the_worker_sees_torch_and_only_discovery_sees_zeroconf() -> None:
    wrong = []
    for name, path in modules():
        for target in imports(path):
            top = target.split(".")[0]
            if top in ("torch", "transformers") and not name.startswith("meshd.inference.worker."):
                wrong.append(f"{name} imports {target}")
            if top == "zeroconf" and name != "meshd.gossip.discovery":
                wrong.append(f"{name} imports {target}")
            if top in ("typer", "rich", "click") and not name.startswith("meshd.cli."):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_with_io_blocked(name: str) -> None:
    """A fresh interpreter, the I/O modules made unimportable, the module imported: it must not notice."""
    path = ROOT / (name.replace(".", "/") + ".py")
    bad = [target for target in imports(path) if target.split(".")[0] in IO and not _typing_only(path, target)]
    assert not bad, f"{name} imports {bad}"


def _typing_only(path: Path, target: str) -> bool:
    """True when the import stands under TYPE_CHECKING, or takes only the Random class that is handed in."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == target == "random":
            return [alias.name for alias in node.names] == ["Random"]
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import) and target in [a.name for a in inner.names]:
                    return True
    if target == "random":  # `import random` for the annotation random.Random only
        text = path.read_text(encoding="utf-8")
        return text.count("random.") == text.count("random.Random")
    return False


def test_the_daemon_stays_small() -> None:
    code = f"import sys, meshd.daemon; print(*[m for m in {DAEMON_MUST_NOT_LOAD!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == []
