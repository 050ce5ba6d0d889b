"""What is in the index as tools see it: pages with their size and age, and those that are too old. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asynccache.storage import HEADER_BYTES, KEY_BYTES, Stored
from asynccache_backends.file.blocks import Group


def stored_pages(group: Group) -> list[Stored]:
    """The pages of a group that were not forgotten."""
    size = HEADER_BYTES + group.length
    return [Stored(group.entry(page)[:KEY_BYTES], size, float(group.written)) for page in group.live()]


def written_before(groups: Sequence[Group], until: float) -> Iterator[tuple[Group, int]]:
    """Every live page that is known to have been written before ``until``: its group and its place in it."""
    for group in groups:
        if 0 < group.written < until:
            for page in group.live():
                yield group, page
