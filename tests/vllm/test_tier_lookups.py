"""Lookups: gathered by the step, answered within the deadline, remembered for a moment. Without vLLM, without time."""

from __future__ import annotations

from asynccache_vllm.lookups import HIT_KEPT, MISS_KEPT, ChunkQuestion, KeyAnswer, KeyTable

from asynccache.storage import Result

HIT, MISS, LATER = KeyAnswer.HIT, KeyAnswer.MISS, KeyAnswer.LATER
TIMEOUT = 0.5


def living(*requests: str) -> KeyTable:
    """A table that knows these requests."""
    lookups = KeyTable(TIMEOUT)
    for request in requests:
        lookups.begin(request)
    return lookups


def asked(lookups: KeyTable, now: float) -> ChunkQuestion:
    question = lookups.take(now)
    assert question is not None
    return question


def test_the_keys_of_a_step_are_one_question_whoever_asks() -> None:
    lookups = living("r", "s", "t")
    answers = [lookups.ask(key, request, 0.0) for request in ("r", "s") for key in (b"a", b"b")]
    answers.append(lookups.ask(b"c", "s", 0.0))
    assert answers == [LATER] * 5
    question = asked(lookups, 0.001)
    assert question.keys == [b"a", b"b", b"c"]
    assert question.requests == {"r", "s"}
    assert lookups.ask(b"a", "t", 0.002) is LATER
    assert lookups.take(0.003) is None, "a key is asked once at a time"


def test_answers_are_told_and_remembered_for_a_moment() -> None:
    lookups = living("r", "s", "t")
    for key in (b"a", b"b", b"c"):
        lookups.ask(key, "r", 0.0)
    lookups.answer(asked(lookups, 0.0), [Result.HIT, Result.MISS, Result.FAILED], 0.01, 0.01)
    assert [lookups.ask(key, "s", 0.02) for key in (b"a", b"b", b"c")] == [HIT, MISS, MISS]
    assert lookups.take(0.02) is None
    assert lookups.ask(b"b", "s", 0.01 + MISS_KEPT) is LATER
    assert lookups.ask(b"a", "s", HIT_KEPT) is HIT
    assert lookups.ask(b"a", "s", 0.01 + HIT_KEPT) is LATER


def test_no_answer_is_a_miss_at_the_deadline_and_stays_one_for_that_request() -> None:
    lookups = living("r", "s", "t")
    assert lookups.ask(b"a", "r", 0.0) is LATER
    question = asked(lookups, 0.1)
    assert lookups.ask(b"a", "r", 0.59) is LATER
    assert lookups.ask(b"a", "r", 0.6) is MISS
    assert lookups.ask(b"b", "r", 0.6) is MISS, "it has waited enough"
    assert lookups.take(0.6) is None
    lookups.answer(question, [Result.FAILED], 0.6, 0.6)
    assert lookups.ask(b"a", "r", 5.0) is MISS
    assert lookups.ask(b"a", "s", 5.0) is LATER, "another request may wait"


def test_a_slow_step_of_the_engine_is_no_wait_for_the_stores() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    question = asked(lookups, 0.0)
    lookups.answer(question, [Result.HIT], 0.01, 2.0)  # the step took two seconds
    assert lookups.ask(b"a", "r", 2.0) is HIT
    assert lookups.ask(b"b", "r", 2.0) is LATER, "of another group, say"
    lookups.answer(asked(lookups, 2.0), [Result.HIT], 2.01, 4.0)
    assert lookups.ask(b"b", "r", 4.0) is HIT


def test_waits_add_up() -> None:
    lookups = living("r", "s", "t")
    now = 0.0
    waited = 0.0
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        if lookups.ask(key, "r", now) is MISS:
            break
        lookups.answer(asked(lookups, now), [Result.MISS], now + 0.2, now + 0.2)
        now += 0.2
        waited += 0.2
    assert TIMEOUT <= waited < TIMEOUT + 0.2


def test_who_joins_a_question_waits_no_longer_than_who_asked() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    question = asked(lookups, 0.0)
    assert lookups.ask(b"a", "s", 0.4) is LATER
    lookups.answer(question, [Result.FAILED], 0.5, 0.5)
    assert lookups.ask(b"a", "s", 0.51) is MISS
    assert lookups.ask(b"z", "s", 0.51) is MISS


def test_a_preempted_request_waits_anew() -> None:
    lookups = living("r", "s", "t")
    lookups.lost([b"a"], "r", 0.0)
    assert lookups.ask(b"b", "r", 0.0) is MISS
    lookups.begin_again(["r"])
    assert lookups.ask(b"b", "r", 0.0) is LATER


def test_what_could_not_be_loaded_is_a_miss_at_once() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    lookups.answer(asked(lookups, 0.0), [Result.HIT], 0.1, 0.1)
    assert abs(lookups.left([b"a"]) - 0.4) < 1e-9
    lookups.lost([b"a"], "r", 0.2)
    assert lookups.ask(b"a", "r", 0.2) is MISS
    assert lookups.ask(b"a", "r", 9.0) is MISS, "the request does not try again"
    assert lookups.ask(b"a", "s", 0.2 + MISS_KEPT) is LATER


def test_what_is_stored_is_a_miss_no_longer() -> None:
    lookups = living("r", "s", "t")
    lookups.ask(b"a", "r", 0.0)
    lookups.answer(asked(lookups, 0.0), [Result.MISS], 0.0, 0.0)
    lookups.stored([b"a", b"b"])
    assert lookups.ask(b"a", "s", 0.1) is LATER


def test_nothing_is_kept_for_ever() -> None:
    lookups = living(*(f"r{i}" for i in range(100)))
    for i in range(100):
        lookups.ask(b"%d" % i, f"r{i}", 10.0)
    question = asked(lookups, 10.0)
    lookups.answer(question, [Result.HIT] * 100, 10.0, 10.0)
    for i in range(50):
        lookups.end(f"r{i}")
    lookups.lost([b"0"], "r0", 10.0)
    for i in range(50, 100):
        lookups.end(f"r{i}")
    lookups.begin_again(["r0", "r1"])
    lookups.tidy(10.0 + HIT_KEPT)
    assert (lookups._known, lookups._wanted, lookups._asked) == ({}, {}, {})
    assert not lookups._spent
