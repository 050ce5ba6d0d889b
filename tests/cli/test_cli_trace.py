"""Traces: the lines that are read, those that are refused, and the hits that a trace allows, counted without a
cache."""

from __future__ import annotations

import json
import math
import os
from array import array
from pathlib import Path

import numpy as np
import pytest

from asynccache.cli.traces import Trace, TraceError, TraceRequest, TraceSurvey, arrivals, read_trace, survey
from asynccache.cli.workloads import TraceSource, block_tokens, stream_tokens
from tests.cli.trace_kit import made_trace

REAL = os.environ.get("ASYNCCACHE_TRACE", "")

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}


def read_lines(tmp_path: Path, *lines: str) -> Trace:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return read_trace(str(path))


def rows_of(path: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def implied(rows: list[dict[str, object]]) -> tuple[int, int]:
    """Shared and all full blocks, worked out with nothing but dicts."""
    tree: dict[int, object] = {}
    shared = total = 0
    for row in rows:
        blocks, length = row["hash_ids"], row["input_length"]
        assert isinstance(blocks, list)
        assert isinstance(length, int)
        node = tree
        for block in blocks[: length // 512]:
            total += 1
            shared += block in node
            node = node.setdefault(block, {})  # type: ignore[assignment]
    return shared, total


@pytest.mark.skipif(not Path(REAL).is_file(), reason="ASYNCCACHE_TRACE names no file")
def test_the_real_trace_implies_what_is_published() -> None:
    assert implied(rows_of(REAL)) == (105_592, 276_491)
    assert sum(survey(read_trace(REAL)).shared_blocks) == 105_592


def test_survey_agrees_with_dicts_of_blocks(tmp_path: Path) -> None:
    path = made_trace(tmp_path / "trace.jsonl")
    found = survey(read_trace(str(path)))
    shared, total = implied(rows_of(path))
    assert sum(found.shared_blocks) == shared
    assert 0 < shared < total


def test_survey_finds_the_last_request_of_a_conversation() -> None:
    rows = [(1, 2), (5, 6), (1, 2, 3), (5, 7)]
    trace = Trace([TraceRequest(0, len(blocks) * 512, 1, blocks) for blocks in rows])
    assert survey(trace).last == (False, True, True, True)


def test_fresh_tokens_count_a_partial_block_once() -> None:
    trace = Trace([TraceRequest(0, 512 + 100, 1, (1, 2)), TraceRequest(0, 512 + 300, 1, (1, 2)),
                   TraceRequest(0, 40, 1, (9,))])
    assert survey(trace).fresh_tokens == (612, 200, 40)


@pytest.mark.parametrize(("change", "message"), [
    ({"input_length": 0}, "input_length=0 must lie between 1 and 16777216"),
    ({"input_length": "x"}, "input_length='x' must be an integer"),
    ({"input_length": True}, "input_length=True must be an integer"),
    ({"input_length": 600.0}, "input_length=600.0 must be an integer"),
    ({"input_length": (1 << 24) + 1}, "input_length=16777217 must lie between 1 and 16777216"),
    ({"input_length": math.nan}, "input_length=nan must be an integer"),
    ({"output_length": -1}, "output_length=-1 must lie between 0 and 1048576"),
    ({"output_length": 1.5}, "output_length=1.5 must be an integer"),
    ({"output_length": "7"}, "output_length='7' must be an integer"),
    ({"output_length": False}, "output_length=False must be an integer"),
    ({"output_length": math.inf}, "output_length=inf must be an integer"),
    ({"output_length": (1 << 20) + 1}, "output_length=1048577 must lie between 0 and 1048576"),
    ({"output_length": 1 << 53}, "output_length=9007199254740992 must lie between"),
    ({"output_length": 10**4200}, "output_length=1000"),
    ({"timestamp": None}, "timestamp=None must be a number"),
    ({"timestamp": -1}, "timestamp=-1 must lie between 0 and 8796093022208"),
    ({"timestamp": math.nan}, "timestamp=nan must be a finite number"),
    ({"timestamp": math.inf}, "timestamp=inf must be a finite number"),
    ({"timestamp": 1e16}, "timestamp=1e+16 must lie"),
    ({"timestamp": True}, "timestamp=True must be a number"),
    ({"timestamp": "0"}, "timestamp='0' must be a number"),
    ({"hash_ids": [3, 1 << 64]}, "must be integers from 0 to 2**64 - 1"),
    ({"hash_ids": [3, 4.0]}, "hash_ids=[3, 4.0]: Expected `int`"),
    ({"hash_ids": [3, True]}, "hash_ids=[3, True]: Expected `int`"),
    ({"hash_ids": [3, math.nan]}, "hash_ids=[3, nan]: Expected `int`"),
    ({"hash_ids": []}, "hash_ids has 0 blocks, but a prompt of 600 tokens makes 2 of 512 tokens"),
    ({"hash_ids": [3, 4, 5]}, "hash_ids has 3 blocks, but a prompt of 600 tokens makes 2 of 512 tokens"),
    ({"hash_ids": [3, "4"]}, "hash_ids=[3, '4']: Expected `int`"),
    ({"hash_ids": [3, -4]}, "must be integers from 0 to"),
    ({"hash_ids": 7}, "hash_ids=7 must be of type list"),
])
def test_a_bad_field_is_named_with_its_value(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_lines(tmp_path, json.dumps(GOOD), json.dumps({**GOOD, **change}))
    assert str(caught.value).startswith(f"{tmp_path}/t.jsonl:2: ")
    assert message in str(caught.value)


def test_the_largest_values_are_taken(tmp_path: Path) -> None:
    blocks = [(1 << 64) - 1] * (1 << 15)
    most = {"timestamp": 8796093022208.0, "input_length": 1 << 24, "output_length": 1 << 20, "hash_ids": blocks}
    (found,) = read_lines(tmp_path, json.dumps(most)).requests
    assert found == TraceRequest(8796093022208.0, 1 << 24, 1 << 20, array("Q", blocks))


@pytest.mark.parametrize(("line", "message"), [("{", "not a JSON object"), ("[1]", "not a JSON object but [1]"),
                                               ('{"hash_ids": []}', "the field 'input_length' is missing"),
                                               ('{"timestamp": 1}', "no trace that is known: a record has requests, "
                                                "chat_id or hash_ids, and this one has 'timestamp'"),
                                               ("{}", "and this one has 'none'")])
def test_a_line_that_is_no_request_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl:1") as caught:
        read_lines(tmp_path, line)
    assert message in str(caught.value)


def test_the_line_number_counts_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + "nonsense\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:3: not a JSON object"):
        read_trace(str(path))
    assert len(read_trace(str(path), limit=1).requests) == 1, "lines behind the limit do not matter"


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*: No such file or directory"):
        read_trace(str(tmp_path / "nothing"))
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(str(tmp_path))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(str(tmp_path / "binary"))


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
