"""Finds vLLM's configuration of the engine, because vLLM does not hand it to secondary tiers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def engine_config(extra_config: Any) -> Any | None:
    """The ``VllmConfig`` whose ``kv_connector_extra_config`` is the object ``extra_config``; None if it is not found.

    vLLM's connector has the configuration when it builds the tier, but does not pass it on. So the configuration is
    looked for among the local variables of the calling functions, and recognized by ``extra_config``, which the tier
    was given.
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
