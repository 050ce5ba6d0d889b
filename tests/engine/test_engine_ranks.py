"""A real model on four processes, tp 2 x pp 2: the same tokens as on one rank, and hits of every tier on every stage.

One rank is transformers' own Qwen3 under the engine; the four compute with parts of it, heads and layers cut up, out of
the same weights: rank 0 with the scheduler, the others with ``follow``. No logit that decides is a near tie, which is
asserted.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from asynccache_hf import describe
from asynccache_shim import Limits, Request, Scheduler, SchedulerConfig

from asynccache import AsyncCache
from tests.engine.engine_child import LAYERS, Answer
from tests.engine.engine_kit import LIMIT, PAGE, Heard, Member, prompt
from tests.engine.engine_models import make

MARGIN = 0.01
DEVICE, HOST = 40, 320
TP2_PP2 = (2, 1, 2)
STARTS, ENDS = 120.0, 200.0
TIMEOUT = 3.0
PATIENCE = 60.0  # where no rank is lost, and only a machine may be slow
SLACK = 20.0  # a loaded machine; the model's own groups hold a call for twice the time-out

Rounds = list[list[tuple[list[int], int]]]


@cache
def reference() -> Any:
    return make("qwen3", 29, num_hidden_layers=LAYERS)


Logits = dict[bytes, torch.Tensor]


async def on_one_rank(rounds: Rounds) -> tuple[list[list[int]], Logits]:
    """Outputs, and the logits that they were drawn from, by the tokens before."""
    layout = describe(reference(), PAGE)
    async with AsyncCache(layout.cache_config(device_tokens=DEVICE * PAGE, host_tokens=HOST * PAGE)) as one:
        model, outputs = Heard(reference(), layout, one.pools), []
        async with Scheduler(one, model, SchedulerConfig(step_tokens=48, max_running=4)) as scheduler:
            for asked in rounds:
                requests = [scheduler.submit(Request(tokens, Limits(new))) for tokens, new in asked]
                outputs += [await request.done() for request in requests]
        return outputs, model.heard


class Crew:
    """Four processes, job after job; who is gone is replaced when the next job begins. ``folder``: stores of the job,
    one for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = str(folder / "weights.pt")
        torch.save(reference().state_dict(), self.weights)
        self.members: dict[int, Member] = {}
        self.jobs = 0

    def begin(self, rounds: Rounds, stores: str, **more: Any) -> None:
        self.jobs += 1
        fresh = [rank for rank in range(4) if rank not in self.members]
        self.members |= {rank: Member("rank") for rank in fresh}
        for rank in fresh:
            self.members[rank].hear("ready", STARTS)
        for rank, member in self.members.items():
            member.tell({
                "rank": rank, "topology": TP2_PP2, "meeting": str(self.folder / f"meeting-{self.jobs}"),
                "address": f"unix:{self.folder}/head-{self.jobs}",
                "weights": self.weights, "rounds": rounds, "device": DEVICE, "host": HOST,
                "storage": f"file:{self.folder / stores}-{{rank}}?capacity=64MiB&segment=8MiB",
                "logits": str(self.folder / f"logits-{self.jobs}-{rank}.pt"), **more,
            })  # fmt: skip

    def answers(self, ranks: Sequence[int] = range(4)) -> list[Answer]:
        return [Answer(**self.members[rank].hear("answer", ENDS)) for rank in ranks]

    def logits(self) -> Logits:
        """Of the first rank of the last stage, which chooses."""
        return torch.load(self.folder / f"logits-{self.jobs}-2.pt")  # type: ignore[no-any-return]

    def remove(self, rank: int) -> None:
        """It is gone, or will be."""
        member = self.members.pop(rank)
        member.process.kill()
        member.end()

    def leave(self) -> None:
        """All of them, each by itself and well."""
        members, self.members = self.members, {}
        assert {rank: member.end() for rank, member in members.items()} == dict.fromkeys(members, 0)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(tmp_path_factory.mktemp("engine-ranks"))
    try:
        yield crew
        crew.leave()
    finally:
        for rank in list(crew.members):
            crew.remove(rank)


def alike(answers: list[Answer]) -> None:
    """On every rank the same was computed, and all went well."""
    assert [answer.text for answer in answers] == [""] * 4
    assert len({answer.computed for answer in answers}) == 1


async def as_on_one_rank(crew: Crew, rounds: Rounds) -> list[Answer]:
    """The four ranks' answers, which are those of one rank, and drawn from the same logits."""
    outputs, ours = await on_one_rank(rounds)
    crew.begin(rounds, "talks", timeout=PATIENCE)
    answers = crew.answers()
    alike(answers)
    theirs = crew.logits()
    assert (answers[0].outputs, set(theirs)) == (outputs, set(ours))
    for before, row in ours.items():
        best = row[0].topk(2).values
        assert best[0] - best[1] > MARGIN, f"a near tie after {len(before)} bytes of tokens: choose another seed"
        assert (theirs[before] - row).abs().max() < LIMIT
    return answers


def talks(turn: int, said: list[list[int]]) -> list[tuple[list[int], int]]:
    """Two conversations: what has been said in them so far, and something new."""
    return [([*said[i], *prompt(11, seed=100 * turn + i)], 6) for i in range(2)]


@pytest.mark.slow(10)
async def test_four_ranks_say_what_one_says_with_hits_from_every_tier_on_every_stage(crew: Crew) -> None:
    """A first turn, a second one that hits the device, others that push both off it, a third turn that hits the host;
    then new processes, and a fourth turn that hits storage."""
    history: list[list[int]] = [prompt(61, seed=i) for i in range(2)]
    rounds: Rounds = []
    for turn in range(4):
        asked = talks(turn, history)
        rounds.append(asked)
        outputs, _ = await on_one_rank(rounds)
        history = [[*tokens, *made] for (tokens, _), made in zip(asked, outputs[-2:], strict=True)]
        if turn == 1:
            rounds.append([(prompt(150, seed=50 + i), 2) for i in range(4)])
    *first, last = rounds

    answers = await as_on_one_rank(crew, first)
    hits = answers[0].hits
    assert all(device > 0 for device, _, _ in hits[2:4])
    assert all(host > 0 for _, host, _ in hits[8:10])
    for answer in answers:
        assert min(answer.moved[name] for name in ("backup_host", "load_back", "put_pages")) > 0
    crew.leave()

    answers = await as_on_one_rank(crew, [last])
    assert all(device == host == 0 and storage > 0 for device, host, storage in answers[0].hits)
    for answer in answers:
        assert answer.moved["get_pages"] > 0
        assert answer.moved["load_back"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", range(4))
def test_a_rank_that_is_gone_ends_every_request_and_a_new_group_finds_what_is_stored(
    crew: Crew, victim: int, how: signal.Signals
) -> None:
    rounds: Rounds = [[(prompt(61, seed=i), 8) for i in range(3)]]
    stores = f"lost-{victim}-{how}"
    crew.begin(rounds, stores, timeout=TIMEOUT, endless=True)
    crew.members[0].hear("serving", ENDS)
    struck = time.monotonic()
    crew.members[victim].process.send_signal(how)
    for answer in crew.answers([rank for rank in range(4) if rank != victim]):
        assert answer.error == "RankFailure", answer.text
        assert answer.at - struck < (TIMEOUT if answer.rank == 0 else 2 * TIMEOUT) + SLACK, answer.text
        assert set(answer.callers) == ({"RankFailure"} if answer.rank == 0 else set())
    crew.remove(victim)
    crew.begin(rounds, stores)
    answers = crew.answers()
    alike(answers)
    assert all(storage > 0 for _, _, storage in answers[0].hits)
