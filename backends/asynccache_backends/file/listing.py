"""The pages in the index, as tools list and collect them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asynccache.storage import HEADER_BYTES, KEY_BYTES, Stored
from asynccache_backends.file.blocks import PageGroup


def stored_pages(group: PageGroup) -> list[Stored]:
    """Return the live pages of a group."""
    size = HEADER_BYTES + group.length
    return [Stored(group.entry(page)[:KEY_BYTES], size, float(group.written)) for page in group.live()]


def written_before(groups: Sequence[PageGroup], until: float) -> Iterator[tuple[PageGroup, int]]:
    """Yield every live page that is known to have been written before the unix time ``until``: its group and its index
    there."""
    for group in groups:
        if 0 < group.written < until:
            for page in group.live():
                yield group, page
