"""How far a prompt matches: validity per component, on either tier, after every kind of loss."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.cache import Match
from tests.simulated.synchronous import SynchronousRuntime, core_config, spell


def runtime(components: str = "full", **options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, **options))


def off_device(run: SynchronousRuntime, pages: int | None = None) -> None:
    """Save everything, then push it off the device by a request that needs it all."""
    run.flush()
    shelf = run.config.components[0].device
    states = next((c.device for c in run.config.components if c.kind == 2), 0)
    big = run.lease(b"", new=(pages or shelf) * run.page, states=states)
    assert big is not None
    big.release()


def test_an_empty_tree_matches_nothing() -> None:
    run = runtime("full,swa,mamba")
    assert run.match(spell("abc")) == Match()
    assert not run.match(b"").needs_load_back


@pytest.mark.parametrize(
    ("prompt", "pages"), [("abcdef", 6), ("abcdefgh", 6), ("abc", 3), ("abX", 2), ("X", 0), ("", 0), ("bcd", 0)]
)
def test_full_matches_whole_pages_from_the_root(prompt: str, pages: int) -> None:
    run = runtime()
    run.insert("abcdef")
    assert run.reach(prompt) == (pages, pages)


def test_a_match_ends_at_a_page_not_at_a_token() -> None:
    run = runtime()
    run.insert("abc")
    assert run.match(spell("ab") + spell("c")[:12]).device == 8
    assert run.match(spell("ab") + spell("c")[:12] + spell("X")).device == 8


def test_namespaces_do_not_meet() -> None:
    run = runtime()
    run.insert("abc", space=b"one".ljust(32))
    assert run.reach("abc", b"two".ljust(32)) == (0, 0)
    assert run.reach("abc", b"one".ljust(32)) == (3, 3)


def test_a_match_changes_nothing() -> None:
    run = runtime("full,swa,mamba")
    run.insert("abcdef", checkpoint=6)
    before = run.core.statistics()
    run.match(spell("abX"))
    assert run.core.statistics() == before


def test_what_left_the_device_matches_on_the_host() -> None:
    run = runtime(device=8, host=64)
    run.insert("abcdef")
    off_device(run)
    found = run.match(spell("abcdefgh"))
    assert found == Match(0, 24, 24, 24, 0, 0)
    assert found.needs_load_back


def test_part_of_the_path_off_the_device() -> None:
    run = runtime(device=8, host=64)
    run.insert("abcd")
    run.insert("abcdefgh")
    run.flush()
    big = run.lease(spell("wxyz"))
    assert big is not None
    found = run.match(spell("abcdefgh"))
    assert (found.device, found.host, found.full, found.host_hit_length) == (16, 32, 32, 16)


# SWA


def test_swa_needs_an_unbroken_window_before_the_end() -> None:
    run = runtime("full,swa", window=8)
    run.insert("abcdefgh")
    assert run.reach("abcdefgh") == (8, 8)
    assert run.reach("abcdefX") == (6, 6)


def test_a_prefix_shorter_than_the_window_needs_all_of_itself() -> None:
    run = runtime("full,swa", window=400)
    run.insert("abc")
    assert run.reach("abc") == (3, 3)
    assert run.reach("abX") == (2, 2)


def tombstoned(window: int = 8, text: str = "abcdefgh", **options: Any) -> SynchronousRuntime:
    """A path whose leaf's head lost its SWA: the request decoded on and let go of what left the window."""
    run = runtime("full,swa", window=window, host=0, **options)
    request = run.lease(spell(text))
    assert request is not None
    half = len(text) // 2 * run.page
    request.compute(half)
    request.advance(len(text) * run.page)
    request.compute(len(text) * run.page)
    assert request.commit()
    request.release()
    return run


def test_a_match_cannot_end_where_the_window_has_a_hole() -> None:
    run = tombstoned(window=4)
    found = run.match(spell("abcdefgh"))
    assert found.device == 32
    assert run.match(spell("abcX")).device == 0
    assert run.match(spell("abcX")).full == 12


def test_full_says_how_far_full_alone_matched() -> None:
    run = runtime("full,mamba")
    run.insert("abcdefgh", checkpoint=4)
    found = run.match(spell("abcdefgh"))
    assert (found.device, found.host, found.full) == (16, 16, 32)


# MAMBA


def test_mamba_matches_only_where_a_checkpoint_is() -> None:
    run = runtime("full,mamba")
    run.insert("abcdefgh", checkpoint=5)
    assert run.reach("abcdefgh") == (5, 5)
    assert run.reach("abcdeX") == (5, 5)
    assert run.reach("abcd") == (0, 0)


def test_a_split_leaves_the_checkpoint_with_the_suffix() -> None:
    run = runtime("full,mamba")
    run.insert("abcdefgh", checkpoint=8)
    run.insert("abcdX")
    assert run.reach("abcdX") == (0, 0)
    assert run.reach("abcdefgh") == (8, 8)


def test_a_checkpoint_at_the_fork_makes_a_shared_prompt_hit() -> None:
    run = runtime("full,mamba")
    run.insert("abcdefgh", checkpoint=8)
    fork = run.match(spell("abcdXYZ")).full // run.page
    assert fork == 4
    run.insert("abcdXYZ", checkpoint=fork)
    assert run.reach("abcdQ") == (4, 4)


def test_swa_and_mamba_must_agree_on_the_end() -> None:
    run = runtime("full,swa,mamba", window=8)
    run.insert("abcdefgh", checkpoint=6)
    assert run.reach("abcdefgh") == (6, 6)
    run.insert("abcdefgh", checkpoint=8)
    assert run.reach("abcdefgh") == (8, 8)
    assert run.reach("abcdefgX") == (6, 6)


@pytest.mark.parametrize("components", ["full,swa", "full,mamba", "full,swa,mamba"])
def test_hit_lengths_say_what_a_load_would_bring(components: str) -> None:
    run = runtime(components, device=16, host=64, window=8)
    run.insert("abcdefgh", checkpoint=8 if "mamba" in components else 0)
    off_device(run)
    found = run.match(spell("abcdefgh"))
    assert (found.device, found.host, found.host_hit_length) == (0, 32, 32)
    assert found.swa_host_hit_length == (8 if "swa" in components else 0)
    assert found.mamba_host_hit_length == ("mamba" in components)


def test_mamba_alone_off_the_device_needs_a_load_back() -> None:
    run = runtime("full,mamba", states=4)
    run.insert("abcd", checkpoint=4)
    run.insert("abcdefgh")
    run.flush()
    big = run.lease(spell("z"), states=4)
    assert big is not None
    big.release()
    found = run.match(spell("abcdefgh"))
    assert found == Match(0, 16, 32, 0, 0, 1)
    assert found.needs_load_back


def test_pages_on_their_way_to_the_device_match_there() -> None:
    run = runtime(device=8, host=64)
    run.insert("abcdef")
    off_device(run)
    loading = run.lease(spell("abcdefgh"))
    assert loading is not None
    assert not loading.ready
    assert run.reach("abcdef") == (6, 6)
    run.settle()
    assert loading.ready
    assert run.reach("abcdef") == (6, 6)
