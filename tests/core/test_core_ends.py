"""Eviction after the end of a conversation: its private pages go first; pages that others have as well do not."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.leases import Leases
from asynccache.core.ledger import NOWHERE
from tests.simulated.synchronous import SPACE, Running, SynchronousRuntime, core_config, spell


def runtime(**options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config("full", device=16, host=0, **options))


def insert(run: SynchronousRuntime, text: str, shared: int | None = None, ended: bool = False) -> None:
    """One request; ``shared``: pages of it that it says others have."""
    ask = run.ask(spell(text))
    if shared is not None:
        ask = ask._replace(shared=shared * run.page)
    answer = run.core.lease(ask)
    request = Running(run, answer.lease, SPACE, spell(text))  # type: ignore[union-attr]
    run.running.add(request)
    run.perform(answer.plan)
    request.compute(len(text) * run.page)
    assert request.commit()
    request.release(ended=ended)


def take(run: SynchronousRuntime, pages: int) -> None:
    """A request that needs so many pages and shares nothing."""
    request = run.lease(b"", new=pages * run.page)
    assert request is not None
    request.release()


def reach(run: SynchronousRuntime, *texts: str) -> list[int]:
    return [run.reach(text)[0] for text in texts]


def what_is_shared_stays() -> None:
    """Nobody else has asked for it yet, so the tree alone could not tell."""
    run = runtime()
    insert(run, "mnop")
    insert(run, "abcdefgh", shared=4, ended=True)
    take(run, 8)
    assert reach(run, "mnop", "abcdX") == [4, 4]


def what_is_shared_is_cut_off_also_where_the_prompt_is_a_hit() -> None:
    run = runtime()
    insert(run, "mnop")
    insert(run, "abcdefgh")
    insert(run, "abcdefghij", shared=4, ended=True)
    take(run, 8)
    assert reach(run, "mnop", "abcdX") == [4, 4]


def what_is_private_goes_also_where_it_forks() -> None:
    run = runtime()
    insert(run, "abcdef")
    insert(run, "mnop")
    insert(run, "abcdgh", shared=2, ended=True)
    take(run, 10)
    assert reach(run, "mnop", "abX") == [4, 2]


def where_nobody_says_it_ends_at_the_last_fork() -> None:
    run = runtime()
    insert(run, "abcdef")
    insert(run, "mnop")
    insert(run, "abcdgh", ended=True)
    take(run, 6)
    assert reach(run, "abcdef", "mnop", "abcdgh") == [6, 4, 4]


def who_uses_an_ended_node_keeps_it() -> None:
    run = runtime()
    insert(run, "mnop")
    insert(run, "abcdef", ended=True)
    insert(run, "abcdgh")
    take(run, 4)
    take(run, 8)
    assert reach(run, "mnop", "abcdX") == [0, 4]


LAWS = (what_is_shared_stays, what_is_shared_is_cut_off_also_where_the_prompt_is_a_hit,
        what_is_private_goes_also_where_it_forks, where_nobody_says_it_ends_at_the_last_fork,
        who_uses_an_ended_node_keeps_it)  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_of_a_conversation_that_is_over_what_is_private_goes_first(law: Any) -> None:
    law()


def what_is_said_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "_private", lambda leases, ask: NOWHERE)


def everything_is_private(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "_private", lambda leases, ask: 0)


RULES = (what_is_said_is_not_heard, everything_is_private)


@pytest.mark.source
@pytest.mark.parametrize("broken", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_left_out_is_noticed(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    failed = []
    for law in LAWS:
        try:
            law()
        except AssertionError:
            failed.append(law.__name__)
    assert failed
