"""vLLM's configuration of the engine, which it does not hand to secondary tiers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def engine_config(extra_config: Any) -> Any | None:
    """The ``VllmConfig`` that has ``extra_config`` as its ``kv_connector_extra_config``; None if no caller has it.

    vLLM's connector builds the tier, and has the configuration at hand; only the tier's own arguments lack it. So it
    is looked for among the variables of the functions that called, and known by the object that both of them share.
    """
    for candidate in _candidates(sys._getframe(1)):
        transfer = candidate.kv_transfer_config
        if transfer is not None and transfer.kv_connector_extra_config is extra_config:
            return candidate
    return None


def _candidates(frame: FrameType | None) -> Iterator[Any]:
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    if current is not None:
        yield current
    while frame is not None:
        yield from [one for one in frame.f_locals.values() if isinstance(one, VllmConfig)]
        frame = frame.f_back
