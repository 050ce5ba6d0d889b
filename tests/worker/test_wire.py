"""Messages over a link: what can be sent is sent in order, and comes back as it was sent; settings among it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from random import Random
from typing import Any

import msgspec
import pytest

from asynccache import AsyncCache, CacheConfig, Full, Mamba, PrefetchPolicy, Replicated, Sidecar, SlidingWindow
from asynccache.core.plan import MOST_BYTES, MOST_OPS, Move, Status, StoredPages
from asynccache.errors import RankFailure
from asynccache.storage import StoreOptions
from asynccache.worker import Topology, listen
from asynccache.worker import link as links
from asynccache.worker import messages as m
from asynccache.worker.group import WorkerGroup
from asynccache.worker.link import MOST_FRAME, Wire
from asynccache.worker.local import LocalWorker, StoreEntry
from asynccache.worker.messages import (
    MOST_REASON,
    BatchOver,
    Died,
    Failed,
    Message,
    WorksOver,
    encode,
    news_decoder,
    sendable,
)
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
from tests.simulated.links import simulated_links
from tests.simulated.loop import SimulatedLoop, simulate

# Messages that are put on a wire: those that can be sent are sent in order, and the sender hears of those that
# cannot.


FLUSH, DELETE = ORDERS["flush"].message, ORDERS["delete"].message
decode_news = news_decoder(ORDERS)


def on_wire(
    body: Callable[[Wire, list[list[Message]]], Awaitable[None]],
    decode: Callable[[bytes], Sequence[Message]] = decode_orders,
) -> tuple[list[list[Message]], list[str]]:
    """The messages of each frame that a wire has sent when ``body`` has used it, and what was told of the others."""
    frames: list[list[Message]] = []
    told: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        link = simulated_links(loop.entropy("links"))[0]

        def send(frame: bytes) -> None:
            assert len(frame) <= links.MOST_FRAME
            frames.append(list(decode(frame)))

        link.send = send  # type: ignore[method-assign]
        await body(Wire([link], lambda failure: told.append(failure.reason)), frames)
        await asyncio.sleep(1)

    simulate(main, 1)
    return frames, told


def test_a_message_that_cannot_be_sent_takes_no_other_one_along_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MOST_FRAME", 100)
    good: list[Message] = [FLUSH(call) for call in range(100)]
    odd: list[Message] = [
        DELETE(7, [bytes(200)]), ORDERS["open_store"].message(8, 1, "file:\udcff", {}, None), FLUSH(1 << 70),
    ]  # fmt: skip

    async def body(wire: Wire, frames: list[list[Message]]) -> None:
        for order in (*good[:40], odd[0], *good[40:70], odd[1], odd[2], *good[70:]):
            wire.put(order)

    frames, told = on_wire(body)
    assert list(chain.from_iterable(frames)) == good
    assert len(told) == 3
    for one, why in zip(told, ("delete: it has 2", "open_store: 'utf-8' codec", "flush: "), strict=True):
        assert one.startswith(f"cannot send its {why}")


def test_outcomes_of_a_turn_that_are_alike_are_one_message_and_none_overtakes_another() -> None:
    def ended(status: Status, *ops: int) -> WorksOver:
        return WorksOver(status, list(ops))

    done, failed = Status.DONE, Status.FAILED

    async def body(wire: Wire, frames: list[list[Message]]) -> None:
        for said in (ended(done, 1), ended(done, 2), ended(failed, 3), ended(done, 4), BatchOver(1), ended(done, 5)):
            wire.put(said)
        await asyncio.sleep(1)
        wire.put(ended(done, 6))

    assert on_wire(body, decode_news)[0] == [
        [ended(done, 1, 2), ended(failed, 3), ended(done, 4), BatchOver(1), ended(done, 5)], [ended(done, 6)],
    ]


def test_what_is_sent_goes_at_once_behind_what_was_put_and_what_is_held_waits_for_a_flush() -> None:
    async def body(wire: Wire, frames: list[list[Message]]) -> None:
        wire.put(FLUSH(1))
        wire.send([FLUSH(2), FLUSH(3)])
        assert frames == [[FLUSH(1), FLUSH(2), FLUSH(3)]]
        await asyncio.sleep(1)
        wire.hold()
        wire.put(FLUSH(4))
        wire.put(FLUSH(5))
        assert len(frames) == 1
        wire.flush()
        assert frames[1:] == [[FLUSH(4), FLUSH(5)]]
        wire.put(FLUSH(6))

    assert on_wire(body)[0][2:] == [[FLUSH(6)]], "as ever, at the end of the turn"


def test_more_outcomes_than_a_frame_holds_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_FRAME", 4096)
    monkeypatch.setattr(links, "SLICE", 256)

    async def body(wire: Wire, frames: list[list[Message]]) -> None:
        for op in range(10_000, 12_000):
            wire.put(WorksOver(Status.DONE, [op]))

    frames, told = on_wire(body, decode_news)
    assert [op for frame in frames for message in frame for op in message.works] == [  # type: ignore[attr-defined]
        *range(10_000, 12_000)
    ]
    assert not told


def test_a_reason_can_be_sent_whatever_it_says() -> None:
    for reason in ("bad file \udcff", "\udcff" * 5000, "é" * 5000, "x" * (17 << 20)):
        for said in (BatchOver(1, reason), Died(reason), Failed(1, "OSError", reason)):
            (heard,) = decode_news(encode([said]))
            assert heard == said
            assert len(encode([said])) < 2 * MOST_REASON
        lost = ORDERS["group_lost"].message(0, sendable(reason))
        assert decode_orders(encode([lost])) == [lost]
    assert BatchOver(1, "out of memory: é").error == "out of memory: é"


# Messages over a link: each remote method has one, which comes back as it was sent; nothing else is taken for one.
# A group has every call of a local worker.


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
        *answers, m.WorksOver(Status.FAILED, [7, 9]), m.BatchOver(3, "no memory"), m.BatchOver(4),
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


# A configuration as it goes to a worker: of this process, or over a link.


def config(threshold: int) -> CacheConfig:
    full = Full(bytes_per_token=4, device_tokens=160, host_tokens=160)
    return CacheConfig(model="m", components=(full,), prefetch_threshold=threshold)


@pytest.mark.parametrize("threshold", [0, 1 << 60])
def test_what_is_sent_is_the_configuration(threshold: int) -> None:
    order: Any
    (order,) = decode_orders(encode([ORDERS["open"].message(1, config(threshold), False)]))
    assert type(order) is ORDERS["open"].message
    assert order.settings == config(threshold)


async def test_a_worker_of_this_process_may_have_what_no_frame_can_hold(tmp_path: object) -> None:
    async with (
        listen(f"unix:{tmp_path}/group", Topology(), secret=b"x" * 16, own=0) as workers,
        AsyncCache(config(1 << 70), workers=workers) as cache,
    ):
        async with cache.lease([1, 2, 3]) as lease:
            assert lease.cached == 0
