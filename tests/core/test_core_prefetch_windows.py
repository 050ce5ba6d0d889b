"""Prefetch where the host is short of SWA pages alone: windows that lie partly in an anchor whose own part is gone,
stays, or comes back while the fetch is under way. All or nothing each time, and no page leaks."""

from __future__ import annotations

import dataclasses

import pytest

from asynccache.core.settings import CoreConfig
from tests.simulated.fetching import MISS, Fetch, open_fetch
from tests.simulated.synchronous import FULL, SPACE, SWA, SynchronousRuntime, core_config, spell

TEXT = "abcdef"
OTHERS = ("mnop", "qrst", "uvwx", "MNOP", "QRST", "UVWX")


def narrow(device: int = 16, swa: int = 8, window: int = 16) -> CoreConfig:
    """Host room for ``swa`` SWA pages, and for any number of FULL's."""
    config = core_config("full,swa", device=device, host=64, window=window)
    return dataclasses.replace(
        config, components=tuple(dataclasses.replace(c, host=swa) if c.kind == SWA else c for c in config.components)
    )


def stored(**options: int) -> SynchronousRuntime:
    """A fresh process whose store has every page of TEXT."""
    first = SynchronousRuntime(core_config("full,swa", window=options.get("window", 16)))
    first.insert(TEXT)
    first.flush()
    return SynchronousRuntime(narrow(**options), storage=first.storage)


def lose(run: SynchronousRuntime, pages: tuple[int, ...]) -> None:
    """The store does not have SWA of these pages of TEXT any more."""
    chain = run.chain(SPACE, spell(TEXT))
    for page in pages:
        del run.storage[SWA, chain[page]]


def insert(run: SynchronousRuntime, *texts: str) -> None:
    for text in texts:
        run.insert(text)
        run.settle()


def clear_device(run: SynchronousRuntime) -> None:
    """A request takes every page of the device for a moment."""
    for _ in range(100):
        request = run.lease(b"", new=16 * run.page)
        if request is not None:
            request.release()
            return
        run.settle()
    raise AssertionError("the device is never free")


def push_out(run: SynchronousRuntime) -> None:
    """Others take all of SWA's host pages; then the device is cleared. A leaf would go whole: what has been continued
    keeps FULL, as its continuation goes first."""
    for other in OTHERS:
        insert(run, other)
        clear_device(run)
    run.settle()


def opened(run: SynchronousRuntime, text: str = TEXT) -> Fetch:
    fetch = open_fetch(run, spell(text))
    assert isinstance(fetch, Fetch), fetch
    return fetch


def host(run: SynchronousRuntime) -> list[tuple[int, int]]:
    """(free, evictable) pages of FULL and SWA."""
    return [(shelf.free, shelf.evictable) for shelf in run.core.statistics().host]


def assert_read_back(run: SynchronousRuntime, text: str) -> None:
    """A request that hits all of it, every byte right, and nothing is left behind it."""
    request = run.lease(spell(text + "!"))
    assert request is not None
    assert request.lease.cached == len(text) * run.page
    run.settle()
    assert request.ready
    request.verify()
    request.release()
    assert_nothing_leaked(run)


def assert_nothing_leaked(run: SynchronousRuntime) -> None:
    run.settle()
    run.audit(idle=True)
    for shelf in (*run.core.statistics().host, *run.core.statistics().device):
        assert shelf.free + shelf.evictable == shelf.capacity


@pytest.mark.parametrize(
    ("missing", "end"),
    [((), 6), ((0, 1), 6), ((5,), 5), ((4,), 4), ((0, 5), 5), ((3,), 3), ((2,), 2), ((0, 4), 0), ((1, 5), 1),
     ((1, 3), 1)],
)  # fmt: skip
def test_an_anchors_part_that_was_evicted_is_fetched_for_the_longest_end_that_storage_has(
    missing: tuple[int, ...], end: int
) -> None:
    """Also for one before the anchor: of FULL nothing is read then."""
    run = stored()
    insert(run, "abcd", "abcdPQRST")
    push_out(run)
    assert run.reach("abcd") == (0, 0), "its SWA is gone on both tiers"
    lose(run, missing)
    if end:
        fetch = opened(run)
        assert (fetch.shape.anchor, fetch.shape.swa) == (4 * min(4, end), ()), "its FULL is not"
        assert fetch.finish() == end * 4
        assert run.reach(TEXT) == (0, end)
        assert_read_back(run, TEXT[:end])
    else:
        assert open_fetch(run, spell(TEXT)) == MISS
    assert_nothing_leaked(run)


def test_an_anchors_part_stays_while_the_fetch_runs_however_short_the_host_is() -> None:
    run = stored()
    insert(run, "abcd")
    lose(run, (0, 1, 2, 3))
    fetch = opened(run)
    assert (fetch.shape.anchor, fetch.shape.swa) == (16, ((0, 16),))
    fetch.take_full(2)
    insert(run, *OTHERS[:4])
    assert run.reach("abcd") == (0, 4), "on the device it is gone, and without the pin it were on the host, too"
    assert run.lease(b"", new=16 * run.page) is None, "only the fetch can make room for the backups it waits for"
    assert fetch.take_aux(24)
    fetch.commit(24, holders=[1])
    run.settle()
    assert run.reach(TEXT) == (0, 6)
    run.perform(run.core.release_claim(1))
    assert_nothing_leaked(run)


def test_an_anchors_part_goes_once_the_fetch_was_released() -> None:
    run = stored()
    insert(run, "abcd")
    lose(run, (0, 1, 2, 3))
    fetch = opened(run)
    fetch.take_full(2)
    fetch.release()
    push_out(run)
    assert run.reach("abcd") == (0, 0)
    assert_nothing_leaked(run)


def tombstone() -> tuple[SynchronousRuntime, Fetch]:
    """All of FULL is on the host and none of SWA; a fetch brings the window."""
    run = stored(window=8)
    insert(run, TEXT, TEXT + "PQRST")
    push_out(run)
    assert run.reach(TEXT) == (0, 0)
    fetch = opened(run)
    assert fetch.shape.anchor == len(TEXT) * 4
    assert fetch.usable() == len(TEXT) * 4
    assert fetch.take_aux(24)
    return run, fetch


def test_a_host_tombstone_is_filled() -> None:
    run, fetch = tombstone()
    fetch.commit(24)
    assert run.reach(TEXT) == (0, 6)
    assert_read_back(run, TEXT)


@pytest.mark.parametrize("settled", [True, False], ids=["after its backup", "before its backup"])
def test_a_tombstone_that_was_refilled_meanwhile_keeps_what_it_has(settled: bool) -> None:
    run, fetch = tombstone()
    run.insert(TEXT)
    if settled:
        run.settle()
    fetch.commit(24)
    assert run.reach(TEXT) == (6, 6)
    assert_nothing_leaked(run)
    assert_read_back(run, TEXT)


def test_a_tombstone_that_was_split_meanwhile_is_filled_in_every_part() -> None:
    run, fetch = tombstone()
    insert(run, "abcdeX")
    fetch.commit(24)
    assert run.reach(TEXT)[1] == 6
    assert_read_back(run, TEXT)


def test_a_window_that_does_not_fit_on_the_host_is_not_taken_in_part() -> None:
    run = stored(swa=3, window=16)
    before = host(run)
    fetch = opened(run)
    fetch.take_full(6)
    assert not fetch.take_aux(24)
    fetch.release()
    assert host(run) == before
    assert run.reach(TEXT) == (0, 0)
    assert all((FULL, digest) in run.storage for digest in run.chain(SPACE, spell(TEXT)))
    assert_nothing_leaked(run)


def test_of_a_window_that_is_there_in_part_only_the_rest_is_fetched() -> None:
    """Also where what is gone lies between what is there and the anchor, and storage has no more than what is gone."""
    run = stored()
    insert(run, "abcd", TEXT)
    world = run.core.world
    node = next(iter(world.roots[SPACE].children.values()))  # type: ignore[union-attr]
    (last,) = node.children.values()  # type: ignore[union-attr]
    for place in (SWA, SWA + world.count):
        world.vacate(last, place)
    lose(run, (0, 1, 2, 3))
    fetch = opened(run)
    assert (fetch.shape.anchor, fetch.shape.swa) == (24, ((0, 16),))
    assert fetch.finish() == 24
    assert_read_back(run, TEXT)
