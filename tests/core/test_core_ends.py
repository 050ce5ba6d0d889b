"""What is given back: at the end of a conversation, by draining, on the host."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from asynccache.core.cache import Skip, Unsaved
from asynccache.core.leases import Leases
from asynccache.core.ledger import NOWHERE
from asynccache.core.plan import BackupHost, BackupStorage, Medium, More, Publish
from tests.core.core_kit import (
    COMPONENTS,
    broken_laws,
    forget,
    granted,
    insert,
    reach,
    resized,
    saved,
    take,
    with_store_of,
    written,
)
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import MAMBA, SPACE, SWA, Running, SynchronousRuntime, _stored, core_config, spell

# Eviction after the end of a conversation: its private pages go first; pages that others have as well do not.


def runtime(**options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config("full", device=16, host=0, **options))


def asked(run: SynchronousRuntime, text: str, shared: int | None = None, ended: bool = False) -> None:
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


def what_is_shared_stays() -> None:
    """Nobody else has asked for it yet, so the tree alone could not tell."""
    run = runtime()
    insert(run, "mnop")
    asked(run, "abcdefgh", shared=4, ended=True)
    take(run, 8).release()
    assert reach(run, "mnop", "abcdX") == [4, 4]


def what_is_shared_is_cut_off_also_where_the_prompt_is_a_hit() -> None:
    run = runtime()
    insert(run, "mnop")
    insert(run, "abcdefgh")
    asked(run, "abcdefghij", shared=4, ended=True)
    take(run, 8).release()
    assert reach(run, "mnop", "abcdX") == [4, 4]


def what_is_private_goes_also_where_it_forks() -> None:
    run = runtime()
    insert(run, "abcdef")
    insert(run, "mnop")
    asked(run, "abcdgh", shared=2, ended=True)
    take(run, 10).release()
    assert reach(run, "mnop", "abX") == [4, 2]


def where_nobody_says_it_ends_at_the_last_fork() -> None:
    run = runtime()
    insert(run, "abcdef")
    insert(run, "mnop")
    asked(run, "abcdgh", ended=True)
    take(run, 6).release()
    assert reach(run, "abcdef", "mnop", "abcdgh") == [6, 4, 4]


def who_uses_an_ended_node_keeps_it() -> None:
    run = runtime()
    insert(run, "mnop")
    asked(run, "abcdef", ended=True)
    insert(run, "abcdgh")
    take(run, 4).release()
    take(run, 8).release()
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
@pytest.mark.usefixtures("breaks_a_core")
def test_a_rule_that_is_left_out_is_noticed(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert broken_laws(LAWS)


# Draining ends: nodes that the host could never hold cost no copies, and draining saves nothing twice.


def pages_with_a_tail_that_no_host_holds(run: SynchronousRuntime) -> None:
    """Two paths as long as the host is large, both in storage, each with a page more on the device alone."""
    saved(run, "abc", "abc!", "xyz", "xyz!")


@pytest.mark.parametrize("components", COMPONENTS)
def test_paths_that_the_host_could_never_hold_do_not_take_turns_on_it(components: str) -> None:
    """Whatever other components have below them."""
    run = SynchronousRuntime(core_config(components, host=3, window=64))
    pages_with_a_tail_that_no_host_holds(run)
    if components != "full":
        run.insert("abc!", checkpoint=4 if "mamba" in components else 0)
    run.flush()
    assert run.unsaved() == (2, 0)
    assert components != "full" or run.reach("abc!") == run.reach("xyz!") == (4, 4)


def test_what_the_host_can_hold_by_turns_is_all_saved() -> None:
    run = SynchronousRuntime(core_config(host=4))
    insert(run, "abcd", "abce", "stuv", "stux")
    run.flush()
    assert run.unsaved() == (0, 0)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("components", ["full", "full,swa,mamba"])
def test_the_host_gives_up_what_was_saved_ahead_of_demand_for_what_only_the_device_has(
    write_policy: str, components: str
) -> None:
    """The coldest pages of the device are condemned and saved before room is wanted. While they fill the host, what the
    device alone has is saved by a drain all the same."""
    config = core_config(components, device=8, host=4, write_policy=write_policy, write_back_watermark=0.5)
    run = SynchronousRuntime(config)
    for text in ("abcd", "wxyz"):
        run.insert(text, checkpoint=len(text) if "mamba" in components else 0)
        run.settle()
    assert run.core.world.condemned_pages, "the host's room is taken by what was saved ahead"
    run.flush()
    assert run.unsaved() == (0, 0)


@pytest.mark.slow(2)
@pytest.mark.parametrize("components", ["full", "full,swa", "full,swa,mamba"])
def test_an_idle_cache_whose_store_takes_all_is_saved_whole(components: str) -> None:
    """No path here is longer than the host, so there is nothing that a drain could not save."""
    for seed in range(12):
        draw = Random(seed)
        config = core_config(
            components, device=draw.choice([12, 16, 24]), host=draw.choice([6, 8, 12]),
            write_policy=draw.choice(["write_back", "write_through", "write_through_selective"]),
            write_back_watermark=draw.choice([0, 0.25, 0.5, 1.0]), eviction=draw.choice(["lru", "p2c"]),
        )  # fmt: skip
        run = SynchronousRuntime(config, seed)
        texts = [""]
        for _ in range(30):
            text = (draw.choice(texts) + "".join(draw.choices("abcd", k=draw.randint(1, 3))))[:6]
            texts = [*texts, text][-10:]
            run.insert(text, checkpoint=len(text) if "mamba" in components and draw.random() < 0.5 else 0)
            if draw.random() < 0.4:
                run.settle()
            if draw.random() < 0.1:
                run.flush()
                assert run.unsaved() == (0, 0), seed


def test_a_prefetch_below_what_no_host_holds_copies_nothing_and_leaves_no_effect_behind() -> None:
    run = SynchronousRuntime(core_config(host=3))
    pages_with_a_tail_that_no_host_holds(run)
    assert run.reach("abc") == (3, 3)
    assert open_fetch(run, spell("abc!def")) == Skip("the host is too small for the anchor")
    assert not any(run.core.statistics().operations.values()), "nobody would be told of it"


def drain_with(run: SynchronousRuntime, refused: set[bytes]) -> Unsaved:
    """Save what can be saved, as the runtime does, in a store that takes no page of ``refused``."""
    hopeless = 0
    while hopeless < 3:
        run.drain()
        if not run.jobs:
            break
        done = False
        for op in run.in_flight():
            effect = run.jobs[op].effect
            if isinstance(effect, BackupStorage) and any(digest in refused for _, digest in _stored(effect)):
                run.fail(op)
            else:
                run.complete(op)
                done = True
        hopeless = 0 if done else hopeless + 1
    return run.unsaved()


@pytest.mark.parametrize("watermark", [0.0, 0.25])
@pytest.mark.parametrize("host", [4, 8])
def test_a_page_that_storage_always_refuses_does_not_stop_the_drain_of_the_others(
    host: int, watermark: float
) -> None:
    config = core_config(device=16, host=host, write_policy="write_back", write_back_watermark=watermark)
    run = SynchronousRuntime(config)
    run.insert("x")
    refused = set(run.chain(SPACE, spell("x")))
    assert drain_with(run, refused) == (0, 1)  # from now on it is the coldest on the host
    for text in "abcdefghijklmn":
        run.insert(text)
    assert drain_with(run, refused) == (0, 1)


# Room on the host that a call gives back: backups that waited for it begin, and removals are announced.


def fetching(text: str, **options: Any) -> tuple[SynchronousRuntime, Fetch]:
    """A process that has nothing but a prefetch of ``text`` in flight, with all of its FULL pages taken."""
    run = with_store_of(core_config(**options), text, first=core_config())
    fetch = open_fetch(run, spell(text))
    assert isinstance(fetch, Fetch)
    assert fetch.take_full(len(text)) == len(text)
    return run, fetch


def put_off(run: SynchronousRuntime) -> None:
    """A commit finds the host full."""
    run.insert("xy")
    assert run.in_flight(BackupHost) == []
    assert run.core.statistics().deferred_backups == 1


def test_a_prefetch_that_gives_pages_back_starts_the_backups_that_were_put_off() -> None:
    run, fetch = fetching("abcd", host=4)
    put_off(run)
    fetch.release()
    assert run.in_flight(BackupHost), "the pages are free, and nobody tried again"
    assert run.core.statistics().deferred_backups == 0


def test_what_the_end_of_a_prefetch_removes_is_said_in_its_own_plan() -> None:
    run = with_store_of(core_config(), "abcd")
    saved(run, "ab")
    fetch = open_fetch(run, spell("abcd"))
    assert isinstance(fetch, Fetch)
    fetch.take_full(2)
    forget(run, SPACE)
    plan = fetch.commit(16)
    gone = [effect for effect in plan.effects if isinstance(effect, Publish) and effect.medium is Medium.CPU]
    assert [effect.stored for effect in gone] == [False]
    assert run.core.complete(()).effects == ()


def narrow(components: str, kind: int, host: int) -> SynchronousRuntime:
    """A host with so little room for one component."""
    return SynchronousRuntime(resized(core_config(components, window=12), kind, host=host))


def test_what_can_never_fit_the_host_is_not_put_off_again_and_again() -> None:
    run = narrow("full,mamba", MAMBA, 0)
    request = written(run, "abcd")
    run.settle()
    assert request.commit(checkpoint=16)
    assert run.core.statistics().deferred_backups == 0, "the host has no room for states, now or ever"


@pytest.mark.parametrize("text", ["abcde", "abcdefghijklmno"])
def test_of_what_fits_the_host_only_in_parts_the_window_is_saved(text: str) -> None:
    run = narrow("full,swa", SWA, 3)
    run.insert(text)
    run.settle()
    assert run.core.statistics().host[SWA].free == 0, "a window has three pages, and so many the host holds"
    push_out = granted(run, "z" * 64)
    push_out.release()
    assert run.reach(text) == (0, len(text))


def test_of_a_path_that_is_longer_than_the_host_the_start_is_saved() -> None:
    run = SynchronousRuntime(core_config(host=4))
    request = granted(run, "abcdefgh")
    for end in (12, 24, 32):
        request.compute(end)
        assert request.commit()
    request.release()
    run.settle()
    assert run.core.statistics().deferred_backups == 0
    push_out = granted(run, "z" * 64)
    push_out.release()
    assert run.reach("abcdefgh") == (0, 3)


def test_a_release_of_what_is_forgotten_looks_at_its_own_path_alone() -> None:
    run = SynchronousRuntime(core_config(device=256, host=0))
    holders = []
    for i in range(200):
        request = granted(run, chr(i))
        request.compute(4)
        assert request.commit()
        holders.append(request)
    answer = run.core.invalidate(SPACE)
    assert not isinstance(answer, More)
    run.perform(answer)
    steps = run.core.world.steps
    holders[77].release()
    assert run.core.statistics().nodes == 199
    assert run.core.world.steps - steps < 10


def forgotten(texts: list[str], **options: Any) -> tuple[SynchronousRuntime, list[Running]]:
    """Requests that hold these texts, a node each, in a namespace that is forgotten then. A call drops few nodes."""
    run = SynchronousRuntime(core_config(host=0, slice_steps=2, **options))
    held = []
    for text in texts:
        for end in range(1, len(text) + 1):
            run.insert(text[:end])
        request = granted(run, text, limit=len(text) * run.page)
        held.append(request)
    forget(run, SPACE)
    assert not run.core.behind
    run.prompt = False
    return run, held


def follow_up(run: SynchronousRuntime) -> int:
    """Follow up until nothing is left to do. Returns in how many calls."""
    calls = 0
    while run.core.behind:
        calls += 1
        run.perform(run.core.follow_up())
    return calls


def test_all_that_is_left_of_a_forgotten_namespace_is_given_back_however_small_the_slices_are() -> None:
    run, (request,) = forgotten(["abcdefgh"])
    request.release()
    assert follow_up(run) > 2


def test_what_is_given_back_behind_a_pass_that_is_under_way_is_dropped_by_the_next_one() -> None:
    run, requests = forgotten(["abcdefgh", "ijklmnop", "qrstuvwx"])
    for first in requests:
        first.release()
        for _ in range(3):
            run.perform(run.core.follow_up())
    assert follow_up(run) < 40


def test_nobody_follows_up_for_ever_where_a_request_holds_a_forgotten_namespace() -> None:
    run, (first, second) = forgotten(["abcdefgh", "ijklmnop"])
    first.release()
    run.perform(run.core.follow_up())
    run.perform(run.core.follow_up())
    run.perform(run.core.complete(()))
    assert follow_up(run) < 40
    second.release()
    follow_up(run)
