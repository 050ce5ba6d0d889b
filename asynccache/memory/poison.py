"""Poison: what a page on the device holds that nobody has computed, for ``AsyncCache(debug=True)``.

Two kinds. A page that is *free* is all ones, which is NaN in every type of float: whoever reads it gets NaN, and
whoever writes it is seen when the page is taken. A page that is *fresh*, that is, one that a lease has got and not
filled, holds a pattern of small finite numbers, since a kernel may multiply what it masks by zero. The pattern is drawn
at random for each byte, so what an engine computes does not look like it: eight bytes in a row agree by chance once
in 2**32 tries at most.

Everything is done by torch on the pools' device, page by page, and is over when the call returns. A ``Poison`` belongs
to the worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from asynccache.core.settings import ComponentKind
from asynccache.memory.page_bytes import sums
from asynccache.memory.pools import DevicePool

Slots = npt.NDArray[np.int32]

UNKNOWN, FREE, FRESH = 0, 1, 2

PART, WHOLE, NOT_A_NUMBER, WRITTEN = 1, 2, 4, 8
"""What is known of a token, as bits. PART: some of its bytes in a layer are poison. WHOLE: all of them are, in a layer.
NOT_A_NUMBER: all its numbers in a layer are NaN. WRITTEN: in some layer not all of its bytes are poison."""

_ONES = 0xFF
_SEED = 34
_SURE = 8
"""Bytes that must agree with the pattern before they are taken for it."""
_CHUNK = 16
_NUMBERS = 4
"""A token with fewer numbers is not judged by all of them being NaN."""
_STEP_BYTES = 8 << 20
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Poison:
    """The poison in the pages of ``pools``, whose components have ``page_size`` tokens a page. Mutable state: what each
    device slot holds (``UNKNOWN``, ``FREE`` or ``FRESH``), and the free pages that were found written."""

    def __init__(self, pools: Iterable[DevicePool], page_size: int) -> None:
        self._pools: dict[int, list[_PoisonedPool]] = {}
        self._holds: dict[int, npt.NDArray[np.uint8]] = {}
        self._damaged: list[tuple[int, int, str]] = []
        for pool in pools:
            component = int(pool.spec.component)
            self._holds[component] = np.full(pool.spec.device_pages, FREE, np.uint8)
            if pool.spec.bytes_per_page:
                tokens = 1 if pool.spec.component is ComponentKind.MAMBA else page_size
                self._pools.setdefault(component, []).append(_PoisonedPool(pool, tokens))

    def __repr__(self) -> str:
        return f"Poison({', '.join(pool.name for pools in self._pools.values() for pool in pools)})"

    def fill(self, component: int, slots: Slots, *, fresh: bool) -> None:
        """Fill these pages, after a look at those that were free: ``take_damaged`` tells which were written."""
        if component not in self._holds or not len(slots):
            return
        holds = self._holds[component]
        free = slots[holds[slots] == FREE]
        for pool in self._pools.get(component, ()):
            self._check(component, pool, free)
            pool.fill(slots, fresh=fresh)
        holds[slots] = FRESH if fresh else FREE

    def check_free(self) -> None:
        """Look at all pages that are free."""
        for component, pools in self._pools.items():
            for pool in pools:
                self._check(component, pool, np.flatnonzero(self._holds[component] == FREE).astype(np.int32))

    def _check(self, component: int, pool: _PoisonedPool, free: Slots) -> None:
        if len(free):
            self._damaged += [(component, slot, pool.name) for slot in free[pool.damaged(free)].tolist()]

    def forget(self, component: int, slots: Slots) -> None:
        """Note that these pages hold something else from now on."""
        if component in self._holds:
            self._holds[component][slots] = UNKNOWN

    def take_damaged(self) -> list[tuple[int, int, str]]:
        """Return the free pages that were found written since the last call: component, slot and pool of each."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def look(self, component: int, slots: Slots) -> tuple[bytes, bytes, list[str]]:
        """Return three things: 8 bytes of checksum for each of these pages; the bits of each token of the fresh ones;
        and the layers in which nobody has written any of the pages."""
        pools = self._pools.get(component, ())
        total = np.zeros(len(slots), np.int64)
        fresh = self._holds[component][slots] == FRESH if component in self._holds else np.zeros(len(slots), bool)
        bits: npt.NDArray[np.uint8] | None = None
        untouched: list[str] = []
        for pool in pools:
            total = total * 31 + pool.sums(slots)
            own, layers = pool.look(slots, fresh)
            untouched += [f"{pool.name}, layer {layer}" for layer in layers]
            bits = own if bits is None else bits | own
        return total.tobytes(), b"" if bits is None else bits.tobytes(), untouched


class _PoisonedPool:
    """One pool."""

    def __init__(self, pool: DevicePool, tokens: int) -> None:
        spec = pool.spec
        self._pool = pool
        self.name = spec.name
        self._tokens = tokens
        self._layers = [pool.layer(i) for i in range(spec.layers)]
        self._size = size = spec.bytes_per_page // spec.layers
        self._device = self._layers[0].device
        runs = 2 if len(spec.shapes) == 1 and spec.component is not ComponentKind.MAMBA else 1  # keys, then values
        run = size // (runs * tokens) if size % (runs * tokens) == 0 else size
        self._lenient = run == size and tokens > 1  # what a page is made of is not known
        self._chunk = _chunk(run)
        if self._chunk < _SURE:
            self._chunk, self._lenient = size, tokens > 1
        self._judged = self._chunk >= _SURE
        chunks = size // self._chunk
        at = torch.arange(chunks) * self._chunk // run
        self._token = (at % tokens if self._chunk < size or tokens == 1 else at * 0).to(self._device)
        """The token to which each chunk of a layer's page belongs. A chunk is the run of bytes that is compared as one:
        it lies in one token, or is a whole page where a token has too few bytes."""
        self._of_token = torch.bincount(self._token, minlength=tokens)
        draw = np.random.default_rng(_SEED)
        pattern = draw.integers(0, 0x7C, size, np.uint8)
        pattern[1::2] = draw.integers(0x38, 0x40, size // 2, np.uint8)
        self._pattern = torch.from_numpy(pattern).to(self._device)
        self._ones = torch.full_like(self._pattern, _ONES)
        dtype = getattr(torch, spec.dtype) if spec.dtype in _FLOATS else torch.uint8
        numbers = self._chunk % dtype.itemsize == 0 and run >= _NUMBERS * dtype.itemsize
        self._dtype = dtype if dtype.is_floating_point and numbers else None
        self._step = max(1, _STEP_BYTES // max(1, size))
        for layer in self._layers:
            layer.fill_(_ONES)
        self._wait()

    def fill(self, slots: Slots, *, fresh: bool) -> None:
        at = self._index(slots)
        for layer in self._layers:
            layer[at] = self._pattern if fresh else self._ones
        self._wait()

    def damaged(self, slots: Slots) -> npt.NDArray[np.bool_]:
        found = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        for layer in self._layers:
            for i, at in self._steps(slots):
                found[i : i + len(at)] |= (self._words(layer[at]) != self._words(self._ones)).any(1)
        return found.cpu().numpy()

    def sums(self, slots: Slots) -> npt.NDArray[np.int64]:
        return sums(self._layers, self._index(slots), self._step)

    def look(self, slots: Slots, fresh: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Return the bits of each token, and the layers in which nothing was written."""
        bits = torch.zeros((len(slots), self._tokens), dtype=torch.uint8, device=self._device)
        fresh = fresh & (self._judged and not self._pool.has_gaps)
        is_fresh = torch.from_numpy(fresh).to(self._device)[:, None]
        untouched = []
        for number, layer in enumerate(self._layers):
            seen = torch.cat([self._seen(layer[at], is_fresh[i : i + len(at)]) for i, at in self._steps(slots)])
            if fresh.any() and bool((seen[is_fresh[:, 0]] & WHOLE).all()):
                untouched.append(number)
            bits |= seen
        return bits.cpu().numpy(), untouched

    def _seen(self, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        chunks, none = len(self._token), torch.zeros((len(rows), 1), dtype=torch.bool, device=self._device)
        same = self._words(rows) == self._words(self._pattern)
        whole, part = self._count(same.view(len(rows), chunks, -1).all(2)) if bool(same.any()) else (none, none)
        part = part & ~whole if not self._lenient else none
        bits = (part * PART + whole * (PART | WHOLE) + ~whole * WRITTEN) * fresh
        if self._dtype is not None:
            numbers = rows.view(self._dtype).view(len(rows), chunks, -1)
            if bool(numbers[:, :, 0].isnan().any()):
                bits = bits | self._count(numbers.isnan().all(2))[0] * NOT_A_NUMBER
        return bits.to(torch.uint8).expand(-1, self._tokens)

    def _words(self, page: torch.Tensor) -> torch.Tensor:
        """The bytes of pages as words of 8 where chunks are made of such, to compare them in an eighth of the time."""
        return page.view(torch.int64) if self._size % _SURE == 0 and self._chunk % _SURE == 0 else page

    def _count(self, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of which tokens all chunks are True, and of which some are."""
        if len(self._token) == 1 and self._tokens > 1:
            return chunks.expand(-1, self._tokens), chunks.expand(-1, self._tokens)
        counts = torch.zeros((len(chunks), self._tokens), dtype=torch.int64, device=self._device)
        counts.index_add_(1, self._token, chunks.to(torch.int64))
        return counts == self._of_token, counts > 0

    def _steps(self, slots: Slots) -> Sequence[tuple[int, torch.Tensor]]:
        at = self._index(slots)
        return [(i, at[i : i + self._step]) for i in range(0, len(at), self._step)]

    def _index(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _chunk(run: int) -> int:
    """Return the bytes of a chunk: 16 or 8 if ``run`` can be divided by that, else all of it."""
    return next((size for size in (_CHUNK, _SURE) if run % size == 0), run)
