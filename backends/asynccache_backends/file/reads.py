"""Which reads answer a get: pages that lie side by side become one run, and runs are dealt out in batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.storage import Record
from asynccache_backends.file.aio import MAX_BUFFERS, Moved, Run
from asynccache_backends.file.blocks import Group

RUN_BYTES = 4 << 20
LEAST_BATCH = 1 << 20
BATCHES = 4


class Place(NamedTuple):
    """Where the page of the get's ``which``-th key lies. Ordered by position on the disk, then by ``which``: no tie."""

    segment: int
    offset: int
    which: int
    page: int
    group: Group


class ReadBatch(NamedTuple):
    """Runs for one I/O call, all of one segment and one page length, and the places that each run covers."""

    segment: int
    length: int
    runs: list[Run]
    places: list[list[Place]]


def plan_reads(places: Sequence[Place], records: Sequence[Record]) -> list[ReadBatch]:
    """Batches of neighbouring runs, large enough to be worth a call and about as many as run at a time."""
    ordered = sorted(places)
    limit = max(LEAST_BATCH, min(RUN_BYTES, sum(place.group.length for place in ordered) // BATCHES))
    batches: list[ReadBatch] = []
    room = 0
    for run in _runs(ordered, limit):
        first = run[0]
        size = first.group.length * len(run)
        fits = batches and (batches[-1].segment, batches[-1].length) == (first.segment, first.group.length)
        if not fits or room < size:
            batches.append(ReadBatch(first.segment, first.group.length, [], []))
            room = limit
        room -= size
        batches[-1].runs.append(Run(first.offset, [records[place.which].payload for place in run]))
        batches[-1].places.append(run)
    return batches


def whole_pages(moved: Moved, length: int) -> int:
    """How many pages of a run are there to the last byte."""
    return 0 if moved.error is not None else moved.bytes // length


def _runs(ordered: Sequence[Place], limit: int) -> list[list[Place]]:
    """Split ordered places where they do not touch, change their length, or a run is long enough."""
    runs: list[list[Place]] = []
    end, most = (-1, -1, -1), 0
    for place in ordered:
        length = place.group.length
        if (place.segment, length, place.offset) != end or len(runs[-1]) >= most:
            runs.append([])
            most = min(MAX_BUFFERS, max(1, limit // length))
        runs[-1].append(place)
        end = (place.segment, length, place.offset + length)
    return runs
