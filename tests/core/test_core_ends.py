"""What is given back: at the end of a conversation, by draining, on the host."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from asynccache.core.cache import Skip, Unsaved
from asynccache.core.plan import BackupHost, BackupStorage, Medium, More, Publish
from tests.core.core_kit import (
    COMPONENTS,
    forget,
    granted,
    insert,
    leased,
    opened,
    resized,
    runtime,
    saved,
    take,
    whole,
    with_store_of,
    written,
)
from tests.simulated.fetching import open_fetch
from tests.simulated.synchronous import MAMBA, SPACE, SWA, Running, SynchronousRuntime, _stored, core_config, spell

# Eviction after the end of a conversation: its private pages go first; pages that others have as well do not.


CONVERSATIONS: dict[str, tuple[str, str, int | None, str, list[int], dict[str, int]]] = {
    "what is shared stays, though nobody else has asked for it yet": (
        "mnop", "abcdefgh", 4, "", [8], {"mnop": 4, "abcdX": 4}),
    "what is shared is cut off also where the prompt is a hit": (
        "mnop abcdefgh", "abcdefghij", 4, "", [8], {"mnop": 4, "abcdX": 4}),
    "what is private goes also where it forks": ("abcdef mnop", "abcdgh", 2, "", [10], {"mnop": 4, "abX": 2}),
    "where nobody says so, it ends at the last fork": (
        "abcdef mnop", "abcdgh", None, "", [6], {"abcdef": 6, "mnop": 4, "abcdgh": 4}),
    "who uses an ended node keeps it": ("mnop", "abcdef", None, "abcdgh", [4, 8], {"mnop": 0, "abcdX": 4}),
}  # fmt: skip
"""What was there before, the text of a conversation, how many pages of it others are said to have, what comes after its
end, what is taken then, and what is left."""


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_of_a_conversation_that_is_over_what_is_private_goes_first(case: str) -> None:
    before, text, shared, after, taken, left = CONVERSATIONS[case]
    run = runtime(device=16, host=0)
    insert(run, *before.split())
    request = leased(run, text, **({} if shared is None else {"shared": shared * run.page}))
    request.compute(len(text) * run.page)
    assert request.commit()
    request.release(ended=True)
    insert(run, *after.split())
    for pages in taken:
        take(run, pages).release()
    assert {one: run.reach(one)[0] for one in left} == left


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
        whole(run, "abc!")
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
        whole(run, text)
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


def test_a_prefetch_that_gives_pages_back_starts_the_backups_that_were_put_off() -> None:
    run = with_store_of(core_config(host=4), "abcd")
    fetch = opened(run, "abcd")
    assert fetch.take_full(4) == 4
    run.insert("xy")
    assert (run.in_flight(BackupHost), run.core.statistics().deferred_backups) == ([], 1)
    fetch.release()
    assert run.in_flight(BackupHost), "the pages are free, and nobody tried again"
    assert run.core.statistics().deferred_backups == 0


def test_what_the_end_of_a_prefetch_removes_is_said_in_its_own_plan() -> None:
    run = with_store_of(core_config(), "abcd")
    saved(run, "ab")
    fetch = opened(run, "abcd")
    fetch.take_full(2)
    forget(run, SPACE)
    plan = fetch.commit(16)
    gone = [effect for effect in plan.effects if isinstance(effect, Publish) and effect.medium is Medium.CPU]
    assert [effect.stored for effect in gone] == [False]
    assert run.core.complete(()).effects == ()


def test_what_can_never_fit_the_host_is_not_put_off_again_and_again() -> None:
    run = SynchronousRuntime(resized(core_config("full,mamba"), MAMBA, host=0))
    request = written(run, "abcd")
    run.settle()
    assert request.commit(checkpoint=16)
    assert run.core.statistics().deferred_backups == 0, "the host has no room for states, now or ever"


@pytest.mark.parametrize("text", ["abcde", "abcdefghijklmno"])
def test_of_what_fits_the_host_only_in_parts_the_window_is_saved(text: str) -> None:
    run = SynchronousRuntime(resized(core_config("full,swa", window=12), SWA, host=3))
    saved(run, text)
    assert run.core.statistics().host[SWA].free == 0, "a window has three pages, and so many the host holds"
    take(run, 64).release()
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
    take(run, 64).release()
    assert run.reach("abcdefgh") == (0, 3)


def test_a_release_of_what_is_forgotten_looks_at_its_own_path_alone() -> None:
    run = SynchronousRuntime(core_config(device=256, host=0))
    holders = [written(run, chr(i)) for i in range(200)]
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
    for text in texts:
        insert(run, *(text[:end] for end in range(1, len(text) + 1)))
    held = [granted(run, text, limit=len(text) * run.page) for text in texts]
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
