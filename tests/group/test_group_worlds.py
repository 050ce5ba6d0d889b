"""Whole caches with one to eight workers in random worlds (``random_worlds``); at the end of each range of seeds, that
together they met everything there is.

``ASYNCCACHE_GROUP_SEED=<seed>`` plays one of them again. ``make soak`` plays worlds by new seeds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.group.random_worlds import FATES, play

pytestmark = pytest.mark.slow(15)

ALL, CHUNK = 520, 130

KINDS = (
    "FULL", "SWA", "MAMBA", "sidecars", "replicated", "logical", "tp", "cp", "pp", "shared store", "own stores",
    "no worker at the head", "calm", "rough", *(f"{ranks} ranks" for ranks in range(1, 9)),
)  # fmt: skip
EVENTS = (
    "served", "cancelled", "copy failed", "store failed", "batch failed",
    "a failing batch is published", "backup dropped", "lost pages", "device hit",
    "storage hit", "found again", "attached", "flush", "prefetch complete", "prefetch partial", "prefetch miss", "full",
    "p2c led",
)  # fmt: skip


@pytest.mark.parametrize("first", range(0, ALL, CHUNK))
def test_worlds_of_groups(first: int) -> None:
    met: Counter[str] = Counter()
    verified = 0
    for seed in chosen(first):
        report = play(seed)
        met.update(name for name, count in report.met.items() if count)
        verified += report.verified
    if "ASYNCCACHE_GROUP_SEED" in os.environ:
        return
    never = [name for name in (*KINDS, *EVENTS) if not met[name]]
    assert not never, f"no world met {never}: {met}"
    assert met["served"] > 0.9 * CHUNK
    assert sum(met[fate] for fate in FATES) > 0.1 * CHUNK
    assert verified > 25 * CHUNK


def chosen(first: int) -> range:
    """The seeds of a range, or the one that is to be played again."""
    seed = os.environ.get("ASYNCCACHE_GROUP_SEED")
    return range(first, first + CHUNK) if seed is None else range(int(seed), int(seed) + 1)


def test_one_seed_is_one_world() -> None:
    assert repr(play(7)) == repr(play(7))
