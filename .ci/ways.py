"""Prints which of our files a page passes on its way to disk, and on its way back: ``python .ci/ways.py``.

Each way is taken in one process, on the source of the core, with the CPU device and a ``file:`` store:

* commit to disk: one request's ``lease.commit`` in an open cache, until storage has its pages.
* disk to device: ``prefetch`` of the same prompt in a fresh cache over the same folder; when it has ended, a lease that
  takes the handle, until ``loaded``.

A file, a class or a function of asynccache or of the backends counts if a function of it is called on a way, in any
thread; Python's own profiler tells. Imports, opening and closing a cache, and making a configuration are not on a way.
The files are printed in the order in which they are first called, both ways side by side: for each file how many of its
functions were called. ``--functions`` prints these, too.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from code_lines import code_lines

if TYPE_CHECKING:
    from asynccache import AsyncCache

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("asynccache", "backends")
PAGE = 16
PROMPT = list(range(1000))
QUIET = 0.5
"""Seconds after a commit within which its pages are on disk. Waiting for them calls nothing of ours."""


class Way:
    """The functions called on one way, by file, in the order of their first calls."""

    def __init__(self) -> None:
        self.called: dict[str, dict[str, None]] = {}

    def note(self, frame: FrameType) -> None:
        """Note the function that begins, if it is ours. Bodies of modules and classes are no functions; a lambda, a
        comprehension or a function within a function counts as the function that it is in."""
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if code.co_flags & CO_OPTIMIZED and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT)
            if name.parts[0] in HOUSES:
                function = code.co_qualname.partition(".<")[0]
                self.called.setdefault(str(name), {})[function] = None

    def counts(self) -> tuple[int, int, int]:
        """Return how many files, classes and functions were called."""
        names = [(file, name) for file, functions in self.called.items() for name in functions]
        classes = {(file, name.rpartition(".")[0]) for file, name in names if "." in name}
        return len(self.called), len(classes), len(names)


def tell(ways: dict[str, Way], *, functions: bool) -> None:
    """Print both ways side by side, and how much was called on each."""
    files = list(dict.fromkeys(name for way in ways.values() for name in way.called))
    row = "{:>6}  {:56}" + "{:>16}" * len(ways)
    lines = [row.format("lines", "file, and its functions", *ways)]
    for name in files:
        counts = [len(way.called.get(name, ())) or "" for way in ways.values()]
        lines.append(row.format(code_lines(ROOT / name), name, *counts))
        if functions:
            called = dict.fromkeys(function for way in ways.values() for function in way.called.get(name, ()))
            for function in called:
                there = ["x" if function in way.called.get(name, ()) else "" for way in ways.values()]
                lines.append(row.format("", f"    {function}", *there))
    for i, what in enumerate(("files", "classes", "functions")):
        lines.append(row.format("", what, *(way.counts()[i] for way in ways.values())))
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n")


class Ways:
    """The profiler of all threads that are made after ``begin``, and of the one that calls it. Calls are noted in
    ``way``; None: they are not noted."""

    def __init__(self) -> None:
        self.way: Way | None = None

    def begin(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self.way is not None:
            self.way.note(frame)


def cache_in(folder: str) -> AsyncCache:
    """Return a cache, not open yet, with a store in ``folder``."""
    from asynccache import AsyncCache, CacheConfig, Full

    kv = Full(bytes_per_token=1024, layers=4, device_tokens=4096, host_tokens=16384)
    return AsyncCache(
        CacheConfig(model="ways", components=(kv,), page_size=PAGE, storage=f"file:{folder}?capacity=64MiB")
    )


async def take(ways: Ways, folder: str) -> tuple[Way, Way]:
    """Take both ways, and return what was called on each."""
    to_disk, to_device = Way(), Way()
    async with cache_in(folder) as cache:
        async with cache.lease(PROMPT) as lease:
            ways.way = to_disk
            await lease.commit(PROMPT)
            await asyncio.sleep(QUIET)
            ways.way = None
        stored = cache.statistics().storage["pages"]
        assert stored == len(PROMPT) // PAGE, f"{stored} pages are on disk: QUIET is too short"
    async with cache_in(folder) as cache:
        ways.way = to_device
        handle = cache.prefetch(PROMPT)
        await handle
        async with cache.lease(PROMPT, prefetch=handle) as lease:
            await lease.loaded()
            ways.way = None
            assert lease.hits.storage == len(PROMPT) // PAGE * PAGE, lease.hits
    return to_disk, to_device


def main() -> None:
    """Take both ways twice, since the first time imports; print those of the second time."""
    os.environ["ASYNCCACHE_PURE"] = "1"                # a compiled function has no frame
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    ways = Ways()
    ways.begin()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            to_disk, to_device = asyncio.run(take(ways, folder))
    tell({"commit to disk": to_disk, "disk to device": to_device}, functions="--functions" in sys.argv[1:])


if __name__ == "__main__":
    main()
