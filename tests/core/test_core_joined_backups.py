"""Backups that a call decides in a row are one effect, which keeps its place among the copies and has a bound."""

from __future__ import annotations

import itertools

import pytest

from asynccache.core.ledger import BACKUP_HOST, CLONE, LOAD_BACK, Kind
from asynccache.core.plan import MOST_BYTES, MOST_OPS, BackupHost, Clone, LoadBack, Move, operations
from asynccache.core.world import World
from tests.simulated.synchronous import SynchronousRuntime, core_config


def move(component: int, *slots: int) -> Move:
    return Move(component, b"".join(slot.to_bytes(4, "little") for slot in slots), bytes(4 * len(slots)))


def opened(world: World, kind: Kind = BACKUP_HOST) -> int:
    return world.ledger.open(kind).id


def backed_up(world: World, *moves: Move) -> int:
    op = world.ledger.open(BACKUP_HOST)
    world.backup(op, moves)
    return op.id


def test_backups_that_follow_each_other_are_one_effect_and_nothing_overtakes() -> None:
    world = World(core_config("full,swa,mamba"))
    first = [
        backed_up(world, move(0, 1, 2), move(1, 7)), backed_up(world, move(0, 3)), backed_up(world, move(1, 8))
    ]  # fmt: skip
    load = LoadBack(opened(world, LOAD_BACK), (move(0, 4),))
    clone = Clone(opened(world, CLONE), (move(2, 1),), load.op)
    world.copy(load)
    world.copy(clone)
    last = backed_up(world, move(0, 9))
    assert world.plan().effects == (
        BackupHost(tuple(first), (move(0, 1, 2, 3), move(1, 7, 8))), load, clone, BackupHost((last,), (move(0, 9),)),
    )  # fmt: skip
    assert world.plan().effects == (), "each plan begins with none"


def test_an_effect_has_a_bound() -> None:
    world = World(core_config())
    for _ in range(600):
        backed_up(world, move(0, *range(4)))
    assert [len(operations(effect)) for effect in world.plan().effects] == [MOST_OPS, MOST_OPS, 600 - 2 * MOST_OPS]
    for size in (600 << 10, MOST_BYTES, 1 << 10, 8, MOST_BYTES + 4, 8):
        backed_up(world, Move(0, bytes(size), bytes(size)))
    assert [len(operations(effect)) for effect in world.plan().effects] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_operations_of_one_effect_may_end_in_any_order_and_not_alike(
    order: tuple[int, ...], failing: int | None
) -> None:
    """Workers end them together. The core does not rely on that."""
    run = SynchronousRuntime(core_config("full,swa,mamba", window=8, write_policy="write_back", write_back_watermark=0))
    for text in ("abcd", "abcdefgh", "abcdefghij", "XY"):
        run.insert(text, checkpoint=len(text))
    run.drain()
    (effect,) = [effect for effect in run.log if isinstance(effect, BackupHost)]
    ops = list(effect.ops)
    assert len(ops) > 2
    for i in order:
        (run.fail if i == failing else run.complete)(ops[i])
    run.flush()
    run.audit(idle=True)
    assert run.unsaved() == (0, 0)
    assert run.reach("abcdefghij") == (10, 10)
