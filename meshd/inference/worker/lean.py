"""Importing transformers without torch's compiler and its distributed tensors, neither of which a worker uses.

transformers' model code names both at its top, only to mark functions for a compiler that is never run and to ask whether a
tensor is a distributed one; and torch asks a computer algebra system whether a plain True is true. For that 900 modules are
loaded (measured: 95 MB of private memory and 3 s of every start). `install` puts a finder in front of the import system: there
are stand-ins with the few functions that are asked for, and torch says that it was built without the distributed part, which
transformers is prepared for.

Invariant: whoever asks a stand-in for anything else gets torch's own module, so nothing that worked stops working.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_HARMLESS: Final = (
    "torch._dynamo._trace_wrapped_higher_order_op"  # the part that transformers' masks use; needs no other
)
_SYMBOLS: Final = "torch.fx.experimental.symbolic_shapes"
_ALGEBRA: Final = "sympy"
_MODELS: Final = "transformers"


class _StandIn(ModuleType):
    """A module as long as only ``functions`` of it are used."""

    def __init__(self, name: str, functions: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _StandInLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, _FUNCTIONS[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _LoadedAlready(Loader):
    """For an import that has led to the same module on a side way."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.replaced = set(_FUNCTIONS)

    def find_spec(self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _MODELS:
            _undistribute()
        if name.startswith(_COMPILER + ".") and name != _HARMLESS and isinstance(sys.modules[_COMPILER], _StandIn):
            _real(_COMPILER)  # it is wanted in earnest
            loaded = sys.modules.get(name)
            return None if loaded is None else ModuleSpec(name, _LoadedAlready(loaded))
        if name not in self.replaced:
            return None
        spec = ModuleSpec(name, _StandInLoader(), is_package=name == _COMPILER)
        if name == _COMPILER:
            spec.submodule_search_locations = [str(Path(folder) / "_dynamo") for folder in path or ()]
        return spec


def install() -> None:
    """From now on the imports of this process are lean; what is imported already stays as it is."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _undistribute() -> None:
    distributed = importlib.import_module("torch.distributed")
    if "torch.distributed.tensor" not in sys.modules:
        vars(distributed)["is_available"] = lambda: False


@contextmanager
def without_algebra() -> Iterator[None]:
    """Within this, torch finds no algebra system to ask whether a number is one of its expressions: none is."""
    if _ALGEBRA in sys.modules:
        yield
        return
    sys.modules[_ALGEBRA] = _StandIn(_ALGEBRA, {"Basic": type("Basic", (), {})})
    try:
        yield
    finally:
        _drop(_ALGEBRA)


def _real(name: str) -> ModuleType:
    """Load what a stand-in stands for, and let it take its place."""
    _FINDER.replaced.discard(name)
    _drop(_ALGEBRA)
    _drop(name)
    return importlib.import_module(name)


def _drop(name: str) -> None:
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent]).pop(child, None)  # while the real one loads, it looks for itself there


def _unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _disable(function: Callable[..., Any] | None = None, *_args: Any, **_options: Any) -> Callable[..., Any]:
    return function or _unmarked


def _for_numbers(name: str, answer: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function ``name`` of `symbolic_shapes`, which gives ``answer`` of what is a plain number and no symbol."""

    def function(value: Any, *more: Any, **options: Any) -> Any:
        return (
            answer(value) if isinstance(value, bool | int) else getattr(_real(_SYMBOLS), name)(value, *more, **options)
        )

    return function


def _sym_eq(one: Any, other: Any) -> Any:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_sym_eq, one, other))
    if isinstance(one, bool | int) and isinstance(other, bool | int):
        return one == other
    return _real(_SYMBOLS).sym_eq(one, other)


_FUNCTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    _COMPILER: {"assume_constant_result": _unmarked, "allow_in_graph": _unmarked, "disable": _disable},
    _SYMBOLS: {
        **{
            name: _for_numbers(name, lambda value: value)
            for name in (
                "expect_true",
                "statically_known_true",
                "guard_or_false",
                "guard_or_true",
                "guard_size_oblivious",
                "guarding_hint_or_throw",
            )
        },
        "has_guarding_hint": _for_numbers("has_guarding_hint", lambda _value: True),
        "is_nested_int": _for_numbers("is_nested_int", lambda _value: False),
        "sym_eq": _sym_eq,
        "sym_or": lambda *values: functools.reduce(operator.or_, values),
        "sym_and": lambda *values: functools.reduce(operator.and_, values),
    },
}
_FINDER: Final = _Finder()
