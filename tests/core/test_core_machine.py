"""CacheMachine over every combination of components, with room for all and with room for little."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulated.leading import leading
from tests.simulated.machine import CacheMachine

COMPONENTS = ["full", "full,swa", "full,mamba", "full,swa,mamba"]
OPTIONS: list[dict[str, Any]] = [
    {"host": 0}, {"storage": False}, {"max_backup_ops": 1}, {"slice_steps": 1}, {"load_back_threshold": 16},
    {"max_prefetch_pages": 3}, {"window": 1}, {"window": 400}, {"host": 4}, {"device": 10}, {"publish": False},
]  # fmt: skip
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def play(examples: int, steps: int, *, random_seed: int | None = None, **attributes: Any) -> None:
    """Run a machine with these attributes: the same examples each time, or those that ``random_seed`` gives. Only the
    former are shrunk when they fail: it may take many minutes, and a campaign wants to know at once what failed."""
    machine: Any = type("Machine", (CacheMachine,), attributes)
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=CHECKS, print_blob=True,
        derandomize=random_seed is None, database=None,
        phases=list(Phase) if random_seed is None else [Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(machine if random_seed is None else seed(random_seed)(machine), settings=chosen)


@pytest.mark.parametrize("roomy", [False, True], ids=["tight", "roomy"])
@pytest.mark.parametrize("components", COMPONENTS)
def test_any_order_of_calls(components: str, roomy: bool) -> None:
    play(25, 40, components=components, roomy=roomy)


@pytest.mark.parametrize("components", ["full", "full,swa,mamba"])
@pytest.mark.slow(2)
def test_any_order_of_calls_while_p2c_leads(components: str) -> None:
    with leading() as seen:
        play(120, 40, components=components, options={"host": 0, "device": 12, "eviction": "p2c"})
    assert seen["led"] > seen["choices"] / 2 > 20, f"p2c hardly ever leads: {seen}"
    assert seen["not the oldest"] > 5, seen


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
@pytest.mark.slow(1)
def test_other_write_policies(policy: str) -> None:
    play(20, 40, components="full,swa,mamba", options={"write_policy": policy, "write_back_watermark": 0.5})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.slow(0.6)
def test_other_settings(options: dict[str, Any]) -> None:
    play(12, 40, components="full,swa,mamba", options=options)


@pytest.mark.slow
@pytest.mark.parametrize("components", COMPONENTS)
def test_any_order_of_calls_at_length(components: str) -> None:
    play(15, 100, components=components)
