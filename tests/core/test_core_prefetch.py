"""Prefetch: which pages storage must have, which are adopted, which are claimed, which are given back."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest

from asynccache.core.cache import Begin, Grant, PrefetchShape, Skip, needed_pages, usable_end
from asynccache.core.plan import BackupHost, BackupStorage, Wait
from tests.core.core_kit import COMPONENTS, clear_device, granted, opened, resized, runtime, saved, take, with_store_of
from tests.simulated.fetching import MISS, Fetch, open_fetch
from tests.simulated.synchronous import FULL, MAMBA, SPACE, SWA, Running, SynchronousRuntime, core_config, spell

# Prefetch: which pages storage must have, which are adopted, which are given back; SWA and MAMBA all or nothing; no
# page leaks.


TEXT = "abcdefgh"


def stored(text: str = TEXT, components: str = "full", **options: Any) -> SynchronousRuntime:
    """A fresh process whose store has ``text``."""
    return with_store_of(core_config(components, **options), text)


def host_free(run: SynchronousRuntime) -> list[int]:
    return [shelf.free for shelf in run.core.statistics().host]


def read_back(run: SynchronousRuntime, text: str, pages: int) -> Running:
    """A request that must hit so many pages; their bytes are verified on the device."""
    request = granted(run, text + "!")
    assert request.lease.cached == pages * run.page
    run.settle()
    assert request.ready
    request.verify()
    return request


# arithmetic

SHAPE = PrefetchShape(page_size=4, anchor=0, covered=0, length=32, window=8, swa=(), mamba=True)


@pytest.mark.parametrize(
    ("shape", "component", "end", "pages"),
    [
        (SHAPE, FULL, 32, range(8)),
        (SHAPE._replace(anchor=12), FULL, 32, range(3, 8)),
        (SHAPE, SWA, 32, (6, 7)),
        (SHAPE, SWA, 4, (0,)),
        (SHAPE._replace(window=400), SWA, 32, range(8)),
        (SHAPE._replace(window=9), SWA, 32, (5, 6, 7)),
        (SHAPE._replace(anchor=16, swa=((8, 16),)), SWA, 20, (4,)),
        (SHAPE._replace(anchor=16), SWA, 20, (3, 4)),
        (SHAPE._replace(anchor=16, swa=((12, 16),), window=12), SWA, 20, (2, 4)),
        (SHAPE._replace(anchor=24, swa=((4, 8), (12, 16)), window=16), SWA, 20, (2, 4)),
        (SHAPE._replace(anchor=24, swa=((4, 8), (12, 16)), window=16), SWA, 12, (0, 2)),
        (SHAPE._replace(anchor=24, swa=((4, 24),), window=8), SWA, 16, ()),
        (SHAPE, MAMBA, 32, (7,)),
        (SHAPE._replace(mamba=False), MAMBA, 32, ()),
    ],
)
def test_needed_pages(shape: PrefetchShape, component: int, end: int, pages: Any) -> None:
    assert tuple(needed_pages(shape, component, end)) == tuple(pages)


@pytest.mark.parametrize("seed", range(40))
def test_usable_end_is_what_one_finds_who_tries_every_end(seed: int) -> None:
    random = Random(seed)
    pools = [("full", FULL), ("sidecar", FULL), ("swa", SWA), ("swa too", SWA), ("mamba", MAMBA)]
    for _ in range(40):
        pages, size = random.randint(1, 24), random.choice((1, 4))
        covered = random.randint(0, pages - 1)
        anchor = random.randint(covered, pages - 1)
        cuts = sorted(random.sample(range(anchor + 1), min(anchor + 1, random.choice((0, 2, 4)))))
        swa = tuple((start * size, stop * size) for start, stop in zip(cuts[::2], cuts[1::2], strict=False))
        window = random.choice((0, 1, 3 * size, 8 * size, 99 * size))
        mamba = random.random() < 0.5
        shape = PrefetchShape(size, anchor * size, covered * size, pages * size, window, swa, mamba)
        share = random.choice((0.5, 0.9, 0.97))
        present = {name: [random.random() < share for _ in range(pages)] for name, _ in pools}
        limit = random.randint(0, pages * size)
        ends = [
            end * size for end in range(covered + 1, limit // size + 1)
            if all(present[name][page] for name, kind in pools for page in needed_pages(shape, kind, end * size))
        ]  # fmt: skip
        assert usable_end(shape, pools, present, limit) == max(ends, default=covered * size)


@pytest.mark.source
def test_usable_end_takes_no_more_steps_for_a_million_tokens_than_for_a_thousand() -> None:
    """However the windows and states lie: here no end has both."""

    def steps(pages: int) -> int:
        shape = PrefetchShape(16, 0, 0, 16 * pages, 64, (), True)
        windows, states = b"\0\1\1\1\1" * (pages // 5), b"\1\1\1\1\0" * (pages // 5)
        present = {"full": b"\1" * pages, "swa": windows, "mamba": states}
        count = 0

        def line(frame: object, event: str, _: object) -> Any:
            nonlocal count
            count += event == "line"
            return line

        sys.settrace(line)
        try:
            end = usable_end(shape, [("full", FULL), ("swa", SWA), ("mamba", MAMBA)], present, 16 * pages)
        finally:
            sys.settrace(None)
        assert end == 0
        return count

    assert steps(65_535) <= steps(1_000) + 8 < 100


# the way back


FETCHED: dict[str, tuple[str, dict[str, int], int | None, tuple[int, ...], set[tuple[int, int]], int, list[int]]] = {
    "pages": ("full", {}, None, (), set(), 8, [8]),
    "windows": ("full,swa", {}, None, (), set(), 8, [8, 3]),
    "states": ("full,mamba", {}, None, (), set(), 8, [8, 1]),
    "all of it": ("full,swa,mamba", {}, None, (), set(), 8, [8, 3, 1]),
    "a page that cannot be read": ("full", {}, None, (), {(FULL, 5)}, 5, [5]),
    "a host that is short": ("full", {"host": 5}, None, (), set(), 5, [5]),
    "no more than a window": ("full,swa", {}, None, (0, 1, 2, 3, 4), set(), 8, [8, 3]),
    "a page of the window that cannot be read": ("full,swa", {}, None, (), {(SWA, 6)}, 6, [6, 3]),
    "the last state": ("full,mamba", {}, 5, (), set(), 5, [5, 1]),
}  # fmt: skip
"""Components and options; where the state is that storage has, which pages of SWA it has lost, which pages it does not
give; how many pages come back, and the slots that they take on the host."""


@pytest.mark.parametrize("case", FETCHED)
def test_a_fresh_process_reads_back_what_is_whole(case: str) -> None:
    components, options, checkpoint, missing, unreadable, pages, taken = FETCHED[case]
    run = with_store_of(core_config(components, **({"window": 12} | options)), TEXT, checkpoint=checkpoint)
    lose(run, missing)
    before = host_free(run)
    assert opened(run, unreadable=unreadable).finish() == pages * run.page
    assert [had - left for had, left in zip(before, host_free(run), strict=True)] == taken
    assert run.reach(TEXT) == (0, pages)
    read_back(run, TEXT, pages).release()


def test_what_came_from_storage_is_not_written_there_again() -> None:
    run = stored("abcdefgh", "full,swa,mamba")
    opened(run).finish()
    run.flush()
    assert run.in_flight() == []
    assert [type(e).__name__ for e in run.log if type(e).__name__ == "BackupStorage"] == []


def test_it_is_skipped_below_the_threshold() -> None:
    run = stored(prefetch_threshold=33)
    assert isinstance(open_fetch(run, spell(TEXT)), Skip)


def test_above_the_quota_it_goes_later_or_when_it_has_waited_long_enough() -> None:
    run = with_store_of(core_config(max_prefetch_pages=10), TEXT, "stuvwxyz")
    first = opened(run)
    for begin in (Begin.LATER, Begin.NEXT):
        assert isinstance(open_fetch(run, spell("stuvwxyz"), begin=begin), Wait)
    opened(run, "stuvwxyz", begin=Begin.NOW).release()
    first.finish()
    assert opened(run, "stuvwxyz").finish() == 32


def test_one_is_asked_about_before_it_takes_or_begins_anything() -> None:
    """Also where its anchor is on the device alone: no backup of the anchor is made for a prefetch of nothing."""
    run = stored(write_policy="write_back")
    run.insert("abcdX")
    before = host_free(run), run.core.statistics()
    shape = run.core.prefetch_look(SPACE, spell(TEXT))
    assert isinstance(shape, PrefetchShape)
    assert (shape.anchor, shape.covered, shape.length) == (16, 16, 32)
    assert (host_free(run), run.core.statistics()) == before
    assert run.core.prefetch_look(b"another namespace" * 2, spell(TEXT)) == shape._replace(anchor=0, covered=0)
    assert b"another namespace" * 2 not in run.core.world.roots


# the anchor


def test_the_anchors_backup_goes_first() -> None:
    run = stored()
    run.insert("abcd")
    answer = open_fetch(run, spell(TEXT))
    assert isinstance(answer, Wait)
    assert set(answer.ops) == set(run.in_flight(BackupHost))
    run.settle()
    assert opened(run).finish() == 32


def test_the_anchor_is_pinned() -> None:
    run = stored(device=8, host=12)
    saved(run, "abcd")
    fetch = opened(run)
    fetch.take_full(4)
    saved(run, "stuvwxyz")
    assert run.reach("abcd")[1] == 4
    fetch.commit(32, holders=[1])
    assert run.reach(TEXT)[1] == 8


# the tree moved meanwhile


def test_nodes_without_host_data_adopt_ours() -> None:
    run = stored(write_policy="write_back")
    fetch = opened(run)
    fetch.take_full(8)
    run.insert("abcdX")
    assert run.in_flight() == []
    fetch.commit(32)
    run.audit()
    assert run.reach(TEXT) == (4, 8)
    read_back(run, TEXT, 8).release()


def test_a_commit_waits_for_backups_on_its_way() -> None:
    run = stored()
    fetch = opened(run)
    fetch.take_full(8)
    run.insert("abcd")
    answer = run.core.prefetch_commit(fetch.op, 32, b"".join(fetch.chain))
    assert isinstance(answer, Wait)
    assert set(answer.ops) == set(run.in_flight(BackupHost))
    run.perform(answer.plan)
    run.complete(*answer.ops)
    fetch.commit(32)


# SWA: the whole window or nothing


def lose(run: SynchronousRuntime, pages: tuple[int, ...]) -> None:
    """The store does not have SWA of these pages of TEXT any more."""
    chain = run.chain(SPACE, spell(TEXT))
    for page in pages:
        del run.storage[SWA, chain[page]]


def test_a_fetch_that_hangs_keeps_no_page_of_the_device_from_a_lease() -> None:
    """Also where a part of the window that it would complete is on the device alone."""
    run = stored(components="full,swa", window=16)
    saved(run, "abcd")
    (node,) = run.core.world.roots[SPACE].children.values()  # type: ignore[union-attr]
    run.core.world.vacate(node, SWA + run.core.world.count)
    hung = opened(run, "abcdef")
    assert hung.shape.swa == ((0, 16),)
    take(run, 64).release()
    hung.finish()


def test_a_fetch_that_hangs_keeps_no_lease_from_going_without_its_match() -> None:
    run = stored("mnop", "full,mamba", states=3)
    run.insert("ab", checkpoint=2)
    run.settle()
    opened(run, "mnop")
    request = granted(run, "abc", states=3)  # its match's state is one of the three
    assert request.lease.cached == 0


# MAMBA


def test_the_host_short_of_states_takes_none() -> None:
    run = stored(components="full,mamba")
    run = SynchronousRuntime(resized(run.config, MAMBA, host=1), storage=run.storage)
    run.insert("xyz", checkpoint=3)
    run.complete(*run.in_flight(BackupHost))
    fetch = opened(run, begin=Begin.NOW)
    fetch.take_full(8)
    assert not fetch.take_aux(32)


# Prefetch where the host is short of SWA pages alone: windows that lie partly in an anchor whose own part is gone,
# stays, or comes back while the fetch is under way. All or nothing each time, and no page leaks.


SIX = "abcdef"
OTHERS = ("mnop", "qrst", "uvwx", "MNOP", "QRST", "UVWX")


def stored_narrow(swa: int = 8, window: int = 16) -> SynchronousRuntime:
    """A fresh process whose store has every page of SIX; host room for ``swa`` SWA pages, and for any number of
    FULL's."""
    return with_store_of(resized(core_config("full,swa", device=16, window=window), SWA, host=swa), SIX)


def push_out(run: SynchronousRuntime) -> None:
    """Others take all of SWA's host pages; then the device is cleared. A leaf would go whole: what has been continued
    keeps FULL, as its continuation goes first."""
    for other in OTHERS:
        run.insert(other)
        clear_device(run)


@pytest.mark.parametrize(
    ("missing", "end"),
    [((), 6), ((0, 1), 6), ((5,), 5), ((4,), 4), ((0, 5), 5), ((3,), 3), ((2,), 2), ((0, 4), 0), ((1, 5), 1),
     ((1, 3), 1)],
)  # fmt: skip
def test_an_anchors_part_that_was_evicted_is_fetched_for_the_longest_end_that_storage_has(
    missing: tuple[int, ...], end: int
) -> None:
    """Also for one before the anchor: of FULL nothing is read then."""
    run = stored_narrow()
    saved(run, "abcd", "abcdPQRST")
    push_out(run)
    assert run.reach("abcd") == (0, 0), "its SWA is gone on both tiers"
    lose(run, missing)
    if end:
        fetch = opened(run, SIX)
        assert (fetch.shape.anchor, fetch.shape.swa) == (4 * min(4, end), ()), "its FULL is not"
        assert fetch.finish() == end * 4
        assert run.reach(SIX) == (0, end)
        read_back(run, SIX[:end], end)
    else:
        assert open_fetch(run, spell(SIX)) == MISS


def test_an_anchors_part_stays_while_the_fetch_runs_however_short_the_host_is() -> None:
    run = stored_narrow()
    saved(run, "abcd")
    lose(run, (0, 1, 2, 3))
    fetch = opened(run, SIX)
    assert (fetch.shape.anchor, fetch.shape.swa) == (16, ((0, 16),))
    fetch.take_full(2)
    saved(run, *OTHERS[:4])
    assert run.reach("abcd") == (0, 4), "on the device it is gone, and without the pin it were on the host, too"
    assert run.lease(b"", new=16 * run.page) is None, "only the fetch can make room for the backups it waits for"
    assert fetch.take_aux(24)
    fetch.commit(24, holders=[1])
    run.settle()
    assert run.reach(SIX) == (0, 6)


def tombstone() -> tuple[SynchronousRuntime, Fetch]:
    """All of FULL is on the host and none of SWA; a fetch brings the window."""
    run = stored_narrow(window=8)
    saved(run, SIX, SIX + "PQRST")
    push_out(run)
    assert run.reach(SIX) == (0, 0)
    fetch = opened(run, SIX)
    assert fetch.shape.anchor == len(SIX) * 4
    assert fetch.usable() == len(SIX) * 4
    assert fetch.take_aux(24)
    return run, fetch


@pytest.mark.parametrize("settled", [True, False], ids=["after its backup", "before its backup"])
def test_a_tombstone_that_was_refilled_meanwhile_keeps_what_it_has(settled: bool) -> None:
    run, fetch = tombstone()
    run.insert(SIX)
    if settled:
        run.settle()
    fetch.commit(24)
    assert run.reach(SIX) == (6, 6)
    read_back(run, SIX, 6)


def test_a_tombstone_that_was_split_meanwhile_is_filled_in_every_part() -> None:
    run, fetch = tombstone()
    saved(run, "abcdeX")
    fetch.commit(24)
    assert run.reach(SIX)[1] == 6
    read_back(run, SIX, 6)


def test_a_window_that_does_not_fit_on_the_host_is_not_taken_in_part() -> None:
    run = stored_narrow(swa=3, window=16)
    before = host_free(run)
    fetch = opened(run, SIX)
    fetch.take_full(6)
    assert not fetch.take_aux(24)
    fetch.release()
    assert host_free(run) == before
    assert run.reach(SIX) == (0, 0)
    assert all((FULL, digest) in run.storage for digest in run.chain(SPACE, spell(SIX)))


def test_of_a_window_that_is_there_in_part_only_the_rest_is_fetched() -> None:
    """Also where what is gone lies between what is there and the anchor, and storage has no more than what is gone."""
    run = stored_narrow()
    saved(run, "abcd", SIX)
    world = run.core.world
    node = next(iter(world.roots[SPACE].children.values()))  # type: ignore[union-attr]
    (last,) = node.children.values()  # type: ignore[union-attr]
    for place in (SWA, SWA + world.count):
        world.vacate(last, place)
    lose(run, (0, 1, 2, 3))
    fetch = opened(run, SIX)
    assert (fetch.shape.anchor, fetch.shape.swa) == (24, ((0, 16),))
    assert fetch.finish() == 24
    read_back(run, SIX, 6)


# Claims: the pages that a prefetch brought stay on the host until its lease is granted, and block nobody for ever.


TEXTS = ("abcd", "efgh", "ijkl", "mnop")


def stored_texts(components: str = "full", **options: Any) -> SynchronousRuntime:
    """A fresh process with this little room, whose store has every text."""
    return with_store_of(core_config(components, **options), *TEXTS)


def fetch(run: SynchronousRuntime, text: str, *holders: int, begin: Begin = Begin.NEXT) -> int:
    """Prefetch it for these; how many pages."""
    return opened(run, text, begin=begin).finish(holders=holders) // run.page


def drop(run: SynchronousRuntime, *holders: int) -> None:
    for holder in holders:
        run.perform(run.core.release_claim(holder))


@pytest.mark.parametrize("components", COMPONENTS)
def test_what_is_claimed_is_not_evicted(components: str) -> None:
    run = stored_texts(components, host=8)
    fetch(run, "abcd", 1)
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)
    assert run.reach("efgh") == (0, 0)
    drop(run, 1)
    fetch(run, "efgh")
    fetch(run, "mnop")
    assert run.reach("abcd") == (0, 0)


def test_a_claim_of_what_is_there_already_is_as_good() -> None:
    run = stored_texts(host=8)
    fetch(run, "abcd")
    run.perform(run.core.claim(1, SPACE, spell("abcdX")))
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)


def test_a_shared_page_stays_until_the_last_claim_is_dropped() -> None:
    run = stored_texts(host=8)
    fetch(run, "abcd", 1, 2)
    drop(run, 1)
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)


def test_a_prefetch_waits_for_room_that_is_claimed_and_holds_nothing() -> None:
    run = stored_texts(host=6)
    fetch(run, "abcd", 1)
    assert open_fetch(run, spell("efgh")) == Wait()
    run.audit()
    drop(run, 1)
    assert fetch(run, "efgh") == 4


def test_what_a_prefetch_may_still_take_is_promised_to_it() -> None:
    run = stored_texts(device=64, host=6)
    first = opened(run, "abcd")
    assert open_fetch(run, spell("efgh")) == Wait()
    run.insert("uvw")
    assert run.in_flight(BackupHost) == [], "a backup took the pages of a prefetch"
    assert first.finish() == 16


def test_one_that_waited_long_enough_takes_the_oldest_claims_that_no_lease_is_waiting_with() -> None:
    run = stored_texts(host=12)
    for holder, text in enumerate(TEXTS[:3]):
        fetch(run, text, holder)
    run.core.confirm_claim(0, True)
    assert fetch(run, "mnop", begin=Begin.NOW) == 4
    assert [run.reach(text)[1] for text in TEXTS] == [4, 0, 4, 4]


def test_one_that_waited_long_enough_takes_what_it_can_get() -> None:
    run = stored_texts(host=6)
    fetch(run, "abcd", 1)
    run.core.confirm_claim(1, True)
    assert fetch(run, "efgh", begin=Begin.NOW) == 2
    assert run.reach("abcd") == (0, 4)


def test_whose_turn_it_is_not_waits_although_there_is_room() -> None:
    run = stored_texts()
    assert open_fetch(run, spell("efgh"), begin=Begin.LATER) == Wait()


def test_a_lease_takes_claims_before_an_only_copy_is_lost() -> None:
    run = stored_texts(device=8, host=8)
    fetch(run, "abcd", 1)
    fetch(run, "efgh", 2)
    run.core.confirm_claim(1, True)
    run.core.confirm_claim(2, True)
    run.insert("stuvwxyz")
    assert run.in_flight() == []
    assert run.lease(spell("STUV")) is None
    assert run.in_flight(BackupHost), "the backup has no room, and the claims were kept"
    run.settle()
    granted(run, "STUV")
    assert run.core.statistics().lost_pages == 0


@pytest.mark.parametrize("fetched", [("abcd", "efgh"), ("efgh", "abcd")], ids=" ".join)
def test_the_claim_of_the_request_that_came_last_goes_first(fetched: tuple[str, str]) -> None:
    run = stored_texts(device=4, host=8)
    for text in fetched:
        fetch(run, text, 1 if text == "abcd" else 2)
    run.core.confirm_claim(1, True)
    run.core.confirm_claim(2, True)
    run.insert("stuv")
    assert run.lease(spell("STUV")) is None
    assert (run.reach("abcd")[1], run.reach("efgh")[1]) == (4, 0)


# only copies


def test_a_lease_waits_while_the_host_is_full_of_pages_on_their_way_to_storage() -> None:
    run = runtime(device=8, host=4)
    run.insert("abcd")
    run.complete(*run.in_flight(BackupHost))
    assert run.in_flight(BackupStorage)
    run.insert("efgh")
    assert run.lease(spell("stuvwxyz")) is None
    run.settle()
    granted(run, "stuvwxyz")
    assert run.core.statistics().lost_pages == 0


def test_what_storage_has_is_not_backed_up_again_at_the_cost_of_waiting() -> None:
    run = stored_texts(device=8, host=8)
    fetch(run, "abcd")
    request = granted(run, "abcd!")
    run.settle()
    request.release()
    fetch(run, "efgh", 1)
    fetch(run, "ijkl", 2)
    assert run.reach("abcd") == (4, 4), "on the device alone by now"
    granted(run, "STUVWXYZ")
    assert run.core.statistics().lost_pages == 0
    assert (run.reach("efgh")[1], run.reach("ijkl")[1]) == (4, 4)


def test_a_lease_waits_for_backups_rather_than_take_a_shorter_match() -> None:
    run = runtime(device=12, host=16, max_backup_ops=1, storage=False)
    saved(run, "abcd")
    take(run, 12).release()
    run.insert("stuv")
    run.insert("wxyz")  # its backup must wait for the one before it
    assert run.reach("abcd") == (0, 4)
    ask = run.ask(spell("abcdX"))._replace(chunk=run.page)
    answer = run.core.lease(ask)
    assert isinstance(answer, Wait), "one page is free, so it computes again what the host has"
    run.perform(answer.plan)
    run.settle()
    answer = run.core.lease(ask)
    assert isinstance(answer, Grant)
    assert answer.lease.cached == 16
    run.perform(answer.plan)
