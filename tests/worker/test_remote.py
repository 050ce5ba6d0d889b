"""Messages over a link: each remote method has one, which comes back as it was sent; nothing else is taken for one.
A group has every call of a local worker."""

from __future__ import annotations

import inspect
from random import Random
from typing import Any

import msgspec
import pytest

from asynccache import CacheConfig, Full, Mamba, PrefetchPolicy, RankFailure, Replicated, Sidecar, SlidingWindow
from asynccache.core.plan import MOST_BYTES, MOST_OPS, Move, Status, StoredPages
from asynccache.storage import StoreOptions
from asynccache.worker import messages as m
from asynccache.worker.group import WorkerGroup
from asynccache.worker.link import MOST_FRAME
from asynccache.worker.local import LocalWorker, StoreEntry
from asynccache.worker.rank_server import ORDERS, OpenedRank, RankServer, decode_orders
from asynccache.worker.work import (
    CopyKind,
    DamagedPage,
    Inspected,
    PageBytes,
    PageQuestion,
    ReadOrder,
    StoredBatch,
    StoreQuestion,
    Work,
    WriteOrder,
)

CONFIG = CacheConfig(
    model="m", page_size=4, storage=("file:/a?name=x", "redis://b"), prefetch_policy=PrefetchPolicy.BEST_EFFORT,
    components=(
        Full(bytes_per_token=4, device_tokens=64, host_tokens=64, layers=2, covers=(3, 7), replicated=Replicated.TP),
        SlidingWindow(window=8, bytes_per_token=4, device_tokens=64, host_tokens=64),
        Mamba(state_bytes=16, device_states=4, host_states=4),
    ),
    sidecars=(Sidecar(name="side", indices_from="swa", bytes_per_page=8),),
)  # fmt: skip
MOVES = (Move(0, b"abcd", b"efgh"), Move(2, b"", b""))
PAGES = StoredPages(0, bytes(32), b"slot"), StoredPages(2, bytes(64), b"slots")
ENTRY = StoreEntry(2, StoreOptions(name="x", write=False), shared=True)
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "open": [(CONFIG, False)], "all_open": [()], "be_patient": [(True,)], "cancel": [(5,)],
    "group_lost": [(2, "was silent")], "fill": [(0, b"slot", True)], "forget_fill": [(1, b"slot")],
    "inspect": [([PageQuestion(0, b"slot")], True), ([], False)],
    "perform": [
        (Work(CopyKind.BACKUP, (6, 7), MOVES, 0, (1, 2)),), (Work(CopyKind.LOAD, (8,), MOVES),),
        (Work(CopyKind.CLONE, (9,), MOVES, 8),),
    ],
    "forget_load": [(8,)], "send_batch": [(3, bytes(range(256)), (8,))], "give_up": [(10,)],
    "store": [([WriteOrder(10, PAGES), WriteOrder(11, ())],)], "ask": [([StoreQuestion("full", bytes(64))],)],
    "read": [([ReadOrder("full", bytes(32), bytes(4))], True)], "delete": [([bytes(32)],)], "clear": [()],
    "flush": [()],
    "is_away": [(bytes(32),)], "open_store": [(2, "file:/c", {"name": "c"}, None)], "use_store": [(2, 0), (2, None)],
    "drop_store": [(2,)], "leave_store": [(2,)], "close_store": [(2,)], "watch_store": [(1,)], "unwatch_store": [(1,)],
    "close": [(1.5,)],
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "open": OpenedRank(4, {"full": 64}, [ENTRY], bytes(32)), "store": StoredBatch(frozenset({7, 8}), 1, 2, 3),
    "ask": [bytes([0, 1, 2, 3]), b""], "read": [b"\1"], "open_store": ENTRY,
    "inspect": Inspected([PageBytes(bytes(8), b"\x08", ["full, layer 1"])], [DamagedPage(0, 5, "full")]),
}  # fmt: skip
decode_news = m.news_decoder(ORDERS)


def orders() -> list[Any]:
    """Each message of a head."""
    found = []
    for name, calls in CALLS.items():
        order = ORDERS[name]
        found += [order.message(*((7, *call) if order.answer else call)) for call in calls]
    return found


def news() -> list[Any]:
    """Each message of a rank."""
    answers = [order.answer(3, ANSWERS.get(name)) for name, order in ORDERS.items() if order.answer is not None]
    return [
        *answers, m.Ended(Status.FAILED, [7, 9]), m.BatchOver(3, "no memory"), m.BatchOver(4),
        m.Failed(2, "Unavailable", "locked"), m.StoreKeys(1, False, (bytes(32),)), m.StoreHealth(True),
        m.StoreCounters({"pages": 1, "s": 0.5}, {"x": {"pages": 1}}), m.Died("OSError: out of memory"),
    ]  # fmt: skip


def test_all_messages_of_one_frame_come_back_as_they_were_sent_and_in_order() -> None:
    assert CALLS.keys() == ORDERS.keys(), "each remote method is among them"
    assert decode_orders(m.encode(orders())) == orders()
    assert decode_news(m.encode(news())) == news()
    unasked = {kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)}
    assert {type(one) for one in news()} >= unasked - {m.Message, m.Call, m.Answer, m.Hello, m.Welcome}


def test_what_is_to_be_stored_comes_back_with_its_pages() -> None:
    """Also where the core is compiled, whose annotations say less."""
    order: Any
    (order,) = decode_orders(m.encode([ORDERS["store"].message(2, [WriteOrder(10, PAGES)])]))
    assert [type(one) for one in order.batch] == [WriteOrder]
    assert [type(one) for one in order.batch[0].pages] == [StoredPages] * 2


def test_the_head_says_nothing_that_a_worker_may_and_the_other_way_round() -> None:
    for messages, decode in ((news(), decode_orders), (orders(), decode_news)):
        for message in messages:
            with pytest.raises(RankFailure, match="no message"):
                decode(m.encode([message]))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_frame_raises_a_failure_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    whole = {True: m.encode(orders()), False: m.encode(news())}
    for _ in range(300):
        head = random.random() < 0.5
        frame = bytearray(whole[head])
        match random.randrange(4):
            case 0:
                frame = frame[: random.randrange(len(frame))]
            case 1:
                frame += random.randbytes(random.randint(1, 8))
            case 2:
                for _ in range(random.randint(1, 8)):
                    frame[random.randrange(len(frame))] = random.randrange(256)
            case _:
                frame = bytearray(random.randbytes(random.randint(0, 64)))
        try:
            decoded = (decode_orders if head else decode_news)(bytes(frame))
        except RankFailure:
            continue
        assert all(isinstance(one, m.Message) for one in decoded)  # another number, or other bytes: that is no harm


@pytest.mark.parametrize("wrong", [
    {"components": []}, {"components": [{"pool": "empty"}]}, {"model": None}, {"page_size": 0}, {"odd": 1},
    {"components": [{"pool": "full", "bytes_per_token": 4, "device_tokens": 64, "odd": 1}]},
])  # fmt: skip
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    message = ORDERS["open"].message(1, CONFIG, False)
    plain = msgspec.to_builtins([message])
    settings = next(part for part in plain[0] if isinstance(part, dict))
    settings |= wrong
    with pytest.raises(RankFailure, match="no message"):
        decode_orders(msgspec.msgpack.encode(plain))
    settings |= msgspec.to_builtins(CONFIG)
    settings.pop("odd", None)
    assert decode_orders(msgspec.msgpack.encode(plain)) == [message]


def test_a_group_has_every_call_of_a_local_worker_and_takes_it_in_the_same_way() -> None:
    """A group is a ``LocalWorker`` without its parts, so what it does not have itself would fail when it is called."""
    own = {"copy", "arriving", "hold", "digest", "open_first"}  # for the rank that has it
    calls = {name for name, call in vars(LocalWorker).items() if not name.startswith("_") and name not in own}
    attributes = {"layers", "takes_stores"}
    assert calls - vars(WorkerGroup).keys() - attributes == set()
    for name in calls:
        plain, group = vars(LocalWorker)[name], vars(WorkerGroup)[name]
        group = getattr(group, "func", group)          # of those that ``everywhere`` has made
        assert inspect.iscoroutinefunction(plain) == inspect.iscoroutinefunction(group), name
    assert m.orders_of(RankServer, LocalWorker).keys() == ORDERS.keys()


def test_a_new_call_is_one_method() -> None:
    class Newer:
        @m.remote(fold=lambda said, store, keys: sum(said.values()))
        async def count(self, store: int, keys: list[bytes]) -> int:
            """How many of these keys the store has."""
            return store + len(keys)

    (order,) = m.orders_of(Newer).values()
    assert order.answer is not None
    assert order.fold is not None
    decode = m.order_decoder({"count": order})
    sent = order.message(7, 1, [b"a", b"b"])
    assert decode(m.encode([sent])) == [sent]
    assert order.fold({0: 3, 1: 4}, 1, [b"a", b"b"]) == 7
    with pytest.raises(RankFailure, match="no message"):
        decode(m.encode([order.message(7, "1", [b"a"])]))


def test_the_longest_backup_that_the_core_joins_is_a_short_message() -> None:
    """An operation that is larger by itself is no part of a longer one."""
    work = Work(CopyKind.BACKUP, tuple(range(MOST_OPS)), (Move(0, bytes(MOST_BYTES), bytes(MOST_BYTES)),))
    assert len(m.encode(ORDERS["perform"].message(work))) < MOST_FRAME // 16
