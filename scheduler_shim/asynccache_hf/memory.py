"""The data that a pool's page holds for one layer of the model, and how it is read and written there.

Law: a *unit* is what the model keeps for a run of ``stride`` tokens: one token's keys and values (1), a compressed
entry (its rate), the state at a page's end (the page). A unit is in the page of its last token. So a whole page has
every unit that was complete at the page's end, and it never changes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
    """The data that one layer of the model keeps in one pool. ``source``: the component whose page table finds its
    pages."""

    pool: str
    source: str
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
    """A track in its pool's device memory."""

    def __init__(self, track: Track, memory: torch.Tensor, page_size: int) -> None:
        """``memory``: the pool's layer, uint8 ``[pages, bytes]``."""
        self._track = track
        self._page_size = page_size
        self._per_page = track.per_page(page_size)
        self._memory = memory
        self._views = self._fields(memory)

    @cached_property
    def _flat(self) -> dict[str, torch.Tensor]:
        """Views of all units, by field: ``[pages * units, numbers]``.

        Raises:
            ConfigError: the track is not flat (see ``is_flat``).
        """
        if not self.is_flat:
            raise ConfigError(f"pool {self._track.pool!r}: its pages have room for more than this layer's units")
        return {name: view.as_strided((view.shape[0] * view.shape[1], view.shape[2]), (view.stride(1), 1),
                                      view.storage_offset()) for name, view in self._views.items()}  # fmt: skip

    @property
    def is_flat(self) -> bool:
        """True if neighbouring units are equally far apart within a page and from one page to the next. Then a unit is
        found by its number, counted over all pages."""
        return self._memory.stride(0) == self._per_page * self._track.unit_bytes

    def __repr__(self) -> str:
        return f"<TrackMemory of {self._track.pool!r}>"

    def _fields(self, pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of whole pages: ``[pages, units, numbers]`` by field."""
        size, track = self._track.unit_bytes, self._track
        used = pages[:, : track.page_bytes(self._page_size)]
        units = used.as_strided((len(used), self._per_page, size), (used.stride(0), size, 1))
        return {field.name: units[..., field.offset : field.offset + field.size].view(field.dtype)
                for field in track.fields}  # fmt: skip

    def read(self, table: Pages, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Units ``first`` to ``stop``, copied: ``[units, *shape]`` by field.

        Raises:
            IndexError: the page table has no page for one of them.
        """
        slots = table[self._pages(first, stop)]
        if (slots < 0).any():
            raise IndexError(f"pool {self._track.pool!r}: no page for units {first} to {stop}")
        found = self._fields(self._memory.index_select(0, self._index(slots)))
        skip = first % self._per_page
        units = {name: view.flatten(0, 1)[skip : skip + stop - first] for name, view in found.items()}
        return {field.name: units[field.name].reshape(stop - first, *field.shape) for field in self._track.fields}

    def write(self, table: Pages, first: int, values: Values) -> None:
        """Write ``values``, ``[units, *shape]`` by field, from unit ``first`` on. Units without a page are left out."""
        units = np.arange(first, first + len(next(iter(values.values()))))
        slots = table[self._page_of(units)]
        kept = slots >= 0
        where = (self._index(slots[kept]), self._index(units[kept] % self._per_page))
        rows = self._index(np.flatnonzero(kept))
        for field in self._track.fields:
            self._views[field.name][where] = values[field.name].flatten(1)[rows]

    def put(self, places: torch.Tensor, values: Values) -> None:
        """Write ``values``, ``[units, *shape]`` by field, to the units whose numbers, counted over all pages, are
        ``places``."""
        for field in self._track.fields:
            self._flat[field.name][places] = values[field.name].flatten(1)

    def take(self, places: torch.Tensor, scratch: ScratchMemory | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the units whose numbers, counted over all pages, are ``places``: ``[units, *shape]`` by
        field. ``scratch``: memory to copy to, if possible; the next copy to it overwrites this one."""
        count, fields = len(places), self._track.fields
        if self._whole is None:
            return {f.name: self._flat[f.name].index_select(0, places).view(count, *f.shape) for f in fields}
        item, whole = fields[0].dtype.itemsize, self._whole
        if scratch is None:
            found = whole.index_select(0, places)
        else:
            found = torch.index_select(whole, 0, places, out=scratch.rows(count, whole))
        return {f.name: found[:, f.offset // item : (f.offset + f.size) // item].view(count, *f.shape) for f in fields}

    @cached_property
    def _whole(self) -> torch.Tensor | None:
        """All units as rows of numbers, so that one copy takes all fields of a unit; None if the fields differ in
        dtype, if there is only one field, or if the track is not flat."""
        dtypes = {field.dtype for field in self._track.fields}
        if len(dtypes) > 1 or len(self._track.fields) == 1 or not self.is_flat:
            return None
        pages = self._memory[:, : self._per_page * self._track.unit_bytes].view(dtypes.pop())
        width = pages.shape[1] // self._per_page
        return pages.as_strided((len(pages) * self._per_page, width), (width, 1), pages.storage_offset())

    def copy(self, source: int, target: int) -> None:
        """Copy everything in one slot to another."""
        self._memory[target] = self._memory[source]

    def _pages(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The pages of these units, each once, counted from the start of the sequence."""
        step = 1 if self._track.stride > self._page_size else self._per_page
        return self._page_of(np.arange(first // step * step, stop, step))

    def _page_of(self, units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return ((units + 1) * self._track.stride - 1) // self._page_size

    def _index(self, numbers: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._memory.device)
