"""Ranks that are processes, with whole caches over gloo: the same trees, the right bytes, and a clean end for who is
left when a rank is killed or stopped. The stores are folders, one a rank."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import pytest

from tests.ranks.cache_runs import (
    PP2,
    PP4,
    TP2,
    TP2_PP2,
    Shape,
    hits_on_every_rank,
    run,
    size,
    sound,
    strike,
    told,
)

SHAPES = (TP2, PP2, TP2_PP2, PP4)
STORAGES = ("none", "file")


def store(storage: str, folder: Path) -> str:
    return storage if storage == "none" else f"file:{folder}/kv?capacity=64MiB"


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_told_to_the_others_and_a_new_group_finds_what_is_stored(tmp_path: Path) -> None:
    url, out = store("file", tmp_path), tmp_path / "report.json"
    warm = run(TP2, url, out, "--requests", "60", "--seed", "3")
    struck = strike(TP2, url, out, 1, signal.SIGKILL, 0.5, "--seed", "4")
    told(struck, 1)
    again = run(TP2, url, out, "--requests", "60", "--seed", "3")
    sound(again, TP2)
    hits_on_every_rank(again, "storage")
    assert again["tokens"]["hit"]["storage"] > warm["tokens"]["hit"]["storage"]


@pytest.mark.ranks
def test_a_rank_that_hangs_is_told_to_the_others(tmp_path: Path) -> None:
    struck = strike(PP2, store("file", tmp_path), tmp_path / "report.json", 0, signal.SIGSTOP, 0.7)
    told(struck, 0)
    assert "said nothing for" in struck.said


# the whole matrix: make test-ranks


@pytest.mark.ranks
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_thousand_steps_of_stress(shape: Shape, storage: str, tmp_path: Path) -> None:
    delays = ("--steps", "1000", "--rank-delay", "5", "--seed", str(size(shape)))
    report = run(shape, store(storage, tmp_path), tmp_path / "report.json", *delays)
    sound(report, shape, steps=1000)
    hits_on_every_rank(report, "device", "host", *(("storage",) if storage == "file" else ()))


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("shape", "victim"), [(shape, victim) for shape in SHAPES for victim in range(size(shape))])
def test_each_rank_in_turn_is_lost(shape: Shape, victim: int, how: signal.Signals, tmp_path: Path) -> None:
    after = Random(f"{shape} {victim} {how}").uniform(0.0, 1.5)
    storage = STORAGES[victim % 2]
    told(strike(shape, store(storage, tmp_path), tmp_path / "report.json", victim, how, after), victim)
