"""The data that a pool's page holds for one layer of the model, and how it is read and written there.

A *unit* is what the model keeps for a run of ``stride`` tokens: one token's keys and values (1), a compressed
entry (its rate), the state at a page's end (the page). A unit is in the page of its last token. So a whole page has
every unit that was complete at the page's end, and it never changes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from asynccache_shim.model import Pages

from asynccache import ConfigError

ALIGN = 16
"""Bytes that every unit is a multiple of, so that its fields can be viewed as any dtype."""

Values = Mapping[str, torch.Tensor]


class UnitField(NamedTuple):
    """One tensor of a unit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Track:
    """The data that one layer of the model keeps in one pool."""

    pool: str
    source: str
    """The component whose page table finds the track's pages."""
    stride: int
    fields: tuple[UnitField, ...]

    @classmethod
    def of(cls, pool: str, source: str, stride: int, samples: Values) -> Track:
        """Return a track whose fields have the shapes and dtypes of ``samples``: one unit of each field."""
        fields, offset = [], 0
        for name, tensor in samples.items():
            field = UnitField(name, tuple(tensor.shape), tensor.dtype, offset)
            fields.append(field)
            offset = aligned(offset + field.size)
        return cls(pool, source, stride, tuple(fields))

    @property
    def unit_bytes(self) -> int:
        last = self.fields[-1]
        return aligned(last.offset + last.size)

    @property
    def dtypes(self) -> str:
        """The dtypes of its fields, for the pool's description."""
        return "+".join(sorted({str(field.dtype).removeprefix("torch.") for field in self.fields}))

    def per_page(self, page_size: int) -> int:
        """Units that a page has room for."""
        return max(1, page_size // self.stride)

    def page_bytes(self, page_size: int) -> int:
        return self.per_page(page_size) * self.unit_bytes

    def has_gaps(self, page_size: int) -> bool:
        """Return True if a page that is computed has bytes that nobody writes: between fields, or all of them, where a
        unit ends in a later page."""
        return sum(field.size for field in self.fields) < self.unit_bytes or page_size % self.stride != 0


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class ScratchMemory:
    """Memory for short-lived copies. It is used again and again, because writing to fresh memory each time would take
    longer than the copy."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return ``count`` rows of the width and dtype of the rows of ``like``. Their content is undefined, and rows
        that were returned before for this width and dtype are overwritten."""
        key = (like.dtype, like.shape[1])
        held = self._tensors.get(key)
        if held is None or len(held) < count:
            held = self._tensors[key] = like.new_empty(count + count // 4, like.shape[1])
        return held[:count]


class TrackMemory:
    """A track in its pool's device memory. A unit is found by its number, counted over all pages: neighbours are
    equally far apart within a page and from one page to the next. Where layers of one pool keep different amounts, each
    unit takes the room of the largest."""

    def __init__(self, track: Track, memory: torch.Tensor, page_size: int) -> None:
        """``memory``: the pool's layer, uint8 ``[pages, bytes]``, one page after the other without gaps.

        Raises:
            ConfigError: there are gaps.
        """
        if not memory.is_contiguous():
            raise ConfigError(f"pool {track.pool!r}: there are gaps between its pages")
        self._track = track
        self._page_size = page_size
        self._per_page = per_page = track.per_page(page_size)
        pitch = memory.shape[1] // per_page
        units = memory.as_strided((len(memory) * per_page, track.unit_bytes), (pitch, 1), memory.storage_offset())
        self._fields = {f.name: units[:, f.offset : f.offset + f.size].view(f.dtype) for f in track.fields}
        dtypes = {field.dtype for field in track.fields}
        self._whole = units.view(dtypes.pop()) if len(dtypes) == 1 < len(track.fields) else None
        """Units as rows of numbers, so that one copy takes all fields of a unit; None if the fields differ in dtype, or
        if there is only one."""

    def read(self, table: Pages, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Units ``first`` to ``stop``, copied: ``[units, *shape]`` by field.

        Raises:
            IndexError: the page table has no page for one of them.
        """
        numbers = self._numbers(table, first, stop)
        if (numbers < 0).any():
            raise IndexError(f"pool {self._track.pool!r}: no page for units {first} to {stop}")
        return self.take(self._index(numbers))

    def write(self, table: Pages, first: int, values: Values) -> None:
        """Write ``values``, ``[units, *shape]`` by field, from unit ``first`` on. Units without a page are left out."""
        numbers = self._numbers(table, first, first + len(next(iter(values.values()))))
        if len(kept := np.flatnonzero(numbers >= 0)) < len(numbers):
            rows, numbers = self._index(kept), numbers[kept]
            values = {name: value[rows] for name, value in values.items()}
        self.put(self._index(numbers), values)

    def put(self, numbers: torch.Tensor, values: Values) -> None:
        """Write ``values``, ``[units, *shape]`` by field, to the units of these ``numbers``."""
        for name, field in self._fields.items():
            field[numbers] = values[name].flatten(1)

    def take(self, numbers: torch.Tensor, scratch: ScratchMemory | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the units of these ``numbers``: ``[units, *shape]`` by field. ``scratch``: memory to copy
        to, if possible; the next copy to it overwrites this one."""
        count, fields, whole = len(numbers), self._track.fields, self._whole
        if whole is None:
            return {f.name: self._fields[f.name].index_select(0, numbers).view(count, *f.shape) for f in fields}
        item = fields[0].dtype.itemsize
        out = None if scratch is None else scratch.rows(count, whole)
        found = torch.index_select(whole, 0, numbers, out=out)
        return {f.name: found[:, f.offset // item : (f.offset + f.size) // item].view(count, *f.shape) for f in fields}

    def copy(self, source: int, target: int) -> None:
        """Copy everything in one slot to another, of a track with one unit a slot."""
        for field in self._fields.values():
            field[target] = field[source]

    def _numbers(self, table: Pages, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The numbers of the sequence's units ``first`` to ``stop``; those without a page are negative."""
        units = np.arange(first, stop)
        pages = table[((units + 1) * self._track.stride - 1) // self._page_size].astype(np.int64)
        return pages * self._per_page + units % self._per_page

    def _index(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(next(iter(self._fields.values())).device)
