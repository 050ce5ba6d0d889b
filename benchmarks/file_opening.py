"""How long a ``file:`` store takes to open: after a clean end, and after it was killed.

    python -m benchmarks.file_opening [--folder DIR] [--pages 164000] [--page-bytes 16384]

A child process fills a store with so many pages, then closes it or is killed in the middle of its puts. Printed is the
time of ``FileBackend.open`` in a fresh process, the best and the median of some openings; the folder is copied for
none of them, so only the first opening after a kill scans what has no index.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from statistics import median

from asynccache_backends.file import FileBackend

from asynccache.storage import PageKey, Record, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import aligned

BATCH = 128


def url_of(folder: str, pages: int, page_bytes: int) -> str:
    return f"file:{folder}/store?capacity={2 * pages * page_bytes // 4096 * 4096 + (64 << 20)}"


async def fill(url: str, pages: int, page_bytes: int, end: str) -> None:
    """Put pages. ``end``: ``close``, or ``kill``, which is to say so and go on until this process is killed."""
    store = await FileBackend.open(parse_url(url), StoreLayout({"p": page_bytes}, b"opening"))
    payload = aligned(page_bytes)
    payload[:] = os.urandom(page_bytes)
    records = [Record(aligned(64), payload)] * BATCH
    at = 0
    while at < pages or end == "kill":
        keys = [PageKey("p", sha256(str(i).encode()).digest()) for i in range(at, at + BATCH)]
        assert await store.put(keys, records) == [Result.HIT] * BATCH
        at += BATCH
        if end == "kill" and at >= pages:
            sys.stdout.write("filled\n")
            sys.stdout.flush()
            await asyncio.sleep(60)
    await store.aclose()


async def measure(url: str, page_bytes: int) -> None:
    """Open the store once, and print what that took."""
    began = time.perf_counter(), time.process_time()
    store = await FileBackend.open(parse_url(url), StoreLayout({"p": page_bytes}, b"opening"))
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    stats = store.stats()
    sys.stdout.write(f"{took[0]} {took[1]} {stats['pages']} {stats['scanned_groups']}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # it opens as it was found, every time


def main() -> None:
    parser = argparse.ArgumentParser(description="time to open a file store")
    parser.add_argument("--folder", help="where to make the store (default: a temporary folder)")
    parser.add_argument("--pages", type=int, default=164_000)
    parser.add_argument("--page-bytes", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, url = args.child
        work = measure(url, args.page_bytes) if what == "open" else fill(url, args.pages, args.page_bytes, what)
        asyncio.run(work)
        return

    def child(what: str, url: str) -> subprocess.Popen[str]:
        sizes = ["--pages", str(args.pages), "--page-bytes", str(args.page_bytes)]
        command = [sys.executable, "-m", "benchmarks.file_opening", "--child", what, url, *sizes]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    for end in ("close", "kill"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            url = url_of(folder, args.pages, args.page_bytes)
            filling = child(end, url)
            assert filling.stdout is not None
            if end == "kill":
                assert filling.stdout.readline() == "filled\n"
                filling.kill()
            filling.communicate()
            rows = [child("open", url).communicate()[0].split() for _ in range(args.rounds)]
            size = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*"))
            times, cpu = ([float(row[n]) for row in rows] for n in (0, 1))
            sys.stdout.write(
                f"after {end}: {rows[0][2]} pages, {size >> 20} MiB; first {times[0]:.3f} s (scanned {rows[0][3]} "
                f"groups), best {min(times):.3f} s, median {median(times):.3f} s, CPU {median(cpu):.3f} s\n"
            )


if __name__ == "__main__":
    main()
