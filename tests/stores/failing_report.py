"""Every course, and what it measured: a table, and JSON.

    python -m tests.stores.failing_report [--json FILE] [STORE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.stores import courses
from tests.stores.failing import Seen, alone, figures, table
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.redis_server import RedisCluster, RedisServer
from tests.stores.s3_server import MotoServer

Course = tuple[Callable[[], Any], Callable[[Any], Seen]]

COURSES: Mapping[str, tuple[Course, ...]] = {
    "redis": ((RedisServer, courses.redis), (RedisServer, courses.redis_full)),
    "cluster": ((RedisCluster, courses.cluster),),
    "s3": ((MotoServer, courses.s3),),
    "mooncake": (
        (lambda: MooncakeMaster(segment=256), courses.mooncake),
        (lambda: MooncakeMaster(segment=16), courses.mooncake_full),
    ),
}


def measured(names: list[str]) -> list[dict[str, Any]]:
    """One course after the other, each beside a run without L3 of its own."""
    found = []
    for name in names:
        if name == "file":
            with tempfile.TemporaryDirectory() as folder:
                found += [figures(course(Path(folder)), alone()) for course in (courses.file_full, courses.file_faulty)]
            continue
        for server, course in COURSES[name]:
            with server() as started:
                found.append(figures(course(started), alone()))
    return found


def main() -> None:
    """What the command does."""
    parser = argparse.ArgumentParser(description="What a cache does while its store fails.")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"file, {', '.join(COURSES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    found = measured(options.stores or ["file", *COURSES])
    sys.stdout.write(table(found) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
