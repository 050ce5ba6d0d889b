"""The stand-in for KV: bytes depend on the whole prefix, the namespace, the pool and the layer, and any flip shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asynccache.cli.engine import Pattern, page_values
from asynccache.cli.workloads import stream_tokens

TOKENS = stream_tokens(1, 0, 1000)


def test_one_value_a_whole_page() -> None:
    assert len(page_values(TOKENS, 16)) == 62
    assert len(page_values(TOKENS[:15], 16)) == 0


def test_a_value_depends_on_all_tokens_before_and_none_behind() -> None:
    values = page_values(TOKENS, 16)
    assert np.array_equal(page_values(TOKENS[:320], 16), values[:20])
    changed = TOKENS.copy()
    changed[17] += 1
    assert np.array_equal(page_values(changed, 16) == values, np.arange(62) < 1)
    swapped = TOKENS.copy()
    swapped[[0, 500]] = swapped[[500, 0]]
    assert not (page_values(swapped, 16) == values)[:31].any()


def test_namespaces_differ() -> None:
    plain, a, b = (page_values(TOKENS, 16, key) for key in (None, "a", "b"))
    assert not (plain == a).any()
    assert not (a == b).any()


def test_values_of_many_pages_are_distinct() -> None:
    values = np.concatenate([page_values(stream_tokens(i, 0, 4096), 16) for i in range(64)])
    assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize("size", [8, 256, 100, 3])
def test_what_was_written_verifies_and_a_flip_shows(size: int) -> None:
    layer = torch.zeros(32, size, dtype=torch.uint8)
    pattern = Pattern("full", 0, layer)
    pages = torch.tensor([5, 1, 30, 7])
    values = torch.from_numpy(page_values(TOKENS[:64], 16).view(np.int64))
    pattern.write(pages, values)
    assert pattern.mismatches(pages, values) == ()
    assert pattern.mismatches(pages.roll(1), values) == [0, 1, 2, 3]
    layer[30, size - 1] ^= 1
    assert pattern.mismatches(pages, values) == [2]


def test_pools_and_layers_differ() -> None:
    layer = torch.zeros(4, 64, dtype=torch.uint8)
    pages, values = torch.tensor([2]), torch.tensor([123456789])
    Pattern("full", 0, layer).write(pages, values)
    for pool, index in (("full", 1), ("swa", 0)):
        assert Pattern(pool, index, layer).mismatches(pages, values) == [0]
    assert Pattern("full", 0, layer).mismatches(pages, values) == ()
