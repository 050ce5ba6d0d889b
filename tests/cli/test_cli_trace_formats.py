"""The published formats of traces: small files in exactly their form, and what is wrong with a file, in a sentence."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import traces
from asynccache.cli.main import main
from asynccache.cli.traces import Trace, TraceError, paths_of, read_trace, survey
from asynccache.errors import ConfigError

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


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


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


def test_plan_and_replay_say_what_they_read_and_count_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.jsonl").write_text(BAILIAN)
    for path, form, size in ((str(tmp_path / "b.jsonl"), "Qwen-Bailian", 16),
                             (lines(tmp_path / "w.jsonl", FIRST, SECOND), "AgentX", 64)):
        assert main(["plan", path]) == 0
        assert f"in blocks of {size} ({form})" in capsys.readouterr().out
        out = tmp_path / "out.json"
        assert main(["plan", path, "--json", str(out)]) == 0
        plan = json.loads(out.read_text())
        assert main(["replay", path, "--concurrency", "1", "--no-insert-outputs", "--page-size", str(size), "--json",
                     str(out)]) == 0
        assert f"blocks of {size} tokens ({form})" in capsys.readouterr().out
        replay = json.loads(out.read_text())
        assert replay["ok"]
        assert replay["blocks"]["hit"] == replay["blocks"]["shared"] > 0
        assert (replay["format"], replay["block_size"]) == (plan["format"], plan["block_size"]) == (form, size)
        assert round(replay["hit_ratio"], 5) == plan["highest_hit_ratio"]


def test_conversations_of_another_format_have_their_own_times(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(BAILIAN)
    with pytest.raises(ConfigError, match=r"--conversations=3: the requests of .* it is a Qwen-Bailian trace"):
        read_trace(str(tmp_path / "b.jsonl"), conversations=3)


@pytest.mark.parametrize(("change", "message"), [
    ({"requests": 3}, "t.jsonl:2: requests=3 must be of type list"),
    ({"requests": [3]}, "t.jsonl:2: request 1: not a JSON object but 3"),
    ({"hash_id_scope": "mine"}, "t.jsonl:2: hash_id_scope='mine' must be 'local' or 'global'"),
    ({"block_size": 0}, "t.jsonl:2: block_size=0 must lie between 1 and 65536"),
    ({"requests": [call(0, [1]), call(0, [1]) | {"in": 0}]}, "t.jsonl:2: request 2: in=0 must lie between 1 and"),
    ({"requests": [call(-1, [1])]}, "t.jsonl:2: request 1: t=-1 must lie between 0 and"),
    ({"requests": [call(0, [1 << 40])]}, "request 1: hash_ids=[1099511627776] must be integers from 0 to 2**40"),
    ({"requests": [call(0, [1, 2, 3], -64)]}, "hash_ids has 3 blocks, but a prompt of 128 tokens makes 2 of 64 tokens"),
    ({"requests": [{"t": 0}]}, "t.jsonl:2: request 1: the field 'in' is missing"),
    ({"requests": [subagent(1, call(0, [1]), subagent(1))]}, "request 1: request 2: a subagent of a subagent"),
    ({"requests": [subagent(1, call(0, [1]) | {"out": "x"})]}, "request 1: request 1: out='x' must be an integer"),
])  # fmt: skip
def test_what_is_wrong_with_a_conversation_is_said_with_its_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(lines(tmp_path / "t.jsonl", FIRST, SECOND | change))
    assert message in str(caught.value)


def test_a_line_of_another_format_is_refused(tmp_path: Path) -> None:
    other = json.loads(BAILIAN.splitlines()[0])
    with pytest.raises(TraceError, match=r"t\.jsonl:2: the field 'requests' is missing"):
        read_trace(lines(tmp_path / "t.jsonl", FIRST, other))
    with pytest.raises(TraceError, match=r"t\.jsonl:2: the field 'input_length' is missing"):
        read_trace(lines(tmp_path / "t.jsonl", other, FIRST))


def test_a_broken_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(BAILIAN.encode() * 50)
    for name, content, message in (
        ("cut.jsonl.gz", whole[:-20], "cannot read the trace .*ended before"),
        ("text.jsonl.gz", b"text", "cannot read the trace .*gzip"),
        ("bits.jsonl.gz", whole[:40] + b"\0" * 40 + whole[80:], "cannot read the trace"),
        ("two.json", b'{\n "requests": [\n}', r"two\.json:3: not a JSON object"),
        ("digits.jsonl", b'{"hash_ids": [' + b"9" * 5000 + b"]}", r"digits\.jsonl:1: not a JSON object"),
        ("deep.jsonl", b'{"hash_ids":' + b"[" * 200_000, r"deep\.jsonl:1: not a JSON object"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=message):
            read_trace(str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"the folder has no \.json or \.jsonl files"):
        read_trace(str(tmp_path / "empty"))
    monkeypatch.setattr(traces, "MOST_BYTES", 1000)
    (tmp_path / "long.jsonl").write_text('{"hash_ids": [' + "1," * 1000)
    with pytest.raises(TraceError, match=r"long\.jsonl:1: a record of more than 1000 bytes"):
        read_trace(str(tmp_path / "long.jsonl"))


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
