"""The client's blocking calls, each for a batch of pages. The methods are called in threads.

An object is a page's header followed by its payload. The client moves a payload directly from or into its buffer, if
that is in registered memory. Headers are copied through a *stage*, registered memory of this module. Some pages are
copied through the stage as a whole, where header and payload lie side by side: pages whose buffers are not registered
(of tools, of tests, of promotions, of a pool that the client has refused), and over TCP short pages, for which a second
transfer takes longer than the copy. The methods return the client's codes, one for each page.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import accumulate
from threading import Lock, local

from asynccache.errors import BackendError
from asynccache.storage import HEADER_BYTES, Record
from asynccache_backends.mooncake.client import MooncakeClient, Region, address_of, copy, region_of
from asynccache_backends.mooncake.codes import NOT_TRIED

STAGE_BYTES = 8 << 20
SHORT_BYTES = 128 << 10  # over TCP; with pages of 64 KiB the stage was twice as fast, with 256 KiB equally fast

Names = Sequence[str]


class ClientCalls:
    """The calls of one cache to the shared client. Mutable state: the regions of this cache, and a stage for each
    thread.
    """

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
        self.staged = 0
        """Pages that were copied through a stage."""
        self.refused = 0
        """Regions that the client has refused."""

    @property
    def registered(self) -> int:
        """The bytes that are registered for this cache."""
        return sum(region.end - region.start for region in self._regions)

    def expect(self, memory: memoryview) -> None:
        """Have ``memory`` registered before the next call. It is not done at once, because it takes long with RDMA."""
        self._held.append(memory)
        self._coming.append(region_of(memory))

    def put(self, names: Names, records: Sequence[Record]) -> list[int]:
        """Store objects. Those that exist are left as they are."""
        return self._moved(names, records, into=False)

    def get(self, names: Names, records: Sequence[Record]) -> list[int]:
        """Read objects into records. No name may come twice: the client would fill one of the records and report
        both."""
        return self._moved(names, records, into=True)

    def exists(self, names: Names) -> list[int]:
        """Ask whether objects exist. The code is 1 for those that do, and 0 for those that do not."""
        return self._call("batch_is_exist", names)

    def delete(self, names: Names) -> list[int]:
        """Remove objects, also those that the store protects for some seconds because somebody has read them."""
        return self._call("batch_remove", names, True)

    def clear(self, pattern: str) -> int:
        """Remove all objects whose names match the regular expression. Returns how many, or a negative code."""
        with self._client as store:
            code: int = store.remove_by_regex(pattern, True)
        return code

    def sizes(self, names: Names) -> list[int | None]:
        """Return the length of each object in bytes; None if it does not exist or is not in memory."""
        with self._client as store:
            found = store.batch_get_replica_desc(names)
        memories = [next((r for r in found.get(name, ()) if r.is_memory_replica()), None) for name in names]
        return [r and r.get_memory_descriptor().buffer_descriptor.size for r in memories]

    def close(self) -> None:
        """Unregister all memory of this cache. No call may be under way."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            self._client.regions.remove(region)
        self._held.clear()

    def _register(self) -> None:
        with self._lock:
            while self._coming:
                region = self._coming.pop(0)
                if self._client.regions.add(region):
                    self._regions.append(region)
                else:
                    self.refused += 1

    def _moved(self, names: Names, records: Sequence[Record], *, into: bool) -> list[int]:
        self._register()
        direct: list[int] = []
        staged: list[int] = []
        for i, record in enumerate(records):
            size = record.payload.nbytes
            directly = size >= self._short and self._client.regions.covers(address_of(record.payload), size)
            (direct if directly else staged).append(i)
        codes = [NOT_TRIED] * len(names)
        for which, move in ((direct, self._directly), (staged, self._staged)):
            if not which:
                continue
            answer = move([names[i] for i in which], [records[i] for i in which], into)
            if len(answer) != len(which):
                raise BackendError(f"mooncake: the client answered {len(answer)} codes for {len(which)} pages")
            for i, code in zip(which, answer, strict=True):
                codes[i] = code
        return codes

    def _directly(self, names: Names, records: Sequence[Record], into: bool) -> list[int]:
        """Move the payloads from or into where they lie, and the headers through the stage."""
        stage = self._stage_of(HEADER_BYTES * len(records))
        headers = [stage[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(records))]
        if not into:
            for header, record in zip(headers, records, strict=True):
                header[:] = record.header
        buffers = [(address_of(header), address_of(r.payload)) for header, r in zip(headers, records, strict=True)]
        codes = self._move(names, buffers, [(HEADER_BYTES, record.payload.nbytes) for record in records], into)
        if into:
            for header, record in zip(headers, records, strict=True):
                record.header[:] = header
        return codes

    def _staged(self, names: Names, records: Sequence[Record], into: bool) -> list[int]:
        codes: list[int] = []
        for part in parts(records, STAGE_BYTES):
            lengths = [HEADER_BYTES + record.payload.nbytes for record in records[part]]
            ends = list(accumulate(lengths))
            stage = self._stage_of(ends[-1])
            spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
            copies = [Record(stage[at : at + HEADER_BYTES], stage[at + HEADER_BYTES : end]) for at, end in spans]
            if not into:
                _copy(copies, records[part])
            buffers = [(address_of(stage) + at,) for at, _ in spans]
            codes += self._move(names[part], buffers, [(length,) for length in lengths], into)
            if into:
                _copy(records[part], copies)
        with self._lock:
            self.staged += len(records)
        return codes

    def _move(self, names: Names, buffers: Sequence[object], sizes: Sequence[object], into: bool) -> list[int]:
        """Have the library move pages. For each page, ``buffers`` has the addresses of its buffers, and ``sizes`` their
        sizes."""
        if into:
            return self._call("batch_get_into_multi_buffers", names, buffers, sizes)
        return self._call("batch_put_from_multi_buffers", names, buffers, sizes, self._config)

    def _call(self, name: str, *args: object) -> list[int]:
        self._register()
        with self._client as store:
            codes: list[int] = getattr(store, name)(*args)
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
        length = HEADER_BYTES + record.payload.nbytes
        if size and size + length > limit:
            yield slice(start, i)
            start, size = i, 0
        size += length
    if records:
        yield slice(start, len(records))


def _copy(to: Sequence[Record], source: Sequence[Record]) -> None:
    for target, origin in zip(to, source, strict=True):
        target.header[:] = origin.header
        copy(target.payload, origin.payload)
