"""The pages whose names the head keeps: those of which a worker may yet report something."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.storage.checked import storage_key
from asynccache.worker.watched_keys import WatchedKeys

PAGE = bytes(range(32))
ONE, TWO = b"d" * 32, b"e" * 32


def ignore(store: int, there: bool, keys: Sequence[bytes]) -> None:
    """Nobody asks what was reported."""


def told_everywhere(holdings: WatchedKeys, store: int) -> None:
    for rank, digest in holdings.digests.items():
        holdings.told(store, rank, True, [storage_key(PAGE, digest)])


def test_pages_of_stores_that_one_worker_writes_are_not_named() -> None:
    holdings = WatchedKeys(ignore)
    holdings.digests = {0: ONE, 1: ONE}
    holdings.watch(1, shared=True)
    holdings.name([PAGE])
    assert not holdings._named


def test_the_names_of_pages_go_with_the_last_store_that_has_them() -> None:
    holdings = WatchedKeys(ignore)
    holdings.digests = {0: ONE, 1: TWO}
    for store in (1, 2):
        holdings.watch(store, shared=False)
        told_everywhere(holdings, store)
    holdings.name([PAGE])
    holdings.watch(3, shared=False)
    assert holdings.unwatch(1)
    assert len(holdings._named) == 2, "the second store still has it"
    assert holdings.unwatch(2)
    assert not holdings._named
    holdings.name([PAGE])
    assert holdings.unwatch(3)
    assert not holdings._named, "nobody is left who might have it"
    assert not holdings.unwatch(3)


def test_a_page_is_there_as_long_as_one_rank_of_its_writer_has_it() -> None:
    for digests in ({0: ONE, 1: ONE}, {0: ONE, 1: ONE, 2: TWO, 3: TWO}):
        said: list[bool] = []
        holdings = WatchedKeys(lambda store, there, keys, said=said: said.append(there))  # type: ignore[misc]
        holdings.digests = digests
        holdings.watch(1, shared=True)
        holdings.name([PAGE])
        told_everywhere(holdings, 1)
        holdings.told(1, 0, False, [storage_key(PAGE, ONE)])  # rank 1 has stored it anew, and has said so before
        assert set(said) == {True}
        holdings.told(1, 1, False, [storage_key(PAGE, ONE)])
        assert said[-1] is False
