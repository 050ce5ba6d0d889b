"""No core call is long, whatever the tree is like: each takes a slice of steps at most, and a few more.

A step is a cell that is looked at in an eviction order, a node that a pass visits, or one whose transfer begins or ends
(``World.steps``). So these tests count, and measure no time; ``python -m benchmarks.tree growth`` measures it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynccache.core.room import Room, RoomMaker
from asynccache.core.settings import SLICE_STEPS
from asynccache.core.transfers import Transfers
from asynccache.core.world import LISTED, World
from benchmarks import tree_shapes
from benchmarks.tree_shapes import SHAPES, Calls

MORE = 24
"""The steps that a call may take beyond its slice: each loop takes at least one, and a drain may pass over some cells
that storage refuses."""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The shapes freeze what they make."""
    yield
    gc.unfreeze()


def too_long(calls: Calls, leaves: int) -> dict[str, int]:
    """The calls that took more steps than they may, with their steps. To list the leaves below a root takes one
    call."""
    most = SLICE_STEPS + MORE + leaves // LISTED
    return {kind: took.steps for kind, took in calls.longest.items() if took.steps > most}


@pytest.mark.parametrize(("leaves", "pages"), [(1200, 1), (30, 1000)])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_call_takes_more_steps_than_a_slice_has(shape: str, leaves: int, pages: int) -> None:
    calls = SHAPES[shape](leaves, pages)
    assert too_long(calls, leaves) == {}
    if pages == 1:
        assert max(took.steps for took in calls.longest.values()) >= SLICE_STEPS, "nothing here needs two slices"


@pytest.mark.slow(20)
@pytest.mark.parametrize("shape", ["reused", "unsaved"])
def test_however_large_the_tree_is(shape: str) -> None:
    assert too_long(SHAPES[shape](100_000, 1), 100_000) == {}


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_a_few_steps_get_on(shape: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the slices are, each gets on, so no call goes on for ever."""
    made = 0

    class Counted(Calls):
        def __init__(self, *rooms: int, **more: object) -> None:
            super().__init__(*rooms, **(more | {"steps": steps}))  # type: ignore[arg-type]

        def call(self, kind: str, work: Callable[[], object]) -> object:  # type: ignore[override]
            nonlocal made
            made += 1
            assert made < 40_000, f"{kind} goes on and on"
            return super().call(kind, work)

    monkeypatch.setattr(tree_shapes, "Calls", Counted)
    SHAPES[shape](48, 1)
    SHAPES[shape](8, 12)


def at_once(call: Callable[..., Any], goes_on: Callable[[Any], bool]) -> Callable[..., Any]:
    def whole(*given: object) -> Any:
        while goes_on(answer := call(*given)):
            pass
        return answer

    return whole


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "stale cells cost nothing": (World, "limit", property(lambda world: 1 << 60, lambda world, limit: None)),
    "room for a backup is made at once": (RoomMaker, "make", at_once(RoomMaker.make, lambda room: room is Room.SLICE)),
    "copies go gently at once": (
        RoomMaker, "make_gently", at_once(RoomMaker.make_gently, lambda room: room is Room.SLICE)),
    "outcomes are applied all at once": (Transfers, "settle", at_once(Transfers.settle, bool)),
}  # fmt: skip


@pytest.mark.slow(2)
@pytest.mark.source
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.usefixtures("breaks_a_core")
def test_a_loop_without_a_bound_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[broken], raising=False)
    assert any(too_long(shape(1200, 1), 1200) for shape in SHAPES.values())
