"""Accidents that a rank of a simulated group may have, and what the others are told then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from asynccache.core.plan import Status
from asynccache.worker.messages import Ended

if TYPE_CHECKING:
    from tests.group.group_kit import GroupWorld


class Fate(NamedTuple):
    """One kind of accident. ``strike``: makes it happen to a rank. ``reason``: a text in the errors of the others.
    ``silences``: the process itself knows nothing of it. ``all``: it happens to all ranks at once. ``needs_host``: it
    shows only where pages are copied."""

    strike: Callable[[GroupWorld, int], None]
    reason: str
    silences: bool = False
    all: bool = False
    needs_host: bool = False


def kill(world: GroupWorld, rank: int) -> None:
    world.process(rank).kill()


def silence(world: GroupWorld, rank: int) -> None:
    world.process(rank).link.fall_silent()


def broken(*_: object, **__: object) -> None:
    raise OSError("the driver is gone")


def raise_at_effects(world: GroupWorld, rank: int) -> None:
    mover = world.local(rank).mover
    mover.backup = mover.load = broken  # type: ignore[assignment]


def raise_at_private_copies(world: GroupWorld, rank: int) -> None:
    world.local(rank).mover.clone = broken  # type: ignore[assignment]


def raise_at_storage(*calls: str) -> Callable[[GroupWorld, int], None]:
    """Have these calls of a rank's worker raise an error that no store may raise."""

    def strike(world: GroupWorld, rank: int) -> None:
        for call in calls:
            setattr(world.local(rank), call, broken)

    return strike


def cut_soon(world: GroupWorld, rank: int) -> None:
    link = world.process(rank).link.peer
    link.cut_at = link.frames + 2


def babble(world: GroupWorld, rank: int) -> None:
    world.process(rank).link.send(b"\x93\x01\x02\xc1")


def say_nonsense(world: GroupWorld, rank: int) -> None:
    world.process(rank).server._tell(Ended(Status.DONE, [999_999]))


def cut_all(world: GroupWorld, rank: int) -> None:
    for process in world.group.processes.values():
        process.link.cut()


FATES: dict[str, Fate] = {
    "killed": Fate(kill, "closed the connection"),
    "silent": Fate(silence, "was silent for 3 s", silences=True),
    "an effect raises": Fate(raise_at_effects, "the driver is gone", needs_host=True),
    "the link is cut in the middle of a sequence": Fate(cut_soon, "closed the connection"),
    "malformed": Fate(babble, "sent what is no message"),
    "nonsense": Fate(say_nonsense, "ended operation 999999"),
    "all links are cut": Fate(cut_all, "closed the connection", all=True),
}


EFFECTS: dict[str, Fate] = {
    "a storage write raises": Fate(raise_at_storage("store"), "the driver is gone"),
    "a storage question raises": Fate(raise_at_storage("ask"), "the driver is gone"),
    "a storage read raises": Fate(raise_at_storage("read"), "the driver is gone"),
    "a private copy raises": Fate(raise_at_private_copies, "the driver is gone"),
}
"""Accidents that show in one kind of work only, which not every random world has."""
