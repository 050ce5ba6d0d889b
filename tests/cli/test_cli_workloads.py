"""Made-up conversations: the same seed says the same, turns build on one another, and sessions share prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from asynccache.cli.options import WORKLOADS
from asynccache.cli.workloads import RunRequest, StressSource


def draw(workload: str, count: int, seed: int = 1) -> list[RunRequest]:
    source = StressSource(workload, seed=seed, requests=count, open_conversations=16, hints=0.5)
    requests = []
    while (request := source.next()) is not None:
        requests.append(request)
        source.done(request)
    return requests


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_fixes_everything(workload: str) -> None:
    one, other = draw(workload, 60), draw(workload, 60)
    assert len(one) == 60
    assert [r.namespace for r in one] == [r.namespace for r in other]
    assert [r.ended for r in one] == [r.ended for r in other]
    assert all(np.array_equal(a.prompt(), b.prompt()) for a, b in zip(one, other, strict=True))
    assert any(not np.array_equal(a.prompt(), b.prompt()) for a, b in zip(one, draw(workload, 60, 2), strict=True))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_are_what_they_say(workload: str) -> None:
    for request in draw(workload, 100):
        prompt, output = request.prompt(), request.output()
        assert prompt.dtype == output.dtype == np.int32
        assert (len(prompt), len(output)) == (request.length, request.output_length)
        assert 0 < request.length <= 4800
        assert prompt.min() >= 0


def shared_with_earlier(requests: list[RunRequest], page: int = 16) -> float:
    """The share of pages whose whole prefix an earlier prompt or output had."""
    seen: set[tuple[str | None, bytes]] = set()
    hit = total = 0
    for request in requests:
        whole = np.concatenate([request.prompt(), request.output()])
        pages = [(request.namespace, whole[:end].tobytes()) for end in range(page, len(whole) + 1, page)]
        prompt = pages[: request.length // page]
        total += len(prompt)
        hit += sum(p in seen for p in prompt)
        seen.update(pages)
    return hit / total


@pytest.mark.parametrize(("workload", "low", "high"), [
    ("chat", 0.4, 0.9), ("shared", 0.4, 0.98), ("agent", 0.5, 0.98), ("random", 0.0, 0.2),
])
def test_workloads_share_as_much_as_their_kind_does(workload: str, low: float, high: float) -> None:
    assert low <= shared_with_earlier(draw(workload, 250)) <= high


def test_the_next_turn_waits_for_the_last() -> None:
    source = StressSource("chat", seed=3, requests=None, open_conversations=1, hints=0.0)
    first, second = source.next(), source.next()
    assert first is not None
    assert second is not None
    assert not np.array_equal(second.prompt()[: first.length], first.prompt()), "another conversation"
    source.done(first)
    third = source.next()
    assert third is not None
    assert np.array_equal(third.prompt()[: first.length], first.prompt())


def test_half_of_the_ends_are_hinted() -> None:
    requests = draw("shared", 400)
    assert 120 < sum(r.ended for r in requests) < 280
