"""Tests that are simulated worlds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulated.loop import SimulatedLoop, simulate

World = Callable[[SimulatedLoop], Coroutine[Any, Any, None]]


def in_world(world: World) -> Callable[[], None]:
    """A test that runs ``world`` under several seeds."""

    def test() -> None:
        for seed in range(5):
            simulate(world, seed)

    test.__name__ = world.__name__
    return test
