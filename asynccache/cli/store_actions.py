"""What ``asynccache store`` does to an open store, one coroutine an action; each returns its report.

The store is opened without pools, so that it stays as it is. Every answer of it has a deadline; so has every batch of a
listing, but not a listing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from asynccache.cli.text import number, percent, size
from asynccache.errors import ConfigError
from asynccache.storage import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Collectable,
    Listable,
    PageKey,
    Record,
    Result,
    Scrubbable,
    Scrubbed,
    Stored,
    StoreLayout,
    open_store,
    parse_url,
)
from asynccache.storage.records import verify
from asynccache.storage.scrub import in_time, pause, scrub_listed, within

PROBES = 5
WHOLE_TIMEOUT = 3600.0
AGES = {"an hour": 3600.0, "a day": 86400.0, "a week": 7 * 86400.0, "30 days": 30 * 86400.0}
OLDER, UNKNOWN = "older", "unknown"

Report = dict[str, Any]
Tell = Callable[[str], None]
Show = Callable[[Stored], None]


class Wanted(NamedTuple):
    """What the command line asks for."""

    action: str
    url: str
    timeout: float
    limit: int | None = None
    rate: float | None = None
    older_than: float | None = None
    dry_run: bool = False

    @property
    def shown(self) -> str:
        """The URL without what nobody is to read."""
        return str(parse_url(self.url))


class Job(NamedTuple):
    """An open store and what to do to it. ``show`` gets every page of a list, ``tell`` how far it has come."""

    store: CheckedStore
    wanted: Wanted
    show: Show
    tell: Tell

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """The store's pages in batches. Raises ConfigError if it cannot list them."""
        backend = self.store.backend
        if not isinstance(backend, Listable):
            raise ConfigError(f"storage={self.wanted.shown!r}: this kind of store cannot list its pages")
        return in_time(backend.listing(), self.wanted.timeout)


async def perform(wanted: Wanted, show: Show, tell: Tell) -> Report:
    """Open the store, do what is wanted, close it come what may. Cancelling it does so, too.

    Raises:
        ConfigError: it is no store, or cannot do that. BackendError: it cannot be opened, or fails.
    """
    at_once = wanted.action in ("gc", "clear")
    timeout = max(wanted.timeout, WHOLE_TIMEOUT) if at_once else wanted.timeout
    async with within(wanted.timeout, f"storage={wanted.shown!r} could not be opened"):
        store = await open_store(wanted.url, StoreLayout({}, RECORD_SCHEMA), timeout=timeout)
    if store is None:
        raise ConfigError(f"storage={wanted.shown!r} is no store")
    try:
        report = await _ACTIONS[wanted.action](Job(store, wanted, show, tell))
    finally:
        await store.aclose()
    return {"command": wanted.action, "url": wanted.shown, **report}


async def _list(job: Job) -> Report:
    pages = total = 0
    limit = job.wanted.limit
    async for batch in job.listing():
        for page in batch:
            if pages == limit:
                return {"pages": pages, "bytes": total, "more": True, "ok": True}
            job.show(page)
            pages, total = pages + 1, total + page.size - HEADER_BYTES
    return {"pages": pages, "bytes": total, "more": False, "ok": True}


async def _stat(job: Job) -> Report:
    store = job.store
    report: Report = {"probe": await _probe(store), "breaker": store.breaker.state.name.lower()}
    if isinstance(store.backend, Listable):
        report |= await _census(job)
    stats = {name: value for name, value in store.backend.stats().items() if name not in ("pages", "bytes")}
    if "pages" not in report:
        known = store.backend.stats()
        report |= {"pages": known["pages"], "bytes": known["bytes"]}
    return {**report, "stats": stats, "ok": report["probe"]["failed"] == 0}


async def _probe(store: CheckedStore) -> Report:
    """How long it takes to ask for a page that is not there."""
    took, failed = [], 0
    for _ in range(PROBES):
        began = time.perf_counter()
        failed += await store.exists([PageKey("", os.urandom(KEY_BYTES))]) == [Result.FAILED]
        took.append(round((time.perf_counter() - began) * 1e3, 3))
    return {"median_ms": sorted(took)[PROBES // 2], "worst_ms": max(took), "failed": failed}


async def _census(job: Job) -> Report:
    """Pages by size and by age."""
    now, sizes, ages = time.time(), Counter[int](), Counter[str]()
    async for batch in job.listing():
        for page in batch:
            sizes[page.size - HEADER_BYTES] += 1
            ages[age_class(now - page.written if page.written else None)] += 1
        job.tell(f"{number(sizes.total())} pages listed")
    return {
        "pages": sizes.total(),
        "bytes": sum(length * count for length, count in sizes.items()),
        "by_page_size": [{"page_bytes": length, "pages": sizes[length]} for length in sorted(sizes)],
        "by_age": {name: ages[name] for name in (*AGES, OLDER, UNKNOWN) if ages[name]},
    }


def age_class(seconds: float | None) -> str:
    """The name of the youngest class that ``seconds`` is in."""
    if seconds is None:
        return UNKNOWN
    return next((name for name, limit in AGES.items() if seconds < limit), OLDER)


async def _verify(job: Job) -> Report:
    began, store, wanted = time.monotonic(), job.store, job.wanted
    if isinstance(store.backend, Scrubbable):
        total = sum(part.pages * part.page_bytes for part in store.backend.parts())
        found = await store.scrub(wanted.rate, lambda done: job.tell(_so_far(done, total)))
    elif isinstance(store.backend, Listable):
        found = await _verify_listed(job)
    else:
        raise ConfigError(f"storage={wanted.shown!r}: its pages cannot be listed, so none can be verified")
    return {**found._asdict(), "elapsed_s": round(time.monotonic() - began, 3), "ok": not (found.bad or found.unread)}


async def _verify_listed(job: Job) -> Scrubbed:
    began, done = time.monotonic(), Scrubbed()
    backend: Any = job.store.backend
    async for found in scrub_listed(backend, _in_a_thread, job.wanted.timeout):
        done = done.plus(found)
        job.tell(_so_far(done, None))
        if job.wanted.rate is not None:
            await asyncio.sleep(pause(done.bytes, job.wanted.rate, time.monotonic() - began))
    return done


async def _in_a_thread(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    return await asyncio.to_thread(verify, keys, records)


def _so_far(done: Scrubbed, total: int | None) -> str:
    of = "" if total is None else f"{percent(done.bytes, total)} · "
    whole = "" if total is None else f" of {size(total)}"
    return f"{of}{size(done.bytes)}{whole} · {number(done.pages)} pages, {number(done.bad)} damaged"


async def _collect(job: Job) -> Report:
    backend, older_than = job.store.backend, job.wanted.older_than
    if not isinstance(backend, Collectable):
        raise ConfigError(f"storage={job.wanted.shown!r}: this kind of store has no garbage that could be collected")
    began = time.monotonic()
    if job.wanted.dry_run:
        assert older_than is not None
        found = await _count_older(job, time.time() - older_than)
    else:
        job.tell("collecting")
        async with within(WHOLE_TIMEOUT, "gc: what was removed stays removed, but all of it was not done"):
            found = (await backend.collect(older_than))._asdict()
    return {**found, "dry_run": job.wanted.dry_run, "elapsed_s": round(time.monotonic() - began, 3), "ok": True}


async def _count_older(job: Job, until: float) -> Report:
    pages = total = unknown = 0
    async for batch in job.listing():
        old = [page.size for page in batch if 0 < page.written < until]
        pages, total = pages + len(old), total + sum(old)
        unknown += sum(not page.written for page in batch)
    return {"pages": pages, "waste": 0, "size": total, "unknown": unknown}


async def _clear(job: Job) -> Report:
    began = time.monotonic()
    job.tell("clearing")
    await job.store.clear()
    return {"elapsed_s": round(time.monotonic() - began, 3), "ok": True}


_ACTIONS = {"ls": _list, "stat": _stat, "verify": _verify, "gc": _collect, "clear": _clear}
