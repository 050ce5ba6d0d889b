"""Messages that are put on a wire: those that can be sent are sent in order, and the sender hears of those that
cannot."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.core.plan import Status
from asynccache.errors import RankFailure
from asynccache.worker import link as links
from asynccache.worker.link import Wire
from asynccache.worker.messages import (
    MOST_REASON,
    BatchOver,
    Died,
    Ended,
    Failed,
    Message,
    encode,
    news_decoder,
    sendable,
)
from asynccache.worker.rank_server import ORDERS, decode_orders
from tests.simulated.links import simulated_links
from tests.simulated.loop import SimulatedLoop, simulate

FLUSH, DELETE = ORDERS["flush"].message, ORDERS["delete"].message
decode_news = news_decoder(ORDERS)


def sent_of(orders: list[Message]) -> tuple[list[Message], list[str]]:
    """Which of them are sent, and what is told of the others."""
    sent: list[Message] = []
    told: list[RankFailure] = []

    async def main(loop: SimulatedLoop) -> None:
        link = simulated_links(loop.entropy("links"))[0]
        frames: list[bytes] = []
        link.send = frames.append  # type: ignore[method-assign,assignment]
        one = Wire([link], told.append)
        for order in orders:
            one.put(order)
        await asyncio.sleep(1)
        for frame in frames:
            assert len(frame) <= links.MOST_FRAME
            sent.extend(decode_orders(frame))

    simulate(main, 1)
    return sent, [failure.reason for failure in told]


def test_a_message_that_cannot_be_sent_takes_no_other_one_along_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MOST_FRAME", 100)
    good: list[Message] = [FLUSH(call) for call in range(100)]
    odd: list[Message] = [
        DELETE(7, [bytes(200)]), ORDERS["open_store"].message(8, 1, "file:\udcff", {}, None), FLUSH(1 << 70),
    ]  # fmt: skip
    sent, told = sent_of([*good[:40], odd[0], *good[40:70], odd[1], odd[2], *good[70:]])
    assert sent == good
    assert len(told) == 3
    for one, why in zip(told, ("delete: it has 2", "open_store: 'utf-8' codec", "flush: "), strict=True):
        assert one.startswith(f"cannot send its {why}")


def test_outcomes_of_a_turn_that_are_alike_are_one_message_and_none_overtakes_another() -> None:
    def ended(status: Status, *ops: int) -> Ended:
        return Ended(status, list(ops))

    frames: list[list[Message]] = []

    async def main(loop: SimulatedLoop) -> None:
        link = simulated_links(loop.entropy("links"))[0]
        link.send = lambda frame: frames.append(list(decode_news(frame)))  # type: ignore[method-assign]
        one = Wire([link], lambda failure: None)
        done, failed = Status.DONE, Status.FAILED
        for said in (ended(done, 1), ended(done, 2), ended(failed, 3), ended(done, 4), BatchOver(1), ended(done, 5)):
            one.put(said)
        await asyncio.sleep(1)
        one.put(ended(done, 6))
        await asyncio.sleep(1)

    simulate(main, 1)
    assert frames == [
        [
            ended(Status.DONE, 1, 2), ended(Status.FAILED, 3), ended(Status.DONE, 4), BatchOver(1),
            ended(Status.DONE, 5),
        ],
        [ended(Status.DONE, 6)],
    ]


def test_what_is_sent_goes_at_once_behind_what_was_put_and_what_is_held_waits_for_a_flush() -> None:
    frames: list[list[Message]] = []

    async def main(loop: SimulatedLoop) -> None:
        link = simulated_links(loop.entropy("links"))[0]
        link.send = lambda frame: frames.append(list(decode_orders(frame)))  # type: ignore[method-assign]
        one = Wire([link], lambda failure: None)
        one.put(FLUSH(1))
        one.send([FLUSH(2), FLUSH(3)])
        assert frames == [[FLUSH(1), FLUSH(2), FLUSH(3)]]
        await asyncio.sleep(1)
        one.hold()
        one.put(FLUSH(4))
        one.put(FLUSH(5))
        assert len(frames) == 1
        one.flush()
        assert frames[1:] == [[FLUSH(4), FLUSH(5)]]
        one.put(FLUSH(6))
        await asyncio.sleep(1)
        assert frames[2:] == [[FLUSH(6)]], "as ever, at the end of the turn"

    simulate(main, 1)


def test_more_outcomes_than_a_frame_holds_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_FRAME", 4096)
    monkeypatch.setattr(links, "SLICE", 256)
    sent: list[int] = []
    told: list[RankFailure] = []

    async def main(loop: SimulatedLoop) -> None:
        link = simulated_links(loop.entropy("links"))[0]

        def send(frame: bytes) -> None:
            assert len(frame) <= 4096
            for message in decode_news(frame):
                assert isinstance(message, Ended)
                sent.extend(message.works)

        link.send = send  # type: ignore[method-assign]
        one = Wire([link], told.append)
        for op in range(10_000, 12_000):
            one.put(Ended(Status.DONE, [op]))
        await asyncio.sleep(1)

    simulate(main, 1)
    assert sent == list(range(10_000, 12_000))
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
