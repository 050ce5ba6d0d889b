"""Traces that tests make, in the Mooncake format, and words of commands."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.traces import BLOCK_TOKENS

ALL = ("--components", "full,swa,mamba", "--end-hints", "0.5")
"""All that a ``stress`` can have on it."""
SMALL = " ".join(ALL) + (" --rate 0 --concurrency 8 --bytes-per-token 64 --mamba-bytes 1024 --window 256"
                         " --device-tokens 12288 --host-tokens 24576 ")  # fmt: skip
"""A ``stress`` that evicts from both."""
BY_BLOCK = ("--page-size", "512", "--bytes-per-token", "16", "--layers", "1", "--storage", "none",
            "--no-insert-outputs", "--prefetch-policy", "wait_complete")
"""A ``replay`` whose pages are the blocks of the trace, and prompts all that is published."""
REAL = os.environ.get("ASYNCCACHE_TRACE", "")
needs_trace = pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")
Ran = Callable[..., dict[str, Any]]
"""What the fixture ``ran`` is."""


def write_trace(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def blocks_trace(path: Path, requests: Iterable[tuple[float, Sequence[int]]]) -> Path:
    """Write prompts of whole blocks: each at so many milliseconds, with one token of output."""
    return write_trace(path, (
        {"timestamp": at, "input_length": BLOCK_TOKENS * len(blocks), "output_length": 1, "hash_ids": list(blocks)}
        for at, blocks in requests))  # fmt: skip


def made_trace(
    path: Path, conversations: int = 20, *, requests: int = 0, growth: tuple[int, int] = (1, 5), seed: int = 5
) -> Path:
    """Write a trace to ``path`` and return it: conversations that share a first block, interleaved, four requests of
    each unless ``requests`` says how many there are in all. With each request a conversation grows by as many blocks as
    ``growth`` allows. Four requests begin at a time, three seconds after those before."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 20))
    known: list[list[int]] = [[0] for _ in range(conversations)]
    rows = []
    for at in range(requests or conversations * 4):
        who = rng.randrange(conversations)
        known[who] = known[who] + [next(fresh) for _ in range(rng.randint(*growth))]
        rows.append({"timestamp": at // 4 * 3000, "output_length": rng.randint(1, 90),
                     "input_length": len(known[who]) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS - 1),
                     "hash_ids": [*known[who], next(fresh)]})  # fmt: skip
    return write_trace(path, rows)
