"""Ranks that are processes, over gloo: equal histories; failures told in time; what differs refused or named.

One crew serves the module, as every job makes connections of its own: so a new group works after a failure, too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.ranks.crew import Crew
from tests.ranks.gloo_child import Answer

TIMEOUT = 3.0
SLACK = 10.0  # a loaded machine, and the steps between a rank's end and its peers' next wait for it
LONG = 10**6

Shape = tuple[int, int, int]  # tp, cp, pp

TP2, PP2, TP2_PP2, PP4, TP2_CP2 = (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1)
SHORT: Sequence[Shape] = (TP2, PP2, TP2_PP2, PP4)
EVERY: Sequence[Shape] = (*SHORT, TP2_CP2, (2, 2, 2))


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(tmp_path_factory.mktemp("ranks")) as crew:
        yield crew


def size(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def alike(answers: Sequence[Answer], steps: int) -> None:
    """All went well, and everybody did the same at every step."""
    assert [answer.text for answer in answers] == [""] * len(answers)
    assert len(answers[0].digests) >= steps
    assert answers[0].commits > steps // 4
    assert all(answer.digests == answers[0].digests for answer in answers)


def run(crew: Crew, shape: Shape, steps: int, **job: Any) -> list[Answer]:
    crew.begin(shape, steps=steps, **job)
    return crew.answers(list(range(size(shape))), 60 + steps / 5)


def strike(crew: Crew, shape: Shape, victim: int, how: signal.Signals, **job: Any) -> None:
    """Every other rank hears of it within the time-out, and closes at once."""
    ranks = range(size(shape))
    crew.begin(shape, steps=LONG, timeout=TIMEOUT, **job)
    crew.stepping(len(ranks))
    struck = time.monotonic()
    crew.members[victim].strike(how)
    answers = crew.answers([rank for rank in ranks if rank != victim], 60)
    crew.remove(victim)
    for answer in answers:
        assert answer.error == "RankFailure", answer.text
        assert answer.at - struck < TIMEOUT + SLACK, answer.text
        assert answer.closing < 2.0 + SLACK
    assert any(f"rank {victim}" in answer.text for answer in answers), [answer.text for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHORT[0], *(pytest.param(one, marks=pytest.mark.ranks) for one in SHORT[1:])])
def test_processes_hold_the_same(crew: Crew, shape: Shape) -> None:
    alike(run(crew, shape, 200, seed=1), 200)


@pytest.mark.ranks
def test_groups_of_the_embedders_serve_as_well(crew: Crew) -> None:
    alike(run(crew, TP2_PP2, 100, seed=2, adopt=True), 100)


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("shape", "victim"), [(TP2, 1), (PP2, 0), (TP2_PP2, 3)])
def test_the_living_hear_of_a_rank_that_is_gone(crew: Crew, shape: Shape, victim: int, how: signal.Signals) -> None:
    strike(crew, shape, victim, how)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.ranks), 1])
def test_a_rank_that_does_something_else_is_named(crew: Crew, odd: int) -> None:
    crew.begin(TP2, {odd: {"odd": 50}}, steps=200)
    answers = crew.answers([0, 1], 60)
    assert [answer.error for answer in answers] == ["RankDivergence"] * 2
    assert "'a call of its own' at step 50" in answers[odd].text


@pytest.mark.slow
def test_unequal_ranks_are_refused(crew: Crew) -> None:
    crew.begin(PP2, {1: {"fields": {"page_size": 32}}}, steps=10)
    expected = "page_size differs between ranks: 16 on rank 0; 32 on rank 1"
    assert [(a.error, a.text) for a in crew.answers([0, 1], 60)] == [("ConfigError", expected)] * 2


@pytest.mark.ranks
def test_unequal_topologies_are_refused_before_a_group_is_made(crew: Crew) -> None:
    crew.begin(TP2, {1: {"topology": PP2}}, steps=10)
    answers = crew.answers([0, 1], 60)
    assert [answer.error for answer in answers] == ["ConfigError"] * 2
    assert answers[0].text == "tp differs between ranks: 2 on rank 0; 1 on rank 1"


@pytest.mark.ranks
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_loop_does_not_wait_for_a_peer_that_is_late(crew: Crew, loop: str) -> None:
    """Collectives and receives of 200 ms each are in flight nearly all the time. A machine with other work may be late
    once, a loop that waits for its peer always is."""
    for shape, late in ((TP2, 1), (PP2, 0)):
        lags: list[float] = []
        while len(lags) < 5 and (not lags or lags[-1] >= 0.1):
            crew.begin(shape, {late: {"stall": 0.2}}, steps=25, uvloop=loop == "uvloop", seed=3)
            answers = crew.answers([0, 1], 60)
            alike(answers, 25)
            lags.append(answers[1 - late].lag)
        assert min(lags) < 0.1


@pytest.mark.ranks
@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("shape", [TP2_CP2, TP2_PP2])
def test_every_group_has_the_time_out(crew: Crew, shape: Shape, adopt: bool) -> None:
    for answer in run(crew, shape, 1, adopt=adopt, timeout=None):
        assert answer.text == ""
        assert len(answer.timeouts) == (3 if shape == TP2_CP2 or answer.rank < 2 else 2)
        assert {found for each in answer.timeouts for found in each} == {30.0}


# the whole matrix: make test-ranks


@pytest.mark.ranks
@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("shape", EVERY)
def test_a_thousand_steps(crew: Crew, shape: Shape, adopt: bool) -> None:
    alike(run(crew, shape, 1000, seed=4, adopt=adopt), 1000)


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("shape", "victim"), [(shape, victim) for shape in EVERY for victim in range(size(shape))])
def test_each_rank_in_turn(crew: Crew, shape: Shape, victim: int, how: signal.Signals) -> None:
    strike(crew, shape, victim, how)


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", range(4))
def test_each_rank_in_turn_in_groups_of_the_embedders(crew: Crew, victim: int, how: signal.Signals) -> None:
    strike(crew, TP2_PP2, victim, how, adopt=True)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", range(4))
def test_a_rank_that_comes_back_hears_that_it_is_out(crew: Crew, victim: int) -> None:
    crew.begin(TP2_PP2, steps=LONG, timeout=TIMEOUT)
    crew.stepping(4)
    crew.members[victim].strike(signal.SIGSTOP)
    others = [rank for rank in range(4) if rank != victim]
    assert {answer.error for answer in crew.answers(others, 60)} == {"RankFailure"}
    crew.members[victim].strike(signal.SIGCONT)
    (answer,) = crew.answers([victim], 60)
    assert answer.error == "RankFailure"
    alike(run(crew, TP2_PP2, 50), 50)
