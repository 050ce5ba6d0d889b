"""What goes over a link: every message comes back as it was sent, and nothing else is taken for one."""

from __future__ import annotations

from random import Random

import pytest

from asynccache import CacheConfig, Full, Mamba, PrefetchPolicy, RankFailure, Replicated, Sidecar, SlidingWindow
from asynccache.core.plan import BackupStorage, Move, Status, StoredPages
from asynccache.storage import StoreOptions
from asynccache.worker import messages as m
from asynccache.worker.contract import Asked, Read
from asynccache.worker.work import Kind, Work

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
    m.Open(1, m.settings_of(CONFIG)), m.Ready(), m.Perform(Work(Kind.BACKUP, [6, 7], MOVES, 0, (1, 2))),
    m.Perform(Work(Kind.LOAD, [8], MOVES)), m.Perform(Work(Kind.CLONE, [9], MOVES, 8)), m.Forget(8),
    m.SendBatch(3, bytes(range(256)), (8,)),
    m.Store.of(2, [BackupStorage(10, (StoredPages(0, bytes(32), bytes(4)),))]), m.GiveUp(10),
    m.Ask(3, (Asked("full", bytes(64)),)), m.Fetch(4, (Read("full", bytes(32), bytes(4)),), True),
    m.Delete(5, bytes(32)), m.Clear(6), m.Flush(7), m.Probe(bytes(32)),
    m.OpenStore(8, 2, "file:/c", {"name": "c"}, None), m.UseStore(2, 0), m.DropStore(9, 2), m.LeaveStore(2),
    m.CloseStore(10, 2), m.Watch(1, True), m.Cancel(5), m.Close(11, 1.5), m.Lost(2, "was silent"),
]  # fmt: skip
NEWS: list[m.Message] = [
    m.Ended(Status.FAILED, [7, 9]), m.Over(3, "no memory"), m.Over(4), m.Done(1), m.Failed(2, "Unavailable", "locked"),
    m.Opened(3, 4, {"full": 64}, ((StoreOptions(name="x"), True),), bytes(32)),
    m.Answers(4, (bytes([0, 1, 2, 3]), b"")), m.Written(5, (7, 8), 1, 2, 3),
    m.StoreOpened(6, StoreOptions(write=False), False),
    m.Keys(1, False, (bytes(32),)), m.Health(True), m.Counters({"pages": 1, "s": 0.5}, {"x": {"pages": 1}}),
    m.Died("OSError: out of memory"),
]  # fmt: skip


def test_all_messages_of_one_frame_come_back_as_they_were_sent_and_in_order() -> None:
    opening, *others = m.decode_orders(m.encode(ORDERS))
    assert isinstance(opening, m.Open)
    assert m.config_of(opening.settings) == CONFIG     # in a frame there are lists where there were tuples
    assert others == ORDERS[1:]
    assert m.decode_news(m.encode(NEWS)) == NEWS
    kinds = {type(one) for one in (*ORDERS, *NEWS)}
    assert kinds == {one for one in vars(m).values() if isinstance(one, type) and issubclass(one, m.Message)} - {
        m.Message, m.Call, m.Answer, m.Hello, m.Welcome, m.Settings,
    }, "each kind of message is among them"  # fmt: skip


def test_what_is_to_be_stored_comes_back_with_its_pages() -> None:
    """Also where the core is compiled, whose annotations say less."""
    pages = StoredPages(0, bytes(32), b"slot"), StoredPages(2, bytes(64), b"slots")
    sent = [BackupStorage(10, pages), BackupStorage(11, ())]
    (order,) = m.decode_orders(m.encode([m.Store.of(2, sent)]))
    assert isinstance(order, m.Store)
    assert order.effects == sent
    assert [type(one) for one in order.effects[0].pages] == [StoredPages] * 2


def test_a_configuration_comes_back_as_it_was_sent() -> None:
    (order,) = m.decode_orders(m.encode([m.Open(1, m.settings_of(CONFIG))]))
    assert isinstance(order, m.Open)
    assert m.config_of(order.settings) == CONFIG


def test_the_head_says_nothing_that_a_worker_may_and_the_other_way_round() -> None:
    for messages, decode in ((NEWS, m.decode_orders), (ORDERS, m.decode_news)):
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
            decoded = (m.decode_orders if head else m.decode_news)(bytes(frame))
        except RankFailure:
            continue
        assert all(isinstance(one, m.Message) for one in decoded)  # another number, or other bytes: that is no harm


@pytest.mark.parametrize(
    "settings",
    [
        m.Settings((("Full", {}),), (), {"model": "m"}),
        m.Settings((("Empty", {}),), (), {"model": "m"}),
        m.Settings((("Full", {"bytes_per_token": 4, "device_tokens": 64, "odd": 1}),), (), {"model": "m"}),
        m.Settings((("Full", {"bytes_per_token": 4, "device_tokens": 64}),), (), {}),
        m.Settings((("Full", {"bytes_per_token": 4, "device_tokens": 64}),), (), {"model": "m", "page_size": 0}),
    ],
)
def test_settings_that_are_none_are_refused(settings: m.Settings) -> None:
    with pytest.raises(RankFailure, match="settings"):
        m.config_of(settings)
