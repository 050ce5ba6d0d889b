"""Write-through: nodes that split while their backup is in flight, backups that fail, and what is published when."""

from __future__ import annotations

import itertools

import pytest

from asynccache.core.plan import BackupHost, BackupStorage, Effect, Medium, Publish
from tests.simulated.synchronous import FULL, HASH, MAMBA, SPACE, SWA, SynchronousRuntime, core_config, spell

COMPONENTS = ["full", "full,swa", "full,mamba", "full,swa,mamba"]


def runtime(components: str = "full", **options: object) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, **options))  # type: ignore[arg-type]


def stored_events(effects: list[Effect], medium: Medium) -> list[Publish]:
    return [e for e in effects if isinstance(e, Publish) and e.medium is medium and e.stored]


def spelled(event: Publish) -> str:
    """The letters of an event's pages."""
    return "".join(chr(int.from_bytes(event.tokens[i : i + 4], "little")) for i in range(0, len(event.tokens), 16))


def since(run: SynchronousRuntime, mark: int) -> list[Effect]:
    return run.log[mark:]


def stored(run: SynchronousRuntime, text: str, component: int = FULL) -> list[bool]:
    return [(component, digest) in run.storage for digest in run.chain(SPACE, spell(text))]


def assert_root_first(run: SynchronousRuntime, events: list[Publish]) -> None:
    """Each event's parent is the page before it; ``SynchronousRuntime`` has checked the hashes."""
    ends = {b"", SPACE}
    for event in events:
        assert event.parent in ends
        ends.add(event.hashes[-HASH:])


def test_nothing_is_published_or_stored_before_the_ack() -> None:
    run = runtime()
    run.insert("abcdefgh")
    assert stored_events(run.log, Medium.CPU) == []
    assert run.in_flight() == run.in_flight(BackupHost)
    run.complete(*run.in_flight(BackupHost))
    assert [spelled(e) for e in stored_events(run.log, Medium.CPU)] == ["abcdefgh"]
    assert stored_events(run.log, Medium.STORAGE) == []
    run.complete(*run.in_flight(BackupStorage))
    assert [spelled(e) for e in stored_events(run.log, Medium.STORAGE)] == ["abcdefgh"]
    assert stored(run, "abcdefgh") == [True] * 8


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize(
    ("splitters", "fragments"),
    [
        (["abcdX"], ["abcd", "efgh"]),
        (["abcdX", "abcdefY"], ["abcd", "ef", "gh"]),
        (["abX", "abcdefY", "abcdY"], ["ab", "cd", "ef", "gh"]),
        (["abcdX", "abY", "abcdefZ"], ["ab", "cd", "ef", "gh"]),
        (["abcdefgX", "aX"], ["a", "bcdefg", "h"]),
    ],
    ids=["once", "twice", "both halves, left to right", "both halves, middle first", "both ends"],
)
def test_every_fragment_is_published_root_first_and_stored(
    components: str, splitters: list[str], fragments: list[str]
) -> None:
    run = runtime(components, window=32)
    run.insert("abcdefgh", checkpoint=8 if "mamba" in components else 0)
    backup = run.in_flight(BackupHost)
    for splitter in splitters:
        run.insert(splitter)
    assert stored_events(run.log, Medium.CPU) == []
    mark = len(run.log)
    run.complete(*backup)
    events = stored_events(since(run, mark), Medium.CPU)
    assert [spelled(e) for e in events] == fragments
    assert_root_first(run, events)
    run.settle()
    assert stored(run, "abcdefgh") == [True] * 8
    if "swa" in components:
        assert stored(run, "abcdefgh", SWA) == [True] * 8
    if "mamba" in components:
        assert stored(run, "abcdefgh", MAMBA) == [False] * 7 + [True]
    for splitter in splitters:
        assert all(stored(run, splitter))


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_failed_copy_of_a_split_node_publishes_nothing_and_is_made_again(components: str) -> None:
    run = runtime(components, window=32)
    run.insert("abcdefgh")
    backup = run.in_flight(BackupHost)
    run.insert("abcdX")
    run.insert("abcdefY")
    run.fail(*backup)
    assert stored_events(run.log, Medium.CPU) == []
    run.settle()
    run.flush()
    for text in ("abcdefgh", "abcdX", "abcdefY"):
        assert all(stored(run, text))
        assert run.reach(text) == (len(text), len(text)) or "mamba" in components
    assert_root_first(run, stored_events(run.log, Medium.CPU))


def test_a_failed_copy_gives_its_host_pages_back() -> None:
    run = runtime(host=9)
    run.insert("abcdefgh")
    run.insert("abcdX")
    run.fail(*run.in_flight(BackupHost))
    run.settle()
    run.flush()
    run.audit(idle=True)
    assert run.reach("abcdefgh") == (8, 8)


def test_a_cancelled_request_changes_nothing_for_its_backup() -> None:
    run = runtime()
    request = run.lease(spell("abcdefgh"), new=16)
    assert request is not None
    request.compute(32)
    assert request.commit()
    backup = run.in_flight(BackupHost)
    other = run.lease(spell("abcdX"))
    assert other is not None
    request.release()
    other.release()
    mark = len(run.log)
    run.complete(*backup)
    assert "".join(map(spelled, stored_events(since(run, mark), Medium.CPU))) == "abcdefgh"
    run.settle()
    assert all(stored(run, "abcdefgh"))
    run.audit(idle=True)


def test_the_suffix_evicted_right_after_the_ack_still_reaches_storage() -> None:
    run = runtime(device=10, host=32)
    run.insert("abcdefgh")
    backup = run.in_flight(BackupHost)
    run.insert("abcdX")
    run.complete(*backup)
    run.complete(*run.in_flight(BackupHost))
    big = run.lease(spell("stuvwx"))
    assert big is not None
    assert run.reach("abcdefgh")[0] < 8
    assert run.reach("abcdefgh")[1] == 8
    run.complete(*run.in_flight(BackupStorage))
    assert all(stored(run, "abcdefgh"))


@pytest.mark.parametrize("components", ["full", "full,swa"])
def test_a_lease_that_ends_inside_the_node_splits_it(components: str) -> None:
    run = runtime(components, window=32)
    run.insert("abcdefgh")
    backup = run.in_flight(BackupHost)
    reader = run.lease(spell("abcdXY"))
    deeper = run.lease(spell("abcdefZ"))
    assert reader is not None
    assert deeper is not None
    assert (reader.lease.cached, deeper.lease.cached) == (16, 24)
    mark = len(run.log)
    run.complete(*backup)
    events = stored_events(since(run, mark), Medium.CPU)
    assert [spelled(e) for e in events] == ["abcd", "ef", "gh"]
    reader.release()
    deeper.release()
    run.settle()
    assert all(stored(run, "abcdefgh"))
    run.audit(idle=True)


@pytest.mark.parametrize("child_first", [False, True])
def test_a_failed_parent_takes_the_child_in_flight_with_it(child_first: bool) -> None:
    run = runtime()
    run.insert("abcd")
    run.insert("abcdefgh")
    parent, child = run.in_flight(BackupHost)
    if child_first:
        run.complete(child)
        assert stored_events(run.log, Medium.CPU) == []
        run.fail(parent)
    else:
        run.fail(parent)
        run.complete(child)
    assert stored_events(run.log, Medium.CPU) == []
    run.flush()
    assert all(stored(run, "abcdefgh"))
    events = stored_events(run.log, Medium.CPU)
    assert "".join(map(spelled, events)) == "abcdefgh"
    assert_root_first(run, events)


def test_a_childs_ack_waits_for_its_parents() -> None:
    run = runtime()
    run.insert("abcd")
    run.insert("abcdefgh")
    run.insert("abcdefghij")
    parent, child, grandchild = run.in_flight(BackupHost)
    run.complete(grandchild)
    run.complete(child)
    assert stored_events(run.log, Medium.CPU) == []
    run.complete(parent)
    assert [spelled(e) for e in stored_events(run.log, Medium.CPU)] == ["abcd", "efgh", "ij"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", range(3))
def test_any_order_of_outcomes_with_any_one_failed_ends_well(order: tuple[int, ...], failing: int) -> None:
    run = runtime()
    for text in ("abcd", "abcdefgh", "abcdefghij"):
        run.insert(text)
    ops = run.in_flight(BackupHost)
    for i in order:
        (run.fail if i == failing else run.complete)(ops[i])
    run.flush()
    run.audit(idle=True)
    assert all(stored(run, "abcdefghij"))
    assert_root_first(run, stored_events(run.log, Medium.CPU))


@pytest.mark.parametrize("components", COMPONENTS)
def test_what_a_node_gains_later_is_backed_up_alone(components: str) -> None:
    run = runtime(components, window=32)
    run.insert("abcdef")
    run.flush()
    mark = len(run.log)
    if "mamba" not in components:
        run.insert("abcdef")
        assert [e for e in since(run, mark) if isinstance(e, (BackupHost, BackupStorage))] == []
        return
    run.insert("abcdef", checkpoint=6)
    run.flush()
    backups = [e for e in since(run, mark) if isinstance(e, BackupHost)]
    stores = [e for e in since(run, mark) if isinstance(e, BackupStorage)]
    assert [[move.component for move in e.moves] for e in backups] == [[MAMBA]]
    assert [[page.component for page in e.pages] for e in stores] == [[MAMBA]]


def test_auxiliary_components_are_stored_before_full() -> None:
    run = runtime("full,swa,mamba")
    run.insert("abcdef", checkpoint=6)
    run.flush()
    for effect in run.log:
        if isinstance(effect, BackupStorage):
            assert [page.component for page in effect.pages] == sorted(
                (page.component for page in effect.pages), reverse=True
            )


def test_a_flushed_path_is_in_the_store_in_every_pool() -> None:
    run = runtime("full,swa,mamba", window=12)
    run.insert("abcdefgh", checkpoint=8)
    run.insert("abcdXYZ", checkpoint=7)
    run.flush()
    assert all(stored(run, "abcdefgh"))
    assert all(stored(run, "abcdXYZ"))
    assert stored(run, "abcdefgh", SWA)[5:] == [True] * 3
    assert stored(run, "abcdXYZ", SWA)[4:] == [True] * 3
    assert stored(run, "abcdefgh", MAMBA)[7]
    assert stored(run, "abcdXYZ", MAMBA)[6]
    assert run.unsaved() == (0, 0)


# policies


def test_selective_backs_up_at_the_second_commit_that_passes() -> None:
    run = runtime(write_policy="write_through_selective")
    run.insert("abcd")
    assert run.in_flight() == []
    run.insert("abcd")
    assert len(run.in_flight(BackupHost)) == 1


def test_selective_counts_the_chunks_of_one_request_once() -> None:
    run = runtime(write_policy="write_through_selective")
    request = run.lease(spell("abcdefgh"))
    assert request is not None
    for chunk in (8, 16, 24, 32):
        request.compute(chunk)
        assert request.commit()
    assert run.in_flight() == []
    request.release()
    run.insert("abcdefghij")
    run.settle()
    assert all(stored(run, "abcdefgh"))
    assert not any(stored(run, "abcdefghij")[8:])


def test_write_back_saves_the_coldest_below_the_watermark() -> None:
    run = runtime(device=20, host=64, write_policy="write_back", write_back_watermark=0.5)
    run.insert("abcd")
    run.insert("efgh")
    assert run.in_flight() == []
    run.insert("ijkl")
    assert run.in_flight(BackupHost) != []
    run.settle()
    assert all(stored(run, "abcd"))
    assert not any(stored(run, "ijkl"))


def test_write_back_goes_parent_first() -> None:
    run = runtime(device=16, host=64, write_policy="write_back", write_back_watermark=0.9)
    run.insert("abcd")
    run.insert("abcdefgh")
    run.settle()
    assert_root_first(run, stored_events(run.log, Medium.CPU))


def test_without_a_host_nothing_is_copied() -> None:
    run = runtime(host=0)
    run.insert("abcd")
    assert run.in_flight() == []
    assert run.reach("abcd") == (4, 4)


def test_a_host_smaller_than_the_device_still_drains() -> None:
    run = runtime(device=16, host=8)
    run.insert("abcdefgh")
    run.insert("abcdX")
    run.insert("stuvw")
    run.flush()
    for text in ("abcdefgh", "abcdX", "stuvw"):
        assert all(stored(run, text))


def test_backups_beyond_the_limit_are_deferred_and_not_lost() -> None:
    run = runtime(max_backup_ops=2)
    for text in ("ab", "cd", "ef", "gh", "ij"):
        run.insert(text)
    assert len(run.in_flight(BackupHost)) == 2
    run.settle()
    run.flush()
    for text in ("ab", "cd", "ef", "gh", "ij"):
        assert all(stored(run, text))
