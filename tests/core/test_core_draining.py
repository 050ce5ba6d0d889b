"""Draining ends: nodes that the host could never hold cost no copies, and draining saves nothing twice."""

from __future__ import annotations

from random import Random

import pytest

from asynccache.core.cache import Skip, Unsaved
from asynccache.core.plan import BackupStorage, More
from tests.simulated.fetching import open_fetch
from tests.simulated.synchronous import SPACE, SynchronousRuntime, _stored, core_config, spell


def pages_with_a_tail_that_no_host_holds(run: SynchronousRuntime) -> None:
    """Two paths as long as the host is large, both in storage, each with a page more on the device alone."""
    for text in ("abc", "xyz"):
        run.insert(text)
        run.settle()
        run.insert(text + "!")
        run.settle()


def test_paths_that_the_host_could_never_hold_do_not_take_turns_on_it() -> None:
    run = SynchronousRuntime(core_config(host=3))
    pages_with_a_tail_that_no_host_holds(run)
    run.flush()
    assert run.unsaved() == (2, 0)
    assert run.reach("abc!") == run.reach("xyz!") == (4, 4)
    run.audit(idle=True)


@pytest.mark.parametrize("components", ["full,swa", "full,mamba", "full,swa,mamba"])
def test_auxiliary_pages_below_them_change_nothing(components: str) -> None:
    run = SynchronousRuntime(core_config(components, host=3, window=64))
    pages_with_a_tail_that_no_host_holds(run)
    run.insert("abc!", checkpoint=4 if "mamba" in components else 0)
    run.flush()
    assert run.unsaved() == (2, 0)
    run.audit(idle=True)


def test_what_the_host_can_hold_by_turns_is_all_saved() -> None:
    run = SynchronousRuntime(core_config(host=4))
    for text in ("abcd", "abce", "stuv", "stux"):
        run.insert(text)
    run.flush()
    assert run.unsaved() == (0, 0)
    run.audit(idle=True)


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
    run.audit(idle=True)


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
    run.audit(idle=True)


def test_pages_that_storage_has_are_not_unsaved() -> None:
    run = SynchronousRuntime(core_config(device=32, host=4))
    run.insert("abcd")
    run.insert("wxyz")
    run.flush()
    assert run.unsaved() == (0, 0)


@pytest.mark.slow(1)
def test_a_drain_of_a_large_tree_comes_in_slices() -> None:
    run = SynchronousRuntime(core_config(
        device=512, host=512, write_policy="write_back", write_back_watermark=0.0, slice_steps=16,
    ))  # fmt: skip
    for number in range(60):
        run.insert(chr(ord("a") + number % 26) + chr(ord("a") + number // 26))
    slices, walk = 0, run.core.walk()
    while isinstance(answer := run.core.drain(walk), More):
        run.perform(answer.plan)
        slices += 1
    run.perform(answer)
    assert slices > 1
    run.flush()
    assert run.unsaved() == (0, 0)


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
    run.audit(idle=True)


def test_nor_do_a_few_such_pages_that_are_the_coldest_of_the_host() -> None:
    run = SynchronousRuntime(core_config(device=16, host=6, write_policy="write_back", write_back_watermark=0.0))
    for text in "abcd":
        run.insert(text)
    refused = {page for text in "abcd" for page in run.chain(SPACE, spell(text))}
    assert drain_with(run, refused) == (0, 4)
    for text in "efghijklm":
        run.insert(text)
    assert drain_with(run, refused) == (0, 4)
    run.audit(idle=True)
