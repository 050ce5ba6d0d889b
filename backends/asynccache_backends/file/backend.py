"""The file backend: pages in segment files under one folder, for one process at a time.

The laws. Nothing is overwritten: a page is written once, beside others, and its segment is deleted whole. The index
in memory says what is there; the files can say it again after a crash. A page is usable once it is written; it survives
a power loss once ``flush``, a snapshot or ``aclose`` has synced it. Payloads are not verified here: ``CheckedStore``
does that. A disk that is full or broken makes writes FAILED at once and for a while (a back-off), and reads go on.

``settings`` has what a URL may say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Self

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    REFUSED,
    Breaker,
    Collected,
    PageKey,
    ParsedUrl,
    Part,
    Permit,
    Record,
    Result,
    Scrubbed,
    Stored,
    StoreLayout,
    Tell,
    Verify,
    completed,
    settled,
)
from asynccache_backends.file.aio import BatchIO, Moved, ThreadIO
from asynccache_backends.file.blocks import Group
from asynccache_backends.file.files import Folder
from asynccache_backends.file.folder import FolderLock, capacity_of, claim, load_manifest
from asynccache_backends.file.janitor import Janitor
from asynccache_backends.file.listing import stored_pages, written_before
from asynccache_backends.file.operations import Operations
from asynccache_backends.file.reads import ReadBatch, find_stretches, plan_reads
from asynccache_backends.file.recovery import recover
from asynccache_backends.file.scrub import is_gone, is_intact, read_group, stored_records
from asynccache_backends.file.segments import Segment, segment_name, supports_direct
from asynccache_backends.file.settings import settings_of
from asynccache_backends.file.state import StoreState, Writing

MISS, HIT, CORRUPT, FAILED = Result  # the members cost 0.2 µs to look up, for every page of every call


class _Put(NamedTuple):
    """One call's new pages: ``fresh`` by payload length, and keys that this or another call is writing already."""

    keys: Sequence[PageKey]
    records: Sequence[Record]
    results: list[Result]
    fresh: dict[int, list[int]]
    shared: list[tuple[int, asyncio.Future[None]]]
    writings: list[tuple[Writing, list[int]]]
    done: asyncio.Future[None]


class FileBackend:
    """Made by ``open``."""

    def __init__(self, state: StoreState, lock: FolderLock, page_bytes: Mapping[str, int]) -> None:
        self._state = state
        self._lock = lock
        self._page_bytes = page_bytes
        self._janitor = Janitor(state)
        self._gate = Breaker(threshold=1)
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        self._operations = Operations(f"store folder {str(state.folder.path)!r}")

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Refuse what ``open`` would refuse of ``url`` before it looks at the disk. Raises ConfigError."""
        settings_of(url, layout)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Open or make the store in the folder ``url.path``. A layout without pools means that it is only looked at:
        it must be there, and nothing leaves it for want of room.

        Raises:
            ConfigError: an option is unknown or unusable.
            Unavailable: another process has the folder, another format or schema wrote it, something that is no plain
                file lies in the place of one of its files, or the disk refuses.

        Cancelling it leaves nothing open.
        """
        settings = settings_of(url, layout)
        lock = claim(settings.folder, mode=settings.mode, new=settings.used)
        io = ThreadIO()
        store: Self | None = None
        try:
            folder = lock.folder
            manifest = await completed(load_manifest(folder, layout.schema))
            capacity = await completed(capacity_of(folder, settings))
            direct = _use_direct(folder, settings.direct)
            state = StoreState(folder, manifest.seed, io, capacity, settings.segment, direct)
            store = cls(state, lock, layout.page_bytes)
            await store._recover()
        except BaseException as error:
            _let_go(store._state if store else None, io, lock)
            if isinstance(error, OSError):
                raise Unavailable(f"store folder {str(settings.folder)!r}: {error}") from error
            raise
        return store

    def __repr__(self) -> str:
        return f"FileBackend({str(self._state.folder.path)!r}, {self._state.index!r}, {self._state.log!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS per key. Never waits."""
        with self._operations:
            index = self._state.index
            return [HIT if key.key in index else MISS for key in keys]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read pages straight into their payload buffers.

        Cancelling it returns after the reads that have begun are over.
        """
        with self._operations:
            results = [MISS] * len(keys)
            stretches, wrong = find_stretches(self._state.index, keys, records)
            for i in wrong:
                results[i] = CORRUPT
            batches = plan_reads(stretches, records)
            segments = [self._state.log.segments[batch.segment] for batch in batches]
            futures = [self._begin_read(batch, segment) for batch, segment in zip(batches, segments, strict=True)]
            try:
                await settled(futures)
            finally:
                for segment in segments:
                    segment.leave()
            for batch, future in zip(batches, futures, strict=True):
                self._end_read(batch, future.result(), records, results)
            return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Append new pages, in groups; those that are there already are left alone.

        Cancelling it returns after the writes that have begun are over; they count.
        """
        with self._operations:
            results = [FAILED] * len(keys)
            left = list(range(len(keys)))
            while left:
                put = self._sort_out(left, keys, records, results)
                if put.fresh:
                    await self._write(put)
                left = await self._shared(put)
            return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key, now and after a restart. FAILED: gone now, but a crash may bring it back.

        Cancelling it may leave any of them deleted.
        """
        with self._operations:
            found = [self._state.index.forget(key.key) for key in keys]
            outcome = await self._bury([place for place in found if place is not None])
            return [MISS if place is None else outcome for place in found]

    async def clear(self) -> None:
        """Forget everything and delete the segments.

        Raises:
            Unavailable: the disk refuses. Cancelling it may leave part of it cleared.
        """
        with self._operations:
            await self._janitor.clear()

    def parts(self) -> list[Part]:
        """A part for every group that was written; pages of this call's time only."""
        groups = ((group, len(group.live())) for group in self._state.index.groups())
        return [Part(group.length, count, group) for group, count in groups if count]

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read a group from its file. If its header block is not intact, all of its pages are bad.

        Cancelling it returns after what is being read or verified; nothing more is forgotten.
        """
        with self._operations:
            group: Group = part.place
            try:
                data = await completed(read_group(self._state.folder, segment_name(group.segment), group))
            except OSError as error:
                self._state.counts["errors"] += not is_gone(error)
                return Scrubbed() if is_gone(error) else Scrubbed(unread=len(group.live()))
            pages = group.live()
            good = [False] * len(pages)
            if is_intact(group, data, self._state.seed):
                good = await verify(*stored_records(group, pages, data))
            bad = [page for page, is_good in zip(pages, good, strict=True) if not is_good]
            dropped = [place for page in bad if (place := self._state.index.forget_at(group, page))]
            await self._bury(dropped)
            return Scrubbed(len(pages), len(pages) * group.length, len(dropped), 0)

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """What the index says, a segment at a time. Cancelling it changes nothing."""
        for number in list(self._state.log.segments):
            with self._operations:
                groups = self._state.index.groups_of(number)
                found = [stored for group in groups for stored in stored_pages(group)]
            if found:
                yield found
            await asyncio.sleep(0)

    async def collect(self, older_than: float | None) -> Collected:
        """Forget old pages, then give back what dead ones take, as far as the live ones beside them find room.

        Raises:
            Unavailable: the disk refuses. Cancelling it leaves the rest for the next time.
        """
        with self._operations:
            before, old = self._state.log.bytes, 0
            if older_than is not None:
                places = list(written_before(self._state.index.groups(), time.time() - older_than))
                forgotten = [place for at in places if (place := self._state.index.forget_at(*at))]
                await self._bury(forgotten)
                old = len(forgotten)
            dead = await self._janitor.compact()
            return Collected(old, max(0, dead - old), max(0, before - self._state.log.bytes))

    def register(self, pool: str, memory: memoryview) -> None:
        """Nothing to do: whether buffers are aligned shows when they are used."""

    def watch(self, tell: Tell | None) -> None:
        """``tell`` hears of every key that is there, and of every change; None: of nothing any more."""
        self._state.index.tell = tell
        if tell is not None:
            tell(True, self._state.index.keys())

    def stats(self) -> Mapping[str, int | float]:
        """Counters. ``write_amplification`` is bytes written, rewritten ones included, per byte put."""
        state, counts = self._state, self._state.counts
        return {
            "pages": state.index.pages,
            "bytes": state.index.bytes,
            "capacity_bytes": state.capacity,
            "disk_bytes": state.log.bytes,
            "segments": len(state.log.segments),
            "direct": int(state.direct),
            "write_amplification": 1 + counts["moved_bytes"] / max(1, counts["put_bytes"]),
            **{name: counts[name] for name in COUNTERS},
        }

    async def flush(self) -> None:
        """Return once everything put so far would survive a power loss.

        Raises:
            Unavailable: the disk refuses. Cancelling it is safe.
        """
        with self._operations:
            await self._janitor.sync()
            await self._janitor.save_if_due()

    async def aclose(self) -> None:
        """Wait for what is in flight, sync, save the index, and let go of the folder. Calls made later raise.

        Raises:
            Unavailable: the disk refuses; the folder is let go all the same. Cancelling it skips syncing and saving,
            after what is in flight is over.
        """
        if self._operations.closed:
            return
        try:
            await self._operations.close()
            await self._janitor.close()
        finally:
            try:
                await self._janitor.stop()
            finally:
                _let_go(self._state, self._state.io, self._lock)

    async def _bury(self, dead: Sequence[tuple[Group, int]]) -> Result:
        """Make it outlive a restart that pages were forgotten. FAILED: a crash may bring them back."""
        if not dead:
            return HIT
        masks: dict[Group, int] = {}
        for group, page in dead:
            masks[group] = masks.get(group, 0) | 1 << page
        self._state.counts["deleted"] += len(dead)
        error = await self._janitor.log_deaths(list(masks.items()))
        self._state.counts["errors"] += error is not None
        return HIT if error is None else FAILED

    def _begin_read(self, batch: ReadBatch, segment: Segment) -> asyncio.Future[Moved]:
        segment.enter()
        return self._state.io.read(self._state.files_for(segment, batch.length), batch.runs)

    def _end_read(self, batch: ReadBatch, moved: Moved, records: Sequence[Record], results: list[Result]) -> None:
        """A page that is not there to the last byte is CORRUPT, or FAILED if there was an error in its batch."""
        length, total, missing = batch.length, 0, CORRUPT if moved.error is None else FAILED
        for count, (group, page, which) in zip(moved.bytes, batch.stretches, strict=True):
            whole = count // length
            for n, i in enumerate(which):
                if n < whole:
                    records[i].header[:] = group.header(page + n)
                    results[i] = HIT
                else:
                    results[i] = missing
            group.hot |= ((1 << whole) - 1) << page
            total += whole * length
        if moved.misaligned:
            self._state.misaligned(length)
        self._state.counts["errors"] += moved.error is not None
        self._state.counts["get_bytes"] += total

    def _sort_out(
        self, left: Sequence[int], keys: Sequence[PageKey], records: Sequence[Record], results: list[Result]
    ) -> _Put:
        """Which of the pages ``left`` must be written: not those that are there, nor those being written now."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        put = _Put(keys, records, results, {}, [], [], done)
        has, writing, sizes = self._state.index.has, self._writing, self._page_bytes
        for i in left:
            pool, key = keys[i]
            if has(key):
                results[i] = HIT
            elif key in writing:
                put.shared.append((i, writing[key]))
            elif (size := records[i].payload.nbytes) == sizes.get(pool):
                writing[key] = done
                put.fresh.setdefault(size, []).append(i)
        return put

    async def _shared(self, put: _Put) -> list[int]:
        """Wait for the calls that write pages of this one; those that they did not store are left to do."""
        left = []
        for i, done in put.shared:
            await asyncio.wait([done])
            if put.keys[i].key in self._state.index:
                put.results[i] = HIT
            else:
                left.append(i)
        return left

    async def _write(self, put: _Put) -> None:
        """Write the fresh pages, all groups at once; results and index are true when it ends, come what may."""
        permit, error = self._gate.allow(asyncio.get_running_loop().time()), None
        try:
            if permit != REFUSED:
                error = await self._submit(put)
        finally:
            try:
                await settled([writing.done for writing, _ in put.writings])
            finally:
                error = self._finish(put) or error
                self._tell_gate(permit, error, put)

    async def _submit(self, put: _Put) -> OSError | None:
        """Start a write for every group. An error: there is no segment to be had for the rest."""
        try:
            for length, indices in put.fresh.items():
                at = 0
                while at < len(indices):
                    part = indices[at : at + await self._fit(length, len(indices) - at)]
                    put.writings.append((self._begin_write(put, length, part), part))
                    at += len(part)
        except OSError as error:
            self._state.counts["errors"] += 1
            return error
        self._janitor.look_ahead()
        return None

    async def _fit(self, length: int, wanted: int) -> int:
        """How many pages the next group gets; there is room for it, until the next await."""
        while not (count := self._state.log.fit(length, wanted)):
            await self._janitor.advance()
        return count

    def _begin_write(self, put: _Put, length: int, part: Sequence[int]) -> Writing:
        pieces: list[bytes | memoryview] = []
        payloads = []
        for i in part:
            header, payload = put.records[i]
            pieces += (put.keys[i][1], header)
            payloads.append(payload)
        return self._state.begin_write(length, b"".join(pieces), payloads)

    def _finish(self, put: _Put) -> OSError | None:
        """Take note of every write that has begun, and tell those who share its keys."""
        failed = None
        for writing, part in put.writings:
            error = self._state.end_write(writing)
            failed = failed or error
            if error is None:
                self._state.counts["put_bytes"] += len(part) * writing.group.length
                for i in part:
                    put.results[i] = HIT
        for indices in put.fresh.values():
            for i in indices:
                del self._writing[put.keys[i][1]]
        put.done.set_result(None)
        return failed

    def _tell_gate(self, permit: Permit, error: OSError | None, put: _Put) -> None:
        if permit == REFUSED:
            self._state.counts["refused_writes"] += 1
        elif error is not None:
            self._gate.failure(permit, asyncio.get_running_loop().time())
        elif put.writings:
            self._gate.success(permit)
        else:
            self._gate.abandon(permit)

    async def _recover(self) -> None:
        """Find what earlier runs left, and go on in their last segment if it has room."""
        state, started = self._state, time.monotonic()
        recovering = state.io.call(recover, state.folder, state.seed, state.direct)
        try:
            await settled([recovering])
        finally:
            found = recovering.result()
            for segment in () if isinstance(found, OSError) else found.segments:
                state.log.add(segment)
        if isinstance(found, OSError):
            raise found
        state.index = found.found
        if self._page_bytes:
            await self._make_ready()
        if found.scanned or found.stale_deaths:
            await self._janitor.save()
        state.counts["scanned_groups"] = found.scanned
        state.counts["open_ms"] = round((time.monotonic() - started) * 1000)

    async def _make_ready(self) -> None:
        """For writing: within the capacity, and with the last segment open if it has room."""
        await self._janitor.trim()
        last = next(reversed(self._state.log.segments.values()), None)
        if last is not None and last.tail < self._state.segment_bytes:
            await self._janitor.reuse(last)


COUNTERS = (
    "errors", "put_bytes", "get_bytes", "moved_pages", "moved_bytes", "evicted_pages", "reclaimed_segments",
    "refused_writes", "deleted", "snapshots", "scanned_groups", "open_ms",
)


def _let_go(state: StoreState | None, io: BatchIO, lock: FolderLock) -> None:
    """Close every file and the threads, and unlock the folder. Nothing is in flight."""
    for segment in state.log.segments.values() if state else ():
        segment.drop()
    io.close()
    lock.release()


def _use_direct(folder: Folder, wanted: str) -> bool:
    if wanted == "off":
        return False
    possible = supports_direct(folder)
    if wanted == "on" and not possible:
        raise ConfigError(f"storage option direct='on': folder {str(folder.path)!r} does not support O_DIRECT")
    return possible
