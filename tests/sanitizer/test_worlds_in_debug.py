"""The random worlds with ``debug=True``: whoever uses the cache rightly is never accused, whatever happens meanwhile:
cancelled requests, batches that fail or end late, torn copies, stores that lie, windows, states and sidecars."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.group import random_worlds
from tests.simulated.world import play

SEEDS = (*range(12), 30, 82)  # the last two have sidecars whose pages are too small to be judged


def test_a_right_program_is_never_accused_in_any_world() -> None:
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        ends += play(seed, debug=True).ends
    assert ends["served"] > 3 * len(SEEDS), ends


@pytest.mark.parametrize("seed", [
    337,  # pages are looked at, and in the next message filled anew: a rank looks before it hears that
    152,  # a batch is heard to have failed between a grant and its return
    1, 4, 19,
])  # fmt: skip
def test_a_right_group_is_never_accused_in_any_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCACHE_DEBUG", "1")
    assert random_worlds.play(seed).met["served"]
