"""The pages of one of SGLang's host pools: where they lie, and how a page that lies in several places is copied.

A host pool says by ``get_page_buffer_meta`` in which parts a page lies. It is asked about the first, the second and the
last page. If each part lies at an equal distance from the same part of the next page, the places of all pages are
known. There are four kinds of pools:

    DirectPages   Each page is one part that follows the page before it. Nothing is copied: the stores read and write
                  the pool's own memory.
    PartViews     A page has several parts, such as K and V of each layer. It is copied to and from a row, so that it is
                  one record in the stores.
    WholePages    The pool does not say where its pages lie. It is asked for copies of them by ``get_data_page``.
    MarkPages     The pool has no bytes, as DeepSeek-V4's anchor. A mark is stored for each page, so that the stores
                  know which pages there are.

All have ``page_size``, the host indices in a page; ``parts``, the bytes of each part of a page; and ``how``, the order
of bytes in a stored page. That is part of the keys, because the same pool may be read in ways that give the same bytes
in another order. A page is named by the first of its host indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynccache.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

MARK = b"asynccache page\n"


class DirectPages:
    """Pages that lie one after the other in ``memory``; the slot of a page is ``index // page_size``."""

    how = "parts"

    def __init__(self, memory: Bytes, page_bytes: int, page_size: int) -> None:
        self.memory = memory
        self.page_size = page_size
        self.parts = (page_bytes,)


class PartViews:
    """Pages that have several parts; ``views[i][n]`` is part ``i`` of page ``n``."""

    how = "parts"

    def __init__(self, views: Sequence[Bytes], page_size: int) -> None:
        self.page_size = page_size
        self.parts = tuple(int(view.shape[1]) for view in views)
        ends = np.cumsum(self.parts).tolist()
        self._places = [(view, end - size, end) for view, size, end in zip(views, self.parts, ends, strict=True)]

    def load(self, index: int, row: Bytes) -> None:
        page = index // self.page_size
        for view, start, end in self._places:
            row[start:end] = view[page]

    def save(self, row: Bytes, index: int) -> None:
        page = index // self.page_size
        for view, start, end in self._places:
            view[page] = row[start:end]


class WholePages:
    """Pages of a pool that hands out copies of them and takes copies back."""

    how = "flat"

    def __init__(self, host_pool: Any) -> None:
        self._pool = host_pool
        self.page_size = page_size_of(host_pool)
        self._template = host_pool.get_dummy_flat_data_page()
        self.parts = (int(self._template.numel() * self._template.element_size()),)
        found = flat_bytes(host_pool.get_data_page(0, flat=True)).size
        if found != self.parts[0]:
            raise ValueError(f"the pool hands out pages of {found} bytes, and takes pages of {self.parts[0]} back")

    def load(self, index: int, row: Bytes) -> None:
        row[:] = flat_bytes(self._pool.get_data_page(index, flat=True))

    def save(self, row: Bytes, index: int) -> None:
        page = self._template.clone()
        flat_bytes(page)[:] = row
        self._pool.set_from_flat_data_page(index, page)


class MarkPages:
    """Pages without bytes, of which a mark is stored."""

    how = "mark"

    def __init__(self, host_pool: Any) -> None:
        self.page_size = page_size_of(host_pool)
        self.parts = (len(MARK),)

    def load(self, index: int, row: Bytes) -> None:
        row[:] = np.frombuffer(MARK, np.uint8)

    def save(self, row: Bytes, index: int) -> None:
        pass


CopiedPages = PartViews | WholePages | MarkPages
"""Pages that are copied on their way: ``load`` copies a page to a row, ``save`` a row to a page."""


def source_of(name: str, host_pool: Any) -> DirectPages | CopiedPages:
    """Return the access to the pages of ``host_pool``, direct or through copies.

    Raises:
        ConfigError: there is no way to do that.
    """
    if getattr(host_pool, "kv_buffer", None) is None and not getattr(host_pool, "size_per_token", 1):
        return MarkPages(host_pool)
    source: DirectPages | CopiedPages | None = _by_parts(host_pool)
    if source is None:
        try:
            source = WholePages(host_pool)
        except Exception as error:
            layout = getattr(host_pool, "layout", None)
            raise ConfigError(
                f"host pool {name!r} ({type(host_pool).__name__}, layout {layout!r}) neither says where its pages lie "
                f"nor gives copies of them: {error!r}. Use --hicache-mem-layout page_first"
            ) from error
    if not sum(source.parts):
        raise ConfigError(f"host pool {name!r} ({type(host_pool).__name__}) has pages without bytes")
    return source


def page_size_of(host_pool: Any) -> int:
    """Return how many host indices a page has."""
    return int(getattr(host_pool, "page_size", 1) or 1)


def flat_bytes(tensor: Any) -> Bytes:
    """The bytes of a contiguous tensor, as a view of its memory."""
    import torch

    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _by_parts(host_pool: Any) -> DirectPages | PartViews | None:
    page_size, count = page_size_of(host_pool), getattr(host_pool, "page_num", None)
    pages = int(host_pool.size) // page_size if count is None else int(count)
    try:
        metas = [_meta(host_pool, page * page_size, page_size) for page in (0, min(1, pages - 1), pages - 1)]
    except Exception:  # pools that do not support this raise NotImplementedError, ValueError, TypeError and others
        return None
    (first, sizes), (second, _), (last, _) = metas
    if not first or any(len(pointers) != len(first) or found != sizes for pointers, found in metas):
        return None
    strides = [after - before for before, after in zip(first, second, strict=True)] if pages > 1 else list(sizes)
    if any(end != start + stride * (pages - 1) for start, stride, end in zip(first, strides, last, strict=True)):
        return None
    views: list[Bytes] = []
    for pointer, size, stride in zip(first, sizes, strides, strict=True):
        view = _view(host_pool, pointer, size, stride, pages)
        if view is None:
            return None
        views.append(view)
    if len(views) == 1 and views[0].flags.c_contiguous:
        return DirectPages(views[0].reshape(-1), sizes[0], page_size)
    return PartViews(views, page_size)


def _meta(host_pool: Any, index: int, page_size: int) -> tuple[list[int], list[int]]:
    import torch

    pointers, sizes = host_pool.get_page_buffer_meta(torch.arange(index, index + page_size))
    found = [(int(pointer), int(size)) for pointer, size in zip(pointers, sizes, strict=True) if size]
    return [pointer for pointer, _ in found], [size for _, size in found]


def _view(host_pool: Any, pointer: int, size: int, stride: int, pages: int) -> Bytes | None:
    """A view of ``pages`` rows of ``size`` bytes, which begin ``stride`` bytes apart, the first at ``pointer``. None if
    they do not lie within one of the pool's tensors; so memory that is not the pool's is never read or written."""
    if stride >= size > 0:
        for whole in _storages(host_pool):
            at = pointer - whole.ctypes.data
            if at >= 0 and at + stride * (pages - 1) + size <= whole.nbytes:
                return np.lib.stride_tricks.as_strided(whole[at:], (pages, size), (stride, 1))
    return None


def _storages(host_pool: Any) -> Iterator[Bytes]:
    """The memory of each tensor that the pool has."""
    import torch

    for value in vars(host_pool).values():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.untyped_storage().nbytes():
                whole: Bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
                yield whole
