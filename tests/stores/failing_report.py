"""Every course, and what it measured: a table, and JSON.

    python -m tests.stores.failing_report [--json FILE] [STORE ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.stores.failing import COURSES, alone, figures, run, table
from tests.stores.object_server import CephServer

STORES = list(dict.fromkeys(course.store for course in COURSES.values()))


def of(store: str) -> list[str]:
    """The courses of one store."""
    return [name for name, course in COURSES.items() if course.store == store]


def measured(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One course after the other, each beside a run without L3 of its own. Of a store that fails, the rest is left."""
    for name in names:
        try:
            for course in of(name):
                yield figures(run(course), alone())
        except AssertionError as error:
            sys.stderr.write(f"{name}: {error}\n")


def main() -> int:
    """What the command does; its status."""
    parser = argparse.ArgumentParser(description="What a cache does while its store fails.")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"{', '.join(STORES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    names = options.stores or [name for name in STORES if name != "ceph" or shutil.which(CephServer.program)]
    found = list(measured(names))
    sys.stdout.write(table(found) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(len(found) < sum(len(of(name)) for name in names))


if __name__ == "__main__":
    sys.exit(main())
