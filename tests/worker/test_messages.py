"""Messages over a link: every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from asynccache import CacheConfig, Full, Mamba, PrefetchPolicy, RankFailure, Replicated, Sidecar, SlidingWindow
from asynccache.core.plan import BackupStorage, Move, Status, StoredPages
from asynccache.storage import StoreOptions
from asynccache.worker import messages as m
from asynccache.worker.contract import ReadOrder, StoreQuestion
from asynccache.worker.work import CopyKind, Work

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
ORDERS: list[m.Message] = [
    m.OpenWorker(1, CONFIG), m.AllOpen(), m.PerformWork(Work(CopyKind.BACKUP, [6, 7], MOVES, 0, (1, 2))),
    m.PerformWork(Work(CopyKind.LOAD, [8], MOVES)), m.PerformWork(Work(CopyKind.CLONE, [9], MOVES, 8)), m.ForgetLoad(8),
    m.SendBatch(3, bytes(range(256)), (8,)),
    m.WritePages.of(2, [BackupStorage(10, (StoredPages(0, bytes(32), bytes(4)),))]), m.GiveUp(10),
    m.AskPages(3, (StoreQuestion("full", bytes(64)),)), m.ReadPages(4, (ReadOrder("full", bytes(32), bytes(4)),), True),
    m.DeletePages(5, bytes(32)), m.ClearStores(6), m.FlushStores(7), m.ProbeStores(bytes(32)),
    m.OpenStore(8, 2, "file:/c", {"name": "c"}, None), m.UseStore(2, 0), m.DropStore(9, 2), m.LeaveStore(2),
    m.CloseStore(10, 2), m.WatchStore(12, 1), m.UnwatchStore(1), m.CancelCall(5), m.CloseWorker(11, 1.5),
    m.GroupLost(2, "was silent"),
]  # fmt: skip
NEWS: list[m.Message] = [
    m.WorksEnded(Status.FAILED, [7, 9]), m.BatchOver(3, "no memory"), m.BatchOver(4),
    m.CallDone(1), m.CallFailed(2, "Unavailable", "locked"),
    m.WorkerOpened(3, 4, {"full": 64}, ((StoreOptions(name="x"), True),), bytes(32)),
    m.PageResults(4, (bytes([0, 1, 2, 3]), b"")), m.PagesWritten(5, (7, 8), 1, 2, 3),
    m.StoreOpened(6, StoreOptions(write=False), False),
    m.StoreKeys(1, False, (bytes(32),)), m.StoreHealth(True),
    m.StoreCounters({"pages": 1, "s": 0.5}, {"x": {"pages": 1}}),
    m.WorkerDied("OSError: out of memory"),
]  # fmt: skip


def test_all_messages_of_one_frame_come_back_as_they_were_sent_and_in_order() -> None:
    opening, *others = m.decode_head_messages(m.encode(ORDERS))
    assert isinstance(opening, m.OpenWorker)
    assert [opening, *others] == ORDERS
    assert m.decode_worker_messages(m.encode(NEWS)) == NEWS
    kinds = {type(one) for one in (*ORDERS, *NEWS)}
    assert kinds == {one for one in vars(m).values() if isinstance(one, type) and issubclass(one, m.Message)} - {
        m.Message, m.Call, m.Answer, m.Hello, m.Welcome,
    }, "each kind of message is among them"  # fmt: skip


def test_what_is_to_be_stored_comes_back_with_its_pages() -> None:
    """Also where the core is compiled, whose annotations say less."""
    pages = StoredPages(0, bytes(32), b"slot"), StoredPages(2, bytes(64), b"slots")
    sent = [BackupStorage(10, pages), BackupStorage(11, ())]
    (order,) = m.decode_head_messages(m.encode([m.WritePages.of(2, sent)]))
    assert isinstance(order, m.WritePages)
    assert order.effects == sent
    assert [type(one) for one in order.effects[0].pages] == [StoredPages] * 2


def test_a_configuration_comes_back_as_it_was_sent() -> None:
    (order,) = m.decode_head_messages(m.encode([m.OpenWorker(1, CONFIG)]))
    assert isinstance(order, m.OpenWorker)
    assert order.settings == CONFIG


def test_the_head_says_nothing_that_a_worker_may_and_the_other_way_round() -> None:
    for messages, decode in ((NEWS, m.decode_head_messages), (ORDERS, m.decode_worker_messages)):
        frame = m.encode(messages)
        with pytest.raises(RankFailure, match="no message"):
            decode(frame)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_frame_raises_a_failure_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    whole = {True: m.encode(ORDERS), False: m.encode(NEWS)}
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
            decoded = (m.decode_head_messages if head else m.decode_worker_messages)(bytes(frame))
        except RankFailure:
            continue
        assert all(isinstance(one, m.Message) for one in decoded)  # another number, or other bytes: that is no harm


@pytest.mark.parametrize("wrong", [
    {"components": []}, {"components": [{"pool": "empty"}]}, {"model": None}, {"page_size": 0}, {"odd": 1},
    {"components": [{"pool": "full", "bytes_per_token": 4, "device_tokens": 64, "odd": 1}]},
])  # fmt: skip
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    plain = msgspec.to_builtins([m.OpenWorker(1, CONFIG)])
    settings = next(part for part in plain[0] if isinstance(part, dict))
    settings |= wrong
    with pytest.raises(RankFailure, match="no message"):
        m.decode_head_messages(msgspec.msgpack.encode(plain))
    settings |= msgspec.to_builtins(CONFIG)
    settings.pop("odd", None)
    assert m.decode_head_messages(msgspec.msgpack.encode(plain)) == [m.OpenWorker(1, CONFIG)]
