"""The client's blocking calls, each for a batch of pages. The methods are called in threads.

An object is a page's header followed by its payload. The client moves a payload directly from or into its buffer, if
that is in registered memory. Headers are copied through a *stage*, registered memory of this module. Some pages are
copied through the stage as a whole, where header and payload lie side by side: pages whose buffers are not registered
(of tools, of tests, of promotions, of a pool that the client has refused), and over TCP short pages, for which a second
transfer takes longer than the copy. The methods return the client's codes, one for each page.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from threading import Lock, local
from typing import Any, cast

from asynccache.errors import BackendError
from asynccache.storage import HEADER_BYTES, Record
from asynccache_backends.mooncake.client import MooncakeClient
from asynccache_backends.mooncake.codes import NOT_TRIED, is_nobody, lost_master
from asynccache_backends.mooncake.regions import Region, address_of, copy, region_of

STAGE_BYTES = 8 << 20
SHORT_BYTES = 128 << 10  # over TCP; with pages of 64 KiB the stage was twice as fast, with 256 KiB equally fast

Names = Sequence[str]
Move = Callable[..., list[int]]
"""A call of the library. Its arguments are the library's object, the pages' names, and for each page the addresses of
its buffers and their sizes. It returns a code for each page."""


class CallAttempt:
    """The state that the parts of one call share. ``given_up``: True if one of them has reached nobody, or the call was
    cancelled. Then the parts that have not begun are not made."""

    def __init__(self) -> None:
        self.given_up = False


class ClientCalls:
    """The calls of one cache to the shared client. Mutable state: the regions of this cache, and a stage for each
    thread. ``lost_master``: whether the master did not answer in the last call that has ended. ``staged``: pages that
    were copied through a stage. ``refused``: regions that the client has refused."""

    def __init__(self, client: MooncakeClient, replicas: int) -> None:
        self._client = client
        self._config = client.module.ReplicateConfig()
        self._config.replica_num = replicas
        self._coming: list[Region] = []
        self._regions: list[Region] = []
        self._held: list[memoryview] = []
        self._lock = Lock()
        self._short = SHORT_BYTES if client.options.protocol == "tcp" else 0
        self._own = local()  # a stage for each thread, so that no read waits for the stage of a write
        self.lost_master = False
        self.staged = 0
        self.refused = 0

    @property
    def registered(self) -> int:
        """The bytes that are registered for this cache."""
        return sum(region.end - region.start for region in self._regions)

    def expect(self, memory: memoryview) -> None:
        """Have ``memory`` registered before the next call. It is not done at once, because it takes long with RDMA."""
        self._held.append(memory)
        self._coming.append(region_of(memory))

    def put(self, attempt: CallAttempt, names: Names, records: Sequence[Record]) -> list[int]:
        """Store objects. Those that exist are left as they are."""
        def move(store: Any, *pages: object) -> list[int]:
            return cast(list[int], store.batch_put_from_multi_buffers(*pages, self._config))

        return self._tried(attempt, len(names), lambda: self._moved(names, records, move, into=False))

    def get(self, attempt: CallAttempt, names: Names, records: Sequence[Record]) -> list[int]:
        """Read objects into records. No name may come twice: the client would fill one of the records and report
        both."""
        def move(store: Any, *pages: object) -> list[int]:
            return cast(list[int], store.batch_get_into_multi_buffers(*pages))

        return self._tried(attempt, len(names), lambda: self._moved(names, records, move, into=True))

    def exists(self, attempt: CallAttempt, names: Names) -> list[int]:
        """Ask whether objects exist. The code is 1 for those that do, and 0 for those that do not."""
        return self._tried(attempt, len(names), lambda: self._called("batch_is_exist", names))

    def delete(self, attempt: CallAttempt, names: Names) -> list[int]:
        """Remove objects, also those that the store protects for some seconds because somebody has read them."""
        return self._tried(attempt, len(names), lambda: self._called("batch_remove", names, True))

    def clear(self, pattern: str) -> int:
        """Remove all objects whose names match the regular expression. Returns how many, or a negative code."""
        with self._client as store:
            code: int = store.remove_by_regex(pattern, True)
        return code

    def sizes(self, names: Names) -> list[int | None]:
        """Return the length of each object in bytes; None if it does not exist or is not in memory."""
        with self._client as store:
            found = store.batch_get_replica_desc(names)
        return [_size(found.get(name, ())) for name in names]

    def close(self) -> None:
        """Unregister all memory of this cache. No call may be under way."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            self._client.regions.remove(region)
        self._held.clear()

    def _tried(self, attempt: CallAttempt, count: int, call: Callable[[], list[int]]) -> list[int]:
        if attempt.given_up:
            return [NOT_TRIED] * count
        if self._coming:
            self._register()
        codes = call()
        attempt.given_up |= is_nobody(codes)
        self.lost_master = lost_master(codes)
        return codes

    def _called(self, name: str, *args: object) -> list[int]:
        with self._client as store:
            codes: list[int] = getattr(store, name)(*args)
        return codes

    def _register(self) -> None:
        with self._lock:
            while self._coming:
                region = self._coming.pop(0)
                if self._client.regions.add(region):
                    self._regions.append(region)
                else:
                    self.refused += 1

    def _moved(self, names: Names, records: Sequence[Record], move: Move, *, into: bool) -> list[int]:
        """Move pages, in one call those whose payloads go directly, and in others those that go through the stage."""
        payloads = [address_of(record.payload) for record in records]
        direct: list[int] = []
        staged: list[int] = []
        for i, (place, record) in enumerate(zip(payloads, records, strict=True)):
            (direct if self._goes_directly(place, record.payload.nbytes) else staged).append(i)
        codes = [NOT_TRIED] * len(names)
        if direct:
            answer = self._directly([names[i] for i in direct], [records[i] for i in direct], move, into)
            _fill(codes, direct, answer)
        if staged:
            answer = self._staged([names[i] for i in staged], [records[i] for i in staged], move, into)
            _fill(codes, staged, answer)
        return codes

    def _goes_directly(self, place: int, size: int) -> bool:
        return size >= self._short and self._client.regions.covers(place, size)

    def _directly(self, names: Names, records: Sequence[Record], move: Move, into: bool) -> list[int]:
        """Move the payloads from or into where they lie, and the headers through the stage."""
        stage = self._stage_of(HEADER_BYTES * len(records))
        headers = [stage[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(records))]
        if not into:
            for header, record in zip(headers, records, strict=True):
                header[:] = record.header
        buffers = [(address_of(header), address_of(r.payload)) for header, r in zip(headers, records, strict=True)]
        with self._client as store:
            codes = move(store, names, buffers, [(HEADER_BYTES, record.payload.nbytes) for record in records])
        if into:
            for header, record in zip(headers, records, strict=True):
                record.header[:] = header
        return codes

    def _staged(self, names: Names, records: Sequence[Record], move: Move, into: bool) -> list[int]:
        codes: list[int] = []
        for part in parts(records, STAGE_BYTES):
            codes += self._through_stage(names[part], records[part], move, into)
        with self._lock:
            self.staged += len(records)
        return codes

    def _through_stage(self, names: Names, records: Sequence[Record], move: Move, into: bool) -> list[int]:
        lengths = list(map(_length, records))
        stage = self._stage_of(sum(lengths))
        places = list(_laid_out(stage, records))
        if not into:
            _copy_all(places, records)
        start = address_of(stage)
        ends = list(accumulate(lengths))
        buffers = [(start + end - length,) for end, length in zip(ends, lengths, strict=True)]
        with self._client as store:
            codes = move(store, names, buffers, [(length,) for length in lengths])
        if into:
            _copy_all(records, places)
        return codes

    def _stage_of(self, size: int) -> memoryview:
        """Return the stage of the current thread, with room for ``size`` bytes. For a longer page a longer stage is
        made."""
        stage: memoryview | None = getattr(self._own, "stage", None)
        if stage is None or stage.nbytes < size:
            self._own.stage = stage = memoryview(mmap.mmap(-1, max(size, STAGE_BYTES)))
            self.expect(stage)
            self._register()
        return stage


def parts(records: Sequence[Record], limit: int) -> Iterator[slice]:
    """Cut ``records`` into runs of at most ``limit`` bytes, with at least one record each."""
    start = size = 0
    for i, record in enumerate(records):
        if size and size + _length(record) > limit:
            yield slice(start, i)
            start, size = i, 0
        size += _length(record)
    if records:
        yield slice(start, len(records))


def _fill(codes: list[int], which: Sequence[int], answer: Sequence[int]) -> None:
    if len(answer) != len(which):
        raise BackendError(f"mooncake: the client answered {len(answer)} codes for {len(which)} pages")
    for i, code in zip(which, answer, strict=True):
        codes[i] = code


def _length(record: Record) -> int:
    return HEADER_BYTES + record.payload.nbytes


def _laid_out(stage: memoryview, records: Sequence[Record]) -> Iterator[Record]:
    at = 0
    for record in records:
        end = at + _length(record)
        yield Record(stage[at : at + HEADER_BYTES], stage[at + HEADER_BYTES : end])
        at = end


def _copy_all(to: Sequence[Record], source: Sequence[Record]) -> None:
    for target, origin in zip(to, source, strict=True):
        target.header[:] = origin.header
        copy(target.payload, origin.payload)


def _size(replicas: Sequence[Any]) -> int | None:
    for replica in replicas:
        if replica.is_memory_replica():
            size: int = replica.get_memory_descriptor().buffer_descriptor.size
            return size
    return None
