"""``python -m benchmarks [--list] [NAME …]``: each module of this package with a ``run()`` is a benchmark."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback

import benchmarks


def main(argv: list[str]) -> int:
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    if "--list" in argv:
        for name in names:
            print(f"{name:24s}{(importlib.import_module(f'benchmarks.{name}').__doc__ or '').splitlines()[0]}")
        return 0
    unknown = [name for name in argv if name not in names]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    failed = 0
    for name in argv or names:
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            importlib.import_module(f"benchmarks.{name}").run()
        except Exception:  # noqa: BLE001  # one broken benchmark must not hide the others' figures
            traceback.print_exc()
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
