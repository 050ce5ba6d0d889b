"""CacheMachine over every combination of components, with room for all and with room for little."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from asynccache.testing.machine import CacheMachine

COMPONENTS = ["full", "full,swa", "full,mamba", "full,swa,mamba"]
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def play(examples: int, steps: int, **attributes: Any) -> None:
    machine = type("Machine", (CacheMachine,), attributes)
    examples = int(os.environ.get("ASYNCCACHE_EXAMPLES", examples))
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=CHECKS, print_blob=True,
        derandomize="ASYNCCACHE_EXAMPLES" not in os.environ, database=None,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("roomy", [False, True], ids=["tight", "roomy"])
@pytest.mark.parametrize("components", COMPONENTS)
def test_any_order_of_calls(components: str, roomy: bool) -> None:
    play(25, 40, components=components, roomy=roomy)


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_other_write_policies(policy: str) -> None:
    play(20, 40, components="full,swa,mamba", options={"write_policy": policy, "write_back_watermark": 0.5})


@pytest.mark.parametrize(
    "options",
    [
        {"host": 0}, {"storage": False}, {"max_backup_ops": 1}, {"slice_steps": 1}, {"load_back_threshold": 16},
        {"max_prefetch_pages": 3}, {"window": 1}, {"window": 400}, {"host": 4}, {"device": 10}, {"publish": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_settings(options: dict[str, Any]) -> None:
    play(12, 40, components="full,swa,mamba", options=options)


@pytest.mark.slow
@pytest.mark.parametrize("components", COMPONENTS)
def test_any_order_of_calls_at_length(components: str) -> None:
    play(150, 100, components=components)
