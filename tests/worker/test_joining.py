"""The copies of a plan: which of them are handed over together."""

from __future__ import annotations

from dataclasses import dataclass

from asynccache.core.plan import BackupHost, Clone, Copy, LoadBack, Move
from asynccache.worker.joining import joined
from asynccache.worker.link import MOST_FRAME
from asynccache.worker.messages import encode
from asynccache.worker.rank_server import ORDERS
from asynccache.worker.work import CopyKind, Work


@dataclass
class Batch:
    number: int


def move(component: int, *slots: int) -> Move:
    return Move(component, b"".join(slot.to_bytes(4, "little") for slot in slots), bytes(4 * len(slots)))


def test_backups_that_follow_each_other_are_one_work_and_nothing_overtakes() -> None:
    effects: list[Copy] = [
        BackupHost(1, (move(0, 1, 2), move(1, 7))), BackupHost(2, (move(0, 3),)), BackupHost(3, (move(1, 8),)),
        LoadBack(4, (move(0, 4),)), LoadBack(5, (move(0, 5),)), LoadBack(6, (move(0, 6),)),
        Clone(7, (move(2, 1),), 6), Clone(8, (move(2, 2),), 6),
        BackupHost(9, (move(0, 9),)),
    ]  # fmt: skip
    asked: list[int] = []

    def before(effect: Copy) -> list[Batch]:
        asked.append(effect.op)
        return [Batch(3), Batch(5)] if effect.op in (4, 5) else []

    assert joined(effects, before) == [
        Work(CopyKind.BACKUP, [1, 2, 3], (move(0, 1, 2, 3), move(1, 7, 8))),
        Work(CopyKind.LOAD, [4], (move(0, 4),), 0, (3, 5)), Work(CopyKind.LOAD, [5], (move(0, 5),), 0, (3, 5)),
        Work(CopyKind.LOAD, [6], (move(0, 6),)),
        Work(CopyKind.CLONE, [7], (move(2, 1),), 6), Work(CopyKind.CLONE, [8], (move(2, 2),), 6),
        Work(CopyKind.BACKUP, [9], (move(0, 9),)),
    ]  # fmt: skip
    assert asked == [1, 4, 5, 6, 7, 8, 9], "backups that follow each other wait for the same"


def test_a_work_has_a_bound() -> None:
    effects = [BackupHost(op, (move(0, *range(4)),)) for op in range(1, 601)]
    assert [len(work.ops) for work in joined(effects, lambda _: ())] == [256, 256, 88]
    long = [BackupHost(op, (Move(0, bytes(600 << 10), bytes(600 << 10)),)) for op in range(1, 6)]
    assert [work.ops for work in joined(long, lambda _: ())] == [[1], [2], [3], [4], [5]]


def test_an_operation_that_can_be_sent_alone_can_be_sent_behind_others() -> None:
    large = (MOST_FRAME - 4096) // 2
    effects = [BackupHost(1, (move(0, 1),)), BackupHost(2, (Move(0, bytes(large), bytes(large)),))]
    assert all(len(encode(ORDERS["perform"].message(work))) <= MOST_FRAME for work in joined(effects, lambda _: ()))
