"""Traces: the lines that are read in every published format, those that are refused, the hits that a trace allows,
counted without a cache, and a recorded trace with little room."""

from __future__ import annotations

import gzip
import json
import math
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynccache.cli import traces
from asynccache.cli.hit_curves import curve
from asynccache.cli.traces import (
    BLOCK_TOKENS,
    Trace,
    TraceError,
    TraceRequest,
    TraceSurvey,
    arrivals,
    paths_of,
    read_trace,
    survey,
)
from asynccache.cli.workloads import TraceSource, block_tokens, stream_tokens
from asynccache.errors import ConfigError
from tests.cli.trace_kit import BY_BLOCK, REAL, Ran, made_trace, needs_trace, write_trace
from tests.processes import Command

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}


def lines(path: Path, *records: Any) -> str:
    return str(write_trace(path, records))


def implied(path: str) -> tuple[int, int]:
    """Shared and all full blocks, worked out with nothing but dicts."""
    tree: dict[int, Any] = {}
    shared = total = 0
    for row in map(json.loads, Path(path).read_text().splitlines()):
        node = tree
        for block in row["hash_ids"][: row["input_length"] // 512]:
            total += 1
            shared += block in node
            node = node.setdefault(block, {})
    return shared, total


@pytest.mark.parametrize("source", ["made", pytest.param(REAL, marks=needs_trace)])
def test_survey_agrees_with_dicts_of_blocks(source: str, tmp_path: Path) -> None:
    path = str(made_trace(tmp_path / "trace.jsonl")) if source == "made" else source
    shared, total = implied(path)
    assert sum(survey(read_trace(path)).shared_blocks) == shared
    assert 0 < shared < total
    assert source == "made" or (shared, total) == (105_592, 276_491), "as published"


def test_survey_finds_the_last_request_of_a_conversation() -> None:
    rows = [(1, 2), (5, 6), (1, 2, 3), (5, 7)]
    trace = Trace([TraceRequest(0, len(blocks) * 512, 1, blocks) for blocks in rows])
    assert survey(trace).last == (False, True, True, True)


def test_fresh_tokens_count_a_partial_block_once() -> None:
    trace = Trace([TraceRequest(0, 512 + 100, 1, (1, 2)), TraceRequest(0, 512 + 300, 1, (1, 2)),
                   TraceRequest(0, 40, 1, (9,))])
    assert survey(trace).fresh_tokens == (612, 200, 40)


def test_the_largest_values_are_taken(tmp_path: Path) -> None:
    blocks = [(1 << 64) - 1] * (1 << 15)
    most = {"timestamp": 8796093022208.0, "input_length": 1 << 24, "output_length": 1 << 20, "hash_ids": blocks}
    (found,) = read_trace(lines(tmp_path / "t.jsonl", most)).requests
    assert found == TraceRequest(8796093022208.0, 1 << 24, 1 << 20, array("Q", blocks))


def test_requests_of_one_tick_are_spread_until_the_next() -> None:
    trace = Trace([TraceRequest(at, 1, 1, (0,)) for at in (0, 0, 0, 3000, 6000, 6000)])
    assert arrivals(trace, 1.0) == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert arrivals(trace, 2.0) == [0.0, 0.5, 1.0, 1.5, 3.0, 3.75]
    assert arrivals(trace, 0.0) == [0.0] * 6


def test_time_never_runs_back() -> None:
    times = arrivals(Trace([TraceRequest(at, 1, 1, (0,)) for at in (0, 3000, 1000, 9000)]), 1.0)
    assert times == sorted(times)


def test_hints_are_given_to_last_requests_only() -> None:
    trace = Trace([TraceRequest(0, 512, 1, (i,)) for i in range(200)])
    last = [i % 2 == 0 for i in range(200)]
    source = TraceSource(trace, TraceSurvey((0,) * 200, (512,) * 200, tuple(last)), hints=0.5, seed=1)
    ended = [request.ended for _ in range(200) if (request := source.next()) is not None]
    assert source.next() is None
    assert not any(ended[1::2])
    assert 20 < sum(ended) < 80


def test_an_end_that_tells_says_how_much_later_prompts_have() -> None:
    trace = Trace([TraceRequest(0, 512 * len(blocks), 1, blocks) for blocks in ((1, 2, 3), (1, 2, 4), (1, 5), (6,))])
    found = survey(trace)
    assert (found.later_blocks, found.last) == ((2, 1, 0, 0), (True, True, True, True))
    source = TraceSource(trace, found, hints=1.0, shared_hints=True)
    assert [one.shared_tokens for _ in trace.requests if (one := source.next()) is not None] == [1024, 512, 0, 0]
    source = TraceSource(trace, found, hints=1.0)
    assert [one.shared_tokens for _ in trace.requests if (one := source.next()) is not None] == [None] * 4


def test_equal_blocks_are_equal_tokens_and_a_part_is_a_prefix() -> None:
    one, other = block_tokens([7, 8], 1024), block_tokens([9, 8], 600)
    assert one.dtype == np.int32
    assert one.min() >= 0
    assert np.array_equal(one[512:600], other[512:])
    assert not np.array_equal(one[:512], other[:512])
    assert np.array_equal(block_tokens([7], 100), one[:100])
    assert len(np.unique(block_tokens(range(200), 200 * 512))) > 0.99 * 200 * 512


def test_a_stream_continues_where_it_stopped() -> None:
    whole = stream_tokens(5, 0, 100)
    assert np.array_equal(whole[40:], stream_tokens(5, 40, 60))
    assert not np.array_equal(whole, stream_tokens(6, 0, 100))


# The published formats of traces: small files in exactly their form, and what is wrong with a file, in a sentence.


BAILIAN = """\
{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132, "type": "text", \
"turn": 1, "hash_ids": [1089, 1090, 1091]}
{"chat_id": 160, "parent_chat_id": 55, "timestamp": 62.0, "input_length": 16, "output_length": 1, "type": "file", \
"turn": 9, "hash_ids": [7]}
{"chat_id": 161, "parent_chat_id": 159, "timestamp": 70.25, "input_length": 70, "output_length": 3, "type": "search", \
"turn": 2, "hash_ids": [1089, 1090, 6326, 13148, 13149]}
"""


def weka(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A conversation as kv-cache-tester publishes it."""
    return {"id": name, "models": ["claude-opus-4-5-20251101"], "block_size": 64, "hash_id_scope": "local",
            "tool_tokens": 12974, "system_tokens": 4243, "requests": list(requests),
            "totals": {"requests": len(requests)}, **more}  # fmt: skip


def call(at: float, blocks: list[int], rest: int = 5, kind: str = "n") -> dict[str, Any]:
    return {"t": at, "type": kind, "model": "claude-opus-4-5-20251101", "in": 64 * len(blocks) + rest, "out": 17,
            "hash_ids": blocks, "input_types": ["text"], "output_types": ["text"], "stop": "end_turn",
            "think_time": 0.1, "api_time": 2.9}  # fmt: skip


def subagent(at: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": at, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore", "duration_ms": 9000,
            "total_tokens": 99, "tool_use_count": 1, "status": "completed", "requests": list(requests),
            "models": ["claude-haiku-4-5-20251001"], "tool_tokens": 0, "system_tokens": 0}  # fmt: skip


FIRST = weka("trace_0001", call(0.0, [1, 2, 3]), call(7.5, [1, 2, 3, 4], kind="s"), call(9.0, [1, 2, 9]))
SECOND = weka("trace_0002", call(0.0, [1, 2], 0), subagent(10.0, call(0.5, [1, 5]), call(2.0, [])),
              call(30.0, [1, 2, 6]))


def test_bailian_has_blocks_of_16_tokens_seconds_and_conversations(tmp_path: Path) -> None:
    (tmp_path / "qwen_traceA_blksz_16.jsonl").write_text(BAILIAN)
    found = read_trace(str(tmp_path / "qwen_traceA_blksz_16.jsonl"))
    assert (found.form, found.block_size) == ("Qwen-Bailian", 16)
    assert [one.timestamp for one in found.requests] == pytest.approx([61_114, 62_000, 70_250])
    assert [one.conversation for one in found.requests] == [159, 55, 159]
    assert [list(found.path(one)) for one in found.requests] == [[1089, 1090], [7], [1089, 1090, 6326, 13148]]
    assert survey(found).last == (False, True, True)
    assert survey(found).shared_blocks == (0, 0, 2)
    assert survey(found).fresh_tokens == (40, 16, 38)


def test_agentx_merges_conversations_by_time_and_their_ids_are_their_own(tmp_path: Path) -> None:
    found = read_trace(lines(tmp_path / "cc-traces.jsonl", FIRST, SECOND))
    assert (found.form, found.block_size) == ("AgentX", 64)
    assert [(one.timestamp, one.conversation) for one in found.requests] == [
        (0, 0), (0, 1), (7_500, 0), (9_000, 0), (10_500, 1), (12_000, 1), (30_000, 1)]
    assert [len(path) for path in paths_of(found)] == [3, 2, 4, 3, 2, 0, 3]
    assert survey(found).shared_blocks == (0, 0, 3, 2, 1, 0, 2)
    assert survey(found).last == (False, False, False, True, False, False, True)
    assert survey(found).fresh_tokens == (197, 128, 69, 69, 69, 5, 69)  # what has no id is nobody else's


def test_agentx_times_of_a_subagent_may_count_from_the_beginning(tmp_path: Path) -> None:
    absolute = weka("a", call(0.0, [1]), subagent(10.0, call(10.5, [1, 5]), call(12.0, [1, 5, 6])))
    assert [one.timestamp for one in read_trace(lines(tmp_path / "t.jsonl", absolute)).requests] == [0, 10_500, 12_000]


def test_of_agentx_so_many_conversations_are_open_at_a_time(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", FIRST, SECOND, FIRST)
    found = read_trace(path, conversations=1)
    assert [one.conversation for one in found.requests] == [0] * 3 + [1] * 4 + [2] * 3
    assert [one.timestamp for one in found.requests[2:5]] == [9_000, 9_000, 19_500]
    assert found.requests[-1].timestamp == 9_000 + 30_000 + 9_000
    assert len(read_trace(path, limit=4, conversations=1).requests) == 4


def test_agentx_global_ids_are_equal_in_all_conversations(tmp_path: Path) -> None:
    both = [weka(name, call(0.0, [1, 2, 3]), hash_id_scope="global") for name in "ab"]
    assert sum(survey(read_trace(lines(tmp_path / "t.jsonl", *both))).shared_blocks) == 3


def test_a_folder_of_conversations_is_one_trace(tmp_path: Path) -> None:
    (tmp_path / "trace_0002.json").write_text(json.dumps(SECOND, indent=1))
    (tmp_path / "trace_0001.json.gz").write_bytes(gzip.compress(json.dumps(FIRST).encode()))
    (tmp_path / "cache_hit_rates.txt").write_text("not a trace")
    found = read_trace(str(tmp_path))
    assert [one.conversation for one in found.requests] == [0, 1, 0, 0, 1, 1, 1]
    assert found == read_trace(lines(tmp_path / "both.jsonl", FIRST, SECOND))


def test_blocks_of_any_size_are_said_by_the_record_or_the_option(tmp_path: Path) -> None:
    rows = [{"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128, "timestamp": 0, "output_length": 1}]
    assert read_trace(lines(tmp_path / "t.jsonl", *rows)).block_size == 64
    assert read_trace(str(tmp_path / "t.jsonl"), block_size=64).block_size == 64
    with pytest.raises(TraceError, match=r"t\.jsonl:1: block_size=64, and 32 was given"):
        read_trace(str(tmp_path / "t.jsonl"), block_size=32)
    with pytest.raises(TraceError, match=r"t\.jsonl:2: block_size=32, and the trace began with 64"):
        read_trace(lines(tmp_path / "t.jsonl", *rows, rows[0] | {"block_size": 32, "input_length": 64}))
    del rows[0]["block_size"]
    assert read_trace(lines(tmp_path / "t.jsonl", *rows), block_size=64).requests[0].blocks[1] == 2002
    with pytest.raises(TraceError, match="hash_ids has 2 blocks, but a prompt of 128 tokens makes 1 of 512 tokens"):
        read_trace(str(tmp_path / "t.jsonl"))


def test_plan_and_replay_say_what_they_read_and_count_alike(tmp_path: Path, command: Command) -> None:
    (tmp_path / "b.jsonl").write_text(BAILIAN)
    for path, form, size in ((str(tmp_path / "b.jsonl"), "Qwen-Bailian", 16),
                             (lines(tmp_path / "w.jsonl", FIRST, SECOND), "AgentX", 64)):
        assert f"in blocks of {size} ({form})" in command("plan", path).stdout
        out = tmp_path / "out.json"
        command("plan", path, "--json", out)
        plan = json.loads(out.read_text())
        asked = ("--concurrency", "1", "--no-insert-outputs", "--page-size", size, "--json", out)
        assert f"blocks of {size} tokens ({form})" in command("replay", path, *asked).stdout
        replay = json.loads(out.read_text())
        assert replay["ok"]
        assert replay["blocks"]["hit"] == replay["blocks"]["shared"] > 0
        assert (replay["format"], replay["block_size"]) == (plan["format"], plan["block_size"]) == (form, size)
        assert round(replay["hit_ratio"], 5) == plan["highest_hit_ratio"], "also where prompts end inside a page"
        assert replay["hit_ratio_is"] == plan["hit_ratio_is"]


def test_conversations_of_another_format_have_their_own_times(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(BAILIAN)
    with pytest.raises(ConfigError, match=r"--conversations=3: the requests of .* it is a Qwen-Bailian trace"):
        read_trace(str(tmp_path / "b.jsonl"), conversations=3)


# what is wrong with a file is said in a sentence, with its place


def test_the_line_number_counts_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + "nonsense\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:3: not a JSON object"):
        read_trace(str(path))
    assert len(read_trace(str(path), limit=1).requests) == 1, "lines behind the limit do not matter"


@pytest.mark.parametrize(("first", "change", "message"), [
    *((GOOD, change, message) for change, message in (
        ({"input_length": 0}, "input_length=0 must lie between 1 and 16777216"),
        ({"input_length": "x"}, "input_length='x' must be an integer"),
        ({"input_length": True}, "input_length=True must be an integer"),
        ({"input_length": 600.0}, "input_length=600.0 must be an integer"),
        ({"input_length": (1 << 24) + 1}, "input_length=16777217 must lie between 1 and 16777216"),
        ({"output_length": -1}, "output_length=-1 must lie between 0 and 1048576"),
        ({"output_length": math.inf}, "output_length=inf must be an integer"),
        ({"output_length": (1 << 20) + 1}, "output_length=1048577 must lie between 0 and 1048576"),
        ({"output_length": 10**4200}, "output_length=1000"),
        ({"timestamp": None}, "timestamp=None must be a number"),
        ({"timestamp": -1}, "timestamp=-1 must lie between 0 and 8796093022208"),
        ({"timestamp": math.nan}, "timestamp=nan must be a finite number"),
        ({"timestamp": 1e16}, "timestamp=1e+16 must lie"),
        ({"timestamp": True}, "timestamp=True must be a number"),
        ({"hash_ids": [3, 1 << 64]}, "must be integers from 0 to 2**64 - 1"),
        ({"hash_ids": [3, -4]}, "must be integers from 0 to"),
        ({"hash_ids": [3, 4.0]}, "hash_ids=[3, 4.0]: Expected `int`"),
        ({"hash_ids": [3, True]}, "hash_ids=[3, True]: Expected `int`"),
        ({"hash_ids": []}, "hash_ids has 0 blocks, but a prompt of 600 tokens makes 2 of 512 tokens"),
        ({"hash_ids": 7}, "hash_ids=7 must be of type list"),
    )),
    *((FIRST, SECOND | change, message) for change, message in (
        ({"requests": 3}, "requests=3 must be of type list"),
        ({"requests": [3]}, "request 1: not a JSON object but 3"),
        ({"hash_id_scope": "mine"}, "hash_id_scope='mine' must be 'local' or 'global'"),
        ({"block_size": 0}, "block_size=0 must lie between 1 and 65536"),
        ({"requests": [call(0, [1]), call(0, [1]) | {"in": 0}]}, "request 2: in=0 must lie between 1 and"),
        ({"requests": [call(-1, [1])]}, "request 1: t=-1 must lie between 0 and"),
        ({"requests": [call(0, [1 << 40])]}, "hash_ids=[1099511627776] must be integers from 0 to 2**40"),
        ({"requests": [call(0, [1, 2, 3], -64)]}, "hash_ids has 3 blocks, but a prompt of 128 tokens makes 2 of 64"),
        ({"requests": [{"t": 0}]}, "request 1: the field 'in' is missing"),
        ({"requests": [subagent(1, call(0, [1]), subagent(1))]}, "request 1: request 2: a subagent of a subagent"),
        ({"requests": [subagent(1, call(0, [1]) | {"out": "x"})]}, "request 1: request 1: out='x' must be an integer"),
    )),
])  # fmt: skip
def test_a_bad_field_is_named_with_its_value_and_its_place(
    tmp_path: Path, first: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(lines(tmp_path / "t.jsonl", first, {**first, **change}))
    assert str(caught.value).startswith(f"{tmp_path}/t.jsonl:2: ")
    assert message in str(caught.value)


PACKED = gzip.compress(BAILIAN.encode() * 50)
CHAT = BAILIAN.splitlines()[0].encode()
CANNOT_READ = "cannot read the trace .*"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", b"{", ":1: not a JSON object"), ("a.jsonl", b"[1]", r":1: not a JSON object but \[1\]"),
    ("a.jsonl", b'{"hash_ids": []}', ":1: the field 'input_length' is missing"),
    ("a.jsonl", b'{"timestamp": 1}', ":1: no trace that is known: a record has requests, chat_id or hash_ids, and this "
                                     "one has 'timestamp'"),
    ("a.jsonl", b"{}", "and this one has 'none'"), ("a.jsonl", b"\n", "has no requests"),
    ("a.jsonl", b"\xff\xfe\x00", "not UTF-8"), ("a.jsonl", None, CANNOT_READ + "No such file or directory"),
    ("", b"", r"the folder has no \.json or \.jsonl files"),
    ("a.jsonl", json.dumps(FIRST).encode() + b"\n" + CHAT, ":2: the field 'requests' is missing"),
    ("a.jsonl", CHAT + b"\n" + json.dumps(FIRST).encode(), ":2: the field 'input_length' is missing"),
    ("cut.jsonl.gz", PACKED[:-20], CANNOT_READ + "ended before"), ("text.jsonl.gz", b"text", CANNOT_READ + "gzip"),
    ("bits.jsonl.gz", PACKED[:40] + b"\0" * 40 + PACKED[80:], CANNOT_READ),
    ("two.json", b'{\n "requests": [\n}', ":3: not a JSON object"),
    ("digits.jsonl", b'{"hash_ids": [' + b"9" * 5000 + b"]}", ":1: not a JSON object"),
    ("deep.jsonl", b'{"hash_ids":' + b"[" * 200_000, ":1: not a JSON object"),
    ("long.jsonl", b'{"hash_ids": [' + b"1," * 150_000, ":1: a record of more than 250000 bytes"),
])  # fmt: skip
def test_a_broken_file_is_one_sentence(
    name: str, content: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MOST_BYTES", 250_000)
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


JUNK: list[Any] = [None, True, -1, 0, 1, 1.5, 1e300, 10**30, "", "x", [], [1], [[]], [None], {}, {"requests": []},
                   {"t": 0}, [{"t": 0, "requests": []}]]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_no_line_whatever_does_anything_but_read_or_be_refused(tmp_path: Path, seed: int) -> None:
    """Fields lost, of other types, or nested at random, and bytes changed, in all three formats."""
    rng = random.Random(seed)
    mooncake = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [3, 4], "block_size": 512}
    path, refused = tmp_path / "t.jsonl", 0
    for _ in range(400):
        records = [json.loads(json.dumps(rng.choice([mooncake, json.loads(BAILIAN.splitlines()[0]), FIRST, SECOND])))]
        records += [json.loads(json.dumps(records[0])) for _ in range(rng.randrange(3))]
        for _ in range(rng.randrange(3)):
            place: Any = rng.choice(records)
            while isinstance(place.get("requests"), list) and place["requests"] and rng.random() < 0.7:
                inner = rng.choice(place["requests"])
                if not isinstance(inner, dict):
                    break
                place = inner
            name = rng.choice([*place, "requests", "hash_ids"])
            if rng.random() < 0.2:
                place.pop(name, None)
            else:
                place[name] = rng.choice(JUNK)
        data = bytearray("\n".join(map(json.dumps, records)).encode())
        for _ in range(rng.choice((0, 0, 1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found, told = read_trace(str(path)), str(path)
        except TraceError as error:
            found, told, refused = Trace([]), str(error), refused + 1
        assert str(path) in told
        assert len(told) < 800
        survey(found)
    assert 50 < refused < 390


# A recorded trace with little room: on one tier as many hits as an LRU over blocks, and on three tiers everything that
# one of them holds is a hit.


def replayed(ran: Ran, room: str, limit: int | None) -> tuple[dict[str, Any], Any]:
    """The report of a replay of the first requests, or all, and what LRU caches hit of them."""
    found = ran(f"replay {REAL} {' '.join(BY_BLOCK)} --concurrency 1 {room} {f'--limit {limit}' if limit else ''}")
    lru = curve(list(paths_of(read_trace(REAL, limit=limit))))
    assert found["blocks"]["total"] == lru.lookups
    return found, lru


@needs_trace
@pytest.mark.parametrize(("blocks", "limit"), [
    pytest.param(300, 800, marks=pytest.mark.slow(5)),
    *(pytest.param(blocks, None, marks=pytest.mark.soak) for blocks in (1_000, 10_000, 30_000, 100_000)),
])  # fmt: skip
def test_one_tier_does_as_well_as_an_lru_over_blocks(blocks: int, limit: int | None, ran: Ran) -> None:
    found, lru = replayed(ran, f"--device-tokens {blocks * BLOCK_TOKENS} --host-tokens none", limit)
    assert lru.found(blocks) > 100
    assert found["blocks"]["hit"] / lru.lookups >= lru.found(blocks) / lru.lookups - 0.001
    assert found["evicted"]["device"] > 0


@needs_trace
@pytest.mark.parametrize(("device", "host", "limit", "hits", "evicted"), [
    pytest.param(300, 2_000, 2_500, 300_000, 10_000, marks=pytest.mark.slow(8)),
    pytest.param(1_000, 10_000, None, 5_000_000, 100_000, marks=pytest.mark.soak),
])  # fmt: skip
def test_three_tiers_hold_what_any_of_them_holds(
    device: int, host: int, limit: int | None, hits: int, evicted: int, ran: Ran
) -> None:
    found, lru = replayed(ran, f"--device-tokens {device * BLOCK_TOKENS} --host-tokens {host * BLOCK_TOKENS} --storage "
                          "memory:?capacity=2GiB --bytes-per-token 4", limit)
    assert found["blocks"]["hit"] / lru.lookups == pytest.approx(lru.found(1 << 20) / lru.lookups, abs=0.01)
    assert min(found["tokens"]["hit"].values()) > hits
    assert min(found["evicted"].values()) > evicted
    assert found["lost_pages"] == 0
