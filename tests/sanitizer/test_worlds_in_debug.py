"""The random worlds with ``debug=True``: whoever uses the cache rightly is never accused, whatever happens meanwhile:
cancelled requests, batches that fail or end late, torn copies, stores that lie, windows, states and sidecars."""

from __future__ import annotations

from collections import Counter

from tests.simulated.world import play

SEEDS = (*range(12), 30, 82)  # the last two have sidecars whose pages are too small to be judged


def test_a_right_program_is_never_accused_in_any_world() -> None:
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        ends += play(seed, debug=True).ends
    assert ends["served"] > 3 * len(SEEDS), ends
