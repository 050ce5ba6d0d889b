"""Every course, and what it measured: a table, and JSON.

    python -m tests.stores.failing_report [--json FILE] [STORE ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.stores import failing as courses
from tests.stores.failing import Seen, alone, figures, table
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.object_server import CephServer, MotoServer
from tests.stores.redis_server import RedisCluster, RedisServer

Course = tuple[Callable[[], Any], Callable[[Any], Seen]]

COURSES: dict[str, tuple[Course, ...]] = {
    "redis": ((RedisServer, courses.redis), (RedisServer, courses.redis_full)),
    "cluster": ((RedisCluster, courses.cluster), (RedisCluster, courses.cluster_full)),
    "s3": ((MotoServer, courses.s3), (MotoServer, courses.s3_killed)),
    "mooncake": (
        (lambda: MooncakeMaster(segment=256), courses.mooncake),
        (lambda: MooncakeMaster(segment=256), courses.mooncake_slow),
        (lambda: MooncakeMaster(segment=16), courses.mooncake_full),
    ),
}
if shutil.which(CephServer.program):
    COURSES["ceph"] = ((CephServer, courses.ceph_full),)


def runs(name: str) -> Iterator[Seen]:
    """The courses of one store, each when it is asked for."""
    if name == "file":
        with tempfile.TemporaryDirectory() as folder:
            yield courses.file_full(Path(folder))
            yield courses.file_faulty(Path(folder))
        return
    for server, course in COURSES[name]:
        with server() as started:
            yield course(started)


def measured(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One course after the other, each beside a run without L3 of its own. Of a store that fails, the rest is left."""
    for name in names:
        try:
            for seen in runs(name):
                yield figures(seen, alone())
        except AssertionError as error:
            sys.stderr.write(f"{name}: {error}\n")


def main() -> int:
    """What the command does; its status."""
    parser = argparse.ArgumentParser(description="What a cache does while its store fails.")
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"file, {', '.join(COURSES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    names = options.stores or ["file", *COURSES]
    found = list(measured(names))
    sys.stdout.write(table(found) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(len(found) < sum(2 if name == "file" else len(COURSES[name]) for name in names))


if __name__ == "__main__":
    sys.exit(main())
