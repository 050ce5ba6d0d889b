"""``benchmarks/fleet.py``: its fleets obey what can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asynccache.cli.traces import BLOCK_TOKENS, read_trace
from benchmarks.fleet import ROUTINGS, Row, conversations, fleet_load, main

TURNS, TALKS = 5, 40


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """``TALKS`` conversations of ``TURNS`` turns under one system prompt of two blocks; each turn adds two blocks."""
    lines = []
    for turn in range(TURNS):
        for talk in range(TALKS):
            blocks = [0, 1, *(100 + 1000 * talk + n for n in range(2 * turn + 2))]
            lines.append({"timestamp": 1000 * (turn * TALKS + talk), "input_length": BLOCK_TOKENS * len(blocks),
                          "output_length": 1, "hash_ids": blocks})  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fleets(capsys: pytest.CaptureFixture[str], trace: Path, *options: str) -> dict[tuple[bool, str], Row]:
    assert main([str(trace), "--json", "--prefill", "1000", "--bytes-per-token", "100000", *options]) == 0
    rows = [Row(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    return {(row.store, row.routing): row for row in rows}


def test_conversations_are_told_apart_by_what_follows_the_shared_head(trace: Path) -> None:
    texts, heads = conversations(read_trace(str(trace)))
    assert len(texts) == TALKS
    assert {len(text) for text in texts} == {TURNS}
    assert len(heads) == 2  # many different blocks follow the second; the first comes before it


def test_copies_share_the_heads_and_nothing_else(trace: Path) -> None:
    requests = read_trace(str(trace))
    load = fleet_load(requests, 10 * sum(one.input_length for one in requests.requests), seed=1)
    assert [prompt.at for prompt in load] == sorted(prompt.at for prompt in load)
    assert len(load) == 10 * len(requests.requests)
    by_talk: dict[int, set[int]] = {}
    for prompt in load:
        by_talk.setdefault(prompt.conversation, set()).update(prompt.path)
    assert len(by_talk) == 10 * TALKS
    shared = set.intersection(*by_talk.values())
    assert len(shared) == 2
    assert sum(len(keys - shared) for keys in by_talk.values()) == len(set().union(*by_talk.values()) - shared)


def test_a_store_makes_hits_independent_of_routing_and_routing_makes_them_local(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    rows = fleets(capsys, trace, "--replicas", "8", "--local", "100000", "--load", "0.5")
    assert set(rows) == {(store, routing) for store in (False, True) for routing in ROUTINGS}
    with_store = {round(rows[True, routing].computed, 6) for routing in ROUTINGS}
    assert len(with_store) == 1
    assert rows[False, "sticky"].local_hits > rows[False, "random"].local_hits + 0.1
    for row in rows.values():
        assert abs(row.computed + row.local_hits + row.store_hits - 1) < 1e-9
        assert row.store or row.store_hits == row.read == row.written == 0
    assert rows[False, "prefix"].p99 < rows[False, "random"].p99


def test_one_machine_with_the_memory_of_all_hits_like_one_replica(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    rows = fleets(capsys, trace, "--replicas", "4", "--local", "100000", "--together", "4")
    assert {round(row.local_hits, 9) for row in rows.values()} == {round(rows[False, "sticky"].local_hits, 9)}
    assert rows[True, "random"].store_hits == 0
