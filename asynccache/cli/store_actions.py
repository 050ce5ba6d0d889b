"""The actions of ``asynccache store``: one coroutine for each, which works on an open store and returns its report.

The store is opened without any pool, so opening it changes nothing in it. Every answer of the store has a deadline. A
listing as a whole has none, but each of its batches has.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median
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


class StoreOptions(NamedTuple):
    """The command line as values. ``timeout``: seconds; ``rate``: bytes per second; ``older_than``: seconds."""

    action: str
    url: str
    timeout: float
    limit: int | None = None
    rate: float | None = None
    older_than: float | None = None
    dry_run: bool = False

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return str(parse_url(self.url))


class StoreAction(NamedTuple):
    """An open store and what to do with it. ``show`` is called with every page of a list, ``tell`` with a line that
    says how far the action has come."""

    store: CheckedStore
    wanted: StoreOptions
    show: Show
    tell: Tell

    def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """The store's pages in batches.

        Raises:
            ConfigError: this kind of store cannot list its pages.
        """
        backend = self.store.backend
        if not isinstance(backend, Listable):
            raise ConfigError(f"storage={self.wanted.shown!r}: this kind of store cannot list its pages")
        return in_time(backend.listing(), self.wanted.timeout)


async def perform(wanted: StoreOptions, show: Show, tell: Tell) -> Report:
    """Open the store, run the action and close the store; returns the report. Cancelling also closes the store.

    Raises:
        ConfigError: the URL names no store, or this kind of store cannot do the action.
        BackendError: the store cannot be opened, or fails.
    """
    at_once = wanted.action in ("gc", "clear")
    timeout = max(wanted.timeout, WHOLE_TIMEOUT) if at_once else wanted.timeout
    async with within(wanted.timeout, f"storage={wanted.shown!r} could not be opened"):
        store = await open_store(wanted.url, StoreLayout({}, RECORD_SCHEMA), timeout=timeout)
    if store is None:
        raise ConfigError(f"storage={wanted.shown!r} is no store")
    try:
        report = await _ACTIONS[wanted.action](StoreAction(store, wanted, show, tell))
    finally:
        await store.aclose()
    return {"command": wanted.action, "url": wanted.shown, **report}


async def _list(action: StoreAction) -> Report:
    pages = total = 0
    limit = action.wanted.limit
    async for batch in action.listing():
        for page in batch:
            if pages == limit:
                return {"pages": pages, "bytes": total, "more": True, "ok": True}
            action.show(page)
            pages, total = pages + 1, total + page.size - HEADER_BYTES
    return {"pages": pages, "bytes": total, "more": False, "ok": True}


async def _stat(action: StoreAction) -> Report:
    store = action.store
    report: Report = {"probe": await _probe(store), "breaker": store.breaker.state.name.lower()}
    if isinstance(store.backend, Listable):
        report |= await _census(action)
    stats = {name: value for name, value in store.backend.stats().items() if name not in ("pages", "bytes")}
    if "pages" not in report:
        known = store.backend.stats()
        report |= {"pages": known["pages"], "bytes": known["bytes"]}
    return {**report, "stats": stats, "ok": report["probe"]["failed"] == 0}


async def _probe(store: CheckedStore) -> Report:
    """Ask a few times for a page that is not there. Returns how long the answers took, and how many failed."""
    took, failed = [], 0
    for _ in range(PROBES):
        began = time.perf_counter()
        failed += await store.exists([PageKey("", os.urandom(KEY_BYTES))]) == [Result.FAILED]
        took.append(round((time.perf_counter() - began) * 1e3, 3))
    return {"median_ms": median(took), "worst_ms": max(took), "failed": failed}


async def _census(action: StoreAction) -> Report:
    """Count the pages by size and by age."""
    now, sizes, ages = time.time(), Counter[int](), Counter[str]()
    async for batch in action.listing():
        for page in batch:
            sizes[page.size - HEADER_BYTES] += 1
            ages[age_class(now - page.written if page.written else None)] += 1
        action.tell(f"{number(sizes.total())} pages listed")
    return {
        "pages": sizes.total(),
        "bytes": sum(length * count for length, count in sizes.items()),
        "by_page_size": [{"page_bytes": length, "pages": sizes[length]} for length in sorted(sizes)],
        "by_age": {name: ages[name] for name in (*AGES, OLDER, UNKNOWN) if ages[name]},
    }


def age_class(seconds: float | None) -> str:
    """The name of the first class of ``AGES`` that a page of this age is below; None: its age is not known."""
    if seconds is None:
        return UNKNOWN
    return next((name for name, limit in AGES.items() if seconds < limit), OLDER)


async def _verify(action: StoreAction) -> Report:
    began, store, wanted = time.monotonic(), action.store, action.wanted
    if isinstance(store.backend, Scrubbable):
        total = sum(part.pages * part.page_bytes for part in store.backend.parts())
        found = await store.scrub(wanted.rate, lambda done: action.tell(_so_far(done, total)))
    elif isinstance(store.backend, Listable):
        found = await _verify_listed(action)
    else:
        raise ConfigError(f"storage={wanted.shown!r}: its pages cannot be listed, so none can be verified")
    return {**found._asdict(), "elapsed_s": round(time.monotonic() - began, 3), "ok": not (found.bad or found.unread)}


async def _verify_listed(action: StoreAction) -> Scrubbed:
    began, done = time.monotonic(), Scrubbed()
    backend: Any = action.store.backend
    async for found in scrub_listed(backend, _in_a_thread, action.wanted.timeout):
        done = done.plus(found)
        action.tell(_so_far(done, None))
        if action.wanted.rate is not None:
            await asyncio.sleep(pause(done.bytes, action.wanted.rate, time.monotonic() - began))
    return done


async def _in_a_thread(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    return await asyncio.to_thread(verify, keys, records)


def _so_far(done: Scrubbed, total: int | None) -> str:
    of = "" if total is None else f"{percent(done.bytes, total)} · "
    whole = "" if total is None else f" of {size(total)}"
    return f"{of}{size(done.bytes)}{whole} · {number(done.pages)} pages, {number(done.bad)} damaged"


async def _collect(action: StoreAction) -> Report:
    backend, older_than = action.store.backend, action.wanted.older_than
    if not isinstance(backend, Collectable):
        raise ConfigError(f"storage={action.wanted.shown!r}: this kind of store has nothing that gc could remove")
    began = time.monotonic()
    if action.wanted.dry_run:
        assert older_than is not None
        found = await _count_older(action, time.time() - older_than)
    else:
        action.tell("collecting")
        async with within(WHOLE_TIMEOUT, "gc was not finished; what it has removed stays removed"):
            found = (await backend.collect(older_than))._asdict()
    return {**found, "dry_run": action.wanted.dry_run, "elapsed_s": round(time.monotonic() - began, 3), "ok": True}


async def _count_older(action: StoreAction, until: float) -> Report:
    pages = total = unknown = 0
    async for batch in action.listing():
        old = [page.size for page in batch if 0 < page.written < until]
        pages, total = pages + len(old), total + sum(old)
        unknown += sum(not page.written for page in batch)
    return {"pages": pages, "waste": 0, "size": total, "unknown": unknown}


async def _clear(action: StoreAction) -> Report:
    began = time.monotonic()
    action.tell("clearing")
    await action.store.clear()
    return {"elapsed_s": round(time.monotonic() - began, 3), "ok": True}


_ACTIONS = {"ls": _list, "stat": _stat, "verify": _verify, "gc": _collect, "clear": _clear}
