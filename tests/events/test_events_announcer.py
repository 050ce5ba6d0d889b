"""The events that are announced for changes that the core names and the stores report."""

from __future__ import annotations

from hashlib import sha256

from asynccache.core.plan import Cleared, Medium, Publish
from asynccache.events import AllBlocksCleared, BlockRemoved, BlockStored, Opened, StorageReport
from asynccache.events.announcer import Announcer, block_hash

SPACE = b"n" * 32
PAGES = [sha256(bytes([i])).digest() for i in range(6)]
LOW = [int.from_bytes(page[24:], "big") for page in PAGES]
OPENED = Opened(2, lambda page: b"key of " + page, lambda space: "tenant" if space == SPACE else None)


def key(i: int) -> bytes:
    return b"key of " + PAGES[i]


def stored(medium: Medium, first: int, last: int, parent: int | None = None, space: bytes = b"") -> Publish:
    tokens = b"".join(token.to_bytes(4, "little") for i in range(first, last) for token in (2 * i, 2 * i + 1))
    before = b"" if parent is None else PAGES[parent]
    return Publish(medium, True, before, b"".join(PAGES[first:last]), tokens, space)


def removed(medium: Medium, first: int, last: int) -> Publish:
    return Publish(medium, False, b"", b"".join(PAGES[first:last]), b"", b"")


def opened() -> Announcer:
    announcer = Announcer()
    assert announcer.announce([OPENED]) == [AllBlocksCleared()]
    return announcer


def test_hashes_are_the_lower_64_bits() -> None:
    assert block_hash(PAGES[0]) == int.from_bytes(PAGES[0], "big") % 2**64


def test_device_and_host_are_told_as_the_core_says() -> None:
    events = opened().announce([stored(Medium.GPU, 0, 2), stored(Medium.CPU, 2, 3, parent=1)])
    assert events == [
        BlockStored(LOW[:2], None, [0, 1, 2, 3], 2, None, "GPU", None),
        BlockStored(LOW[2:3], LOW[1], [4, 5], 2, None, "CPU", None),
    ]


def test_removals_from_one_medium_in_a_row_are_one_event() -> None:
    announcer = opened()
    told = [removed(Medium.GPU, 1, 2), removed(Medium.GPU, 0, 1), removed(Medium.CPU, 0, 1)]
    assert announcer.announce(told) == [BlockRemoved([LOW[1], LOW[0]], "GPU"), BlockRemoved([LOW[0]], "CPU")]


def test_storage_is_what_is_named_and_there() -> None:
    announcer = opened()
    assert announcer.announce([StorageReport(True, [key(0), key(1), key(3)])]) == []
    assert announcer.announce([stored(Medium.STORAGE, 0, 4)]) == [
        BlockStored(LOW[:2], None, [0, 1, 2, 3], 2, None, "STORAGE", None),
        BlockStored(LOW[3:4], LOW[2], [6, 7], 2, None, "STORAGE", None),
    ]


def test_a_stored_page_is_announced_once() -> None:
    announcer = opened()
    announcer.announce([StorageReport(True, [key(0)]), stored(Medium.STORAGE, 0, 1)])
    assert announcer.announce([stored(Medium.STORAGE, 0, 1)]) == []


def test_what_the_store_lost_before_it_was_named_is_never_announced() -> None:
    announcer = opened()
    reports = [StorageReport(True, [key(0)]), StorageReport(False, [key(0)])]
    assert announcer.announce([*reports, stored(Medium.STORAGE, 0, 1)]) == []


def test_what_the_store_loses_is_announced_if_it_was() -> None:
    announcer = opened()
    announcer.announce([StorageReport(True, [key(0), key(1)]), stored(Medium.STORAGE, 0, 1)])
    assert announcer.announce([StorageReport(False, [key(0), key(1)])]) == [BlockRemoved([LOW[0]], "STORAGE")]
    announcer.announce([StorageReport(True, [key(0)])])
    assert len(announcer.announce([stored(Medium.STORAGE, 0, 1)])) == 1


def test_a_cleared_tree_clears_all_and_what_the_store_loses_then_is_no_news() -> None:
    announcer = opened()
    announcer.announce([StorageReport(True, [key(0)]), stored(Medium.STORAGE, 0, 1)])
    assert announcer.announce([Cleared(), StorageReport(False, [key(0)])]) == [AllBlocksCleared()]


def test_a_namespace_is_named() -> None:
    (event,) = opened().announce([stored(Medium.GPU, 0, 2, space=SPACE)])
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [("tenant",), ("tenant",)]
