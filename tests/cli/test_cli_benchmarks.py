"""Benchmarks do what they say."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asynccache.cli.hit_curves import BlockPath, curve
from asynccache.cli.traces import read_trace
from asynccache.core.eviction import EvictionPolicy, Order
from asynccache.core.policies import POLICIES
from asynccache.core.tree import Node
from benchmarks import ranks, runtime, tree, tree_calls
from benchmarks.eviction_policies import Workload, hits, main
from benchmarks.fleet import ROUTINGS, Row, conversations, fleet_load
from benchmarks.fleet import main as fleet_main
from benchmarks.tables import bench, cell, text
from tests.cli.trace_kit import blocks_trace

# ``benchmarks/ranks.py`` over real processes: its counts are exact, and every time is reported.


@pytest.mark.slow(6)
def test_what_an_operation_takes_beside_an_echo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ranks.json"
    assert bench(ranks, ["--workers", "2", "--rounds", "50", "--json", str(path)], prog="ranks") == 0
    figures = json.loads(path.read_text())["workers"]["2"]
    for name in ("one", "plan"):
        one = figures[name]
        assert 0 < one["echo_p50_us"] < one["p99_us"]
        assert one["ratio"] == pytest.approx(one["p50_us"] / one["echo_p50_us"], rel=0.01)
    assert figures["one"]["bytes"] * ranks.PLAN / 2 < figures["plan"]["bytes"] < figures["one"]["bytes"] * ranks.PLAN
    assert 0 < figures["cpu_us"] < 10 * ranks.GOAL_CPU_US
    said = capsys.readouterr().out
    assert "head's CPU an operation and worker" in said
    assert "2 workers, plan" in said


# ``benchmarks/tree.py`` and ``benchmarks/runtime.py`` with little of everything: each measurement has its figures.


FEW = {"PROMPTS": 4, "CONTINUATIONS": 4, "CONVERSATIONS": 2, "TURNS": 3, "MEMORY_NODES": 200, "EVICTED": 256}


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("gc.collect", lambda: 0)       # of all that these tests hold: half a second each time
    for name, few in FEW.items():
        monkeypatch.setattr(tree_calls, name, few)
        if hasattr(tree, name):
            monkeypatch.setattr(tree, name, few)
    monkeypatch.setattr(tree, "SAMPLE", 40)
    path = tmp_path / "tree.json"

    def measure(*arguments: str) -> Any:
        assert tree.main([*arguments, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return measure


def test_every_call_is_measured_beside_its_goal(figures: Any) -> None:
    found = figures("--shapes", "0,1")
    assert list(found["shapes"]) == ["full p16", "full,swa,mamba p64"]
    assert all(list(rows) == list(tree_calls.OPERATIONS) for rows in found["shapes"].values())
    assert found["memory"]["all"]["bytes_per_node"] > found["memory"]["full"]["bytes_per_node"] > 0
    assert len(list(tree.charts(found))) == 3


def test_an_await_is_compared_with_the_call_of_the_core(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    assert bench(runtime, ["--calls", "100", "--json", str(path)], prog="python -m benchmarks.runtime") == 0
    found = json.loads(path.read_text())
    assert found["overhead"].keys() == {"uvloop", "asyncio"}
    assert all(calls.keys() == runtime.GOALS_US.keys() for calls in found["overhead"].values())
    assert "tree lock, uvloop" in "".join(map(text, runtime.charts(found)))


def test_growth_has_a_row_for_each_size(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured = figures("growth", "--nodes", "100,200")
    found, slowest = measured["growth"], measured["slowest"]
    assert [row["nodes"] for row in found["full"]] == [row["nodes"] for row in found["all"]] == [100, 200]
    assert found["all"][0]["worst_call"]["evict_slice"]["wall_ms"] > 0
    assert all({"lease", "release"} <= calls.keys() for calls in slowest.values())
    assert slowest["unsaved, 200 leaves of 1 pages"]["drain"]["steps"] > 0
    table = capsys.readouterr().out
    assert "200 nodes" in table
    assert "The slowest call of each kind, refused, 4 leaves of 1,000 pages" in table


def test_nodes_that_left_are_weighed(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures("ghosts", "--eviction", "p2c")["ghosts"]
    table = capsys.readouterr().out
    assert re.search(rf"^bytes for each of them +{cell(found['bytes_per_ghost'])}$", table, re.MULTILINE)
    assert found["ghosts"] > found["nodes"] > 0
    assert found["bytes_per_ghost"] > 0
    with pytest.raises(SystemExit, match="lru remembers no node"):
        tree.main(["ghosts"])


def test_metrics_are_counted_on_one_of_two_trees(figures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures("metrics", "--rounds", "1")["metrics"]
    assert found["on_us"].keys() == found["off_us"].keys() == {"insert", "match", "pin", "evict"}
    table = capsys.readouterr().out
    assert all(re.search(rf"^{name} +{cell(found['off_us'][name])} ", table, re.MULTILINE) for name in found["off_us"])
    assert re.search(rf"^all calls together +{re.escape(cell(100 * found['all_adds']))} +2", table, re.MULTILINE)


# ``benchmarks/eviction_policies.py`` plays what it says, and says so when ``p2c`` falls below ``lru``.


def drawn(count: int) -> Workload:
    """Requests of up to ten blocks, many of which begin like earlier ones."""
    draws, known = random.Random(3), [[0]]
    paths: list[BlockPath] = []
    fresh = iter(range(1, 1 << 20))
    for _ in range(count):
        start = draws.choice(known[-30:])
        path = start[: draws.randint(1, len(start))] + [next(fresh) for _ in range(draws.randint(0, 3))]
        known.append(path[:10])
        paths.append(known[-1])
    return Workload(paths, [0.5 * number for number in range(count)])


def played(folder: Path, workload: Workload) -> Path:
    return blocks_trace(folder / "trace.jsonl", ((at * 1000, path) for path, at in zip(*workload, strict=True)))


@pytest.mark.parametrize("eviction", ["lru", "p2c"])
def test_with_room_for_all_both_tiers_find_all_that_was_there_before(eviction: str) -> None:
    workload = drawn(300)
    found = curve(workload.paths)
    assert hits(workload, 2 * found.blocks, True, eviction) == found.hits[-1]


def test_device_and_host_find_what_one_lru_of_both_sizes_does_but_for_few_blocks() -> None:
    """A copy stays on the host for a while after its blocks were loaded, so both together hold a little less."""
    workload = drawn(1500)
    for size in (100, 200, 400):
        alone = curve(workload.paths).found(size)
        assert alone * 0.95 <= hits(workload, size, True, "lru") <= alone


class Mru(EvictionPolicy):
    """Most recently used first."""

    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].newest() if order.rest[0].chunks else None


@pytest.mark.slow(2)
@pytest.mark.parametrize("bad", [False, True])
def test_a_policy_below_lru_is_told_by_the_exit_status(
    bad: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "p2c", lambda config: Mru() if bad else POLICIES["lru"](config))
    trace = played(tmp_path, drawn(400))
    assert main([str(trace), "--sizes", "100", "--json"]) == int(bad)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["workload"], row["host"]) for row in rows} >= {("trace", False), ("trace", True), ("no reuse", False)}
    assert all(row["difference"] == row["p2c"] - row["lru"] for row in rows)
    assert all(row["lru"] == row["p2c"] == 0 for row in rows if row["workload"] == "no reuse")
    assert bad or all(row["difference"] == 0 for row in rows)


def eight_conversations(count: int) -> Workload:
    """Conversations of four turns with a beginning that all have, eight of them open at a time."""
    draws, fresh, paths = random.Random(5), iter(range(2, 1 << 20)), list[BlockPath]()
    opened: list[list[int]] = []
    for _ in range(count):
        while len(opened) < 8:
            opened.append([0, 1])
        path = draws.choice(opened)
        path += [next(fresh), next(fresh)]
        paths.append(list(path))
        if len(path) == 10:
            opened.remove(path)
    return Workload(paths, [0.5 * number for number in range(count)])


@pytest.mark.slow
def test_telling_ends_changes_nothing_with_room_for_all_and_finds_more_with_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = eight_conversations(600)
    trace, found = played(tmp_path, workload), curve(workload.paths)
    assert main([str(trace), "--ends", "--sizes", f"50,{found.blocks}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [name for _, name, *_ in rows] == ["lru", "p2c", "host"] * 2
    assert all(row[2:] == [f"{found.hits[-1] / found.lookups:.4f}"] * 3 for row in rows[3:])
    for _, _, none, half, everything in rows[:3]:
        assert float(none) < float(half) < float(everything)


# ``benchmarks/fleet.py``: its fleets obey what can be worked out by hand.


TURNS, TALKS = 5, 40


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """``TALKS`` conversations of ``TURNS`` turns under one system prompt of two blocks; each turn adds two blocks."""
    return blocks_trace(tmp_path / "trace.jsonl", (
        (1000 * (turn * TALKS + talk), [0, 1, *(100 + 1000 * talk + n for n in range(2 * turn + 2))])
        for turn in range(TURNS) for talk in range(TALKS)))  # fmt: skip


Fleets = Callable[..., dict[tuple[bool, str], Row]]


@pytest.fixture
def fleets(capsys: pytest.CaptureFixture[str], trace: Path) -> Fleets:
    """Rows by whether there is a store, and by routing."""

    def played(*options: str) -> dict[tuple[bool, str], Row]:
        assert fleet_main([str(trace), "--json", "--prefill", "1000", "--bytes-per-token", "100000", *options]) == 0
        rows = [Row(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
        return {(row.store, row.routing): row for row in rows}

    return played


def test_conversations_are_told_apart_by_what_follows_the_shared_head_and_copies_share_nothing_else(
    trace: Path,
) -> None:
    requests = read_trace(str(trace))
    texts, heads = conversations(requests)
    assert [len(text) for text in texts] == [TURNS] * TALKS
    assert len(heads) == 2  # many different blocks follow the second; the first comes before it
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


def test_a_store_makes_hits_independent_of_routing_and_routing_makes_them_local(fleets: Fleets) -> None:
    rows = fleets("--replicas", "8", "--local", "100000", "--load", "0.5")
    assert set(rows) == {(store, routing) for store in (False, True) for routing in ROUTINGS}
    with_store = {round(rows[True, routing].computed, 6) for routing in ROUTINGS}
    assert len(with_store) == 1
    assert rows[False, "sticky"].local_hits > rows[False, "random"].local_hits + 0.1
    for row in rows.values():
        assert abs(row.computed + row.local_hits + row.store_hits - 1) < 1e-9
        assert row.store or row.store_hits == row.read == row.written == 0
    assert rows[False, "prefix"].p99 < rows[False, "random"].p99


def test_one_machine_with_the_memory_of_all_hits_like_one_replica(fleets: Fleets) -> None:
    rows = fleets("--replicas", "4", "--local", "100000", "--together", "4")
    assert {round(row.local_hits, 9) for row in rows.values()} == {round(rows[False, "sticky"].local_hits, 9)}
    assert rows[True, "random"].store_hits == 0


@pytest.mark.slow
def test_a_sample_of_the_replicas_stands_for_the_fleet(fleets: Fleets) -> None:
    arguments = ("--replicas", "16", "--local", "100000", "--load", "0.9")
    whole, some = fleets(*arguments), fleets(*arguments, "--sample", "4")
    for key, row in whole.items():
        assert some[key].replicas == row.replicas == 16
        assert some[key].requests < row.requests / 2
        assert some[key].computed == pytest.approx(row.computed, abs=0.04), key
        assert some[key].written == pytest.approx(row.written, rel=0.15), key
        assert some[key].read == pytest.approx(row.read, rel=0.25, abs=0.5), key


@pytest.mark.slow
def test_plots_are_whole_and_read_in_light_and_dark(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    arguments = [str(trace), "--replicas", "1,4", "--local", "10,100"]
    assert fleet_main([*arguments, "--json"]) == 0
    (tmp_path / "rows.jsonl").write_text(capsys.readouterr().out)
    assert fleet_main([*arguments, "--rows", str(tmp_path / "rows.jsonl"), "--svg", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "the shared store" in told
    assert len(told.splitlines()) == 1 + 24 + 2 + 12
    names = {f"fleet-{what}-{size}" for what in ("computed", "ttft") for size in (10, 100)} | {"fleet-store"}
    for name in names:
        drawn = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
        assert len(lines) == (2 if name == "fleet-store" else 5)
        assert "prefers-color-scheme:dark" in (tmp_path / f"{name}.svg").read_text()
