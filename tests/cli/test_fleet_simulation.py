"""``benchmarks/fleet.py``: its fleets obey what can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

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


def test_a_sample_of_the_replicas_stands_for_the_fleet(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    arguments = ("--replicas", "16", "--local", "100000", "--load", "0.9")
    whole, some = fleets(capsys, trace, *arguments), fleets(capsys, trace, *arguments, "--sample", "4")
    for key, row in whole.items():
        assert some[key].replicas == row.replicas == 16
        assert some[key].requests < row.requests / 2
        assert some[key].computed == pytest.approx(row.computed, abs=0.04), key
        assert some[key].written == pytest.approx(row.written, rel=0.15), key
        assert some[key].read == pytest.approx(row.read, rel=0.25, abs=0.5), key


def test_larger_fleets_have_the_rows_of_the_sample_where_conversations_stay_together(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    found: dict[tuple[str, bool], list[Row]] = {}
    assert main([str(trace), "--replicas", "4,8,16", "--sample", "4", "--local", "50", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        row = Row(**json.loads(line))
        found.setdefault((row.routing, row.store), []).append(row)
    for (routing, _), rows in found.items():
        assert [row.replicas for row in rows] == [4, 8, 16]
        alike = {row._replace(replicas=0) for row in rows}
        assert len(alike) == (3 if routing == "random" else 1)


def test_plots_are_whole_and_read_in_light_and_dark(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    arguments = [str(trace), "--replicas", "1,4", "--local", "10,100"]
    assert main([*arguments, "--json"]) == 0
    (tmp_path / "rows.jsonl").write_text(capsys.readouterr().out)
    assert main([*arguments, "--rows", str(tmp_path / "rows.jsonl"), "--svg", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "the shared store" in told
    assert len(told.splitlines()) == 1 + 24 + 2 + 12
    names = {f"fleet-{what}-{size}" for what in ("computed", "ttft") for size in (10, 100)} | {"fleet-store"}
    for name in names:
        drawn = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
        assert len(lines) == (2 if name == "fleet-store" else 5)
        assert "prefers-color-scheme:dark" in (tmp_path / f"{name}.svg").read_text()


def test_a_routing_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(trace), "--routing", "random,luck"])
    assert "there is no luck" in capsys.readouterr().err
