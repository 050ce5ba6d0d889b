"""Draining ends: what the host could never hold costs no copies, and nothing is saved twice for its sake."""

from __future__ import annotations

import pytest

from asynccache.core import transfers
from asynccache.core.cache import Skip
from asynccache.core.plan import More
from tests.simulated.fetching import open_fetch
from tests.simulated.synchronous import SynchronousRuntime, core_config, spell


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
def test_a_drain_of_a_large_tree_comes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_SLICE", 16)        # fewer than there are nodes
    run = SynchronousRuntime(core_config(device=512, host=512, write_policy="write_back", write_back_watermark=0.0))
    for number in range(60):
        run.insert(chr(ord("a") + number % 26) + chr(ord("a") + number // 26))
    slices = 0
    while isinstance(answer := run.core.drain(), More):
        run.perform(answer.plan)
        slices += 1
    run.perform(answer)
    assert slices > 1
    run.flush()
    assert run.unsaved() == (0, 0)
