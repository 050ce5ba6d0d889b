"""Frames keep rows from one step to the next: what is written must be what is read, whatever changed in between."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from asynccache.ranks.frames import HEADER, Frames, Header, Health, Kind
from asynccache.ranks.progress import NEUTRAL, Progress

POOLS, WINDOW = 3, 8


def plain(header: Header, rows: dict[int, Progress]) -> list[int]:
    """The format, word by word."""
    step, digest, size = header
    words = [int(Kind.VECTOR), int(Health.OK), step, -step, digest, -digest, size, -size]
    for op, progress in rows.items():
        words += [op, progress.status, progress.go_on, *progress.counts]
    return words + [0] * (HEADER + WINDOW * (3 + POOLS) - len(words))


def drawn(rng: Random) -> Progress:
    return Progress(rng.randrange(3), rng.randrange(2), tuple(rng.choice((0, 1, 7, NEUTRAL)) for _ in range(POOLS)))


@pytest.mark.parametrize("seed", range(20))
def test_a_frame_is_what_its_rows_are_now(seed: int) -> None:
    rng = Random(seed)
    sender, receiver = Frames(POOLS, WINDOW), Frames(POOLS, WINDOW)
    rows: dict[int, Progress] = {}
    for step in range(60):
        for op in rng.sample(list(rows), min(len(rows), rng.randrange(3))):
            rows[op] = drawn(rng)
        for op in rng.sample(list(rows), min(len(rows), rng.randrange(2))):
            del rows[op]
        while len(rows) < rng.randrange(WINDOW + 1):
            rows[max(rows, default=step) + 1] = drawn(rng)
        header = Header(step, rng.getrandbits(62), len(rows))
        words = sender.write(Kind.VECTOR, Health.OK, header, rows)
        assert words.tolist() == plain(header, rows)
        assert receiver.rows(words) == rows
        if step % 7 == 0:
            assert receiver.rows(sender.bad(Health.FAILED, header)) == {}


def test_what_is_written_belongs_to_whoever_asked_for_it() -> None:
    frames = Frames(POOLS, WINDOW)
    rows = {1: Progress(0, 1, (1, 2, 3))}
    first = frames.write(Kind.VECTOR, Health.OK, Header(1, 1, 1), rows)
    np.minimum(first, 0, out=first)
    assert frames.rows(frames.write(Kind.VECTOR, Health.OK, Header(2, 1, 1), rows)) == rows
