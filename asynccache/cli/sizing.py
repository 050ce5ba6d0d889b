"""Makes the cache configuration of a run from its settings: how much room ``all`` means, and what SWA and MAMBA get."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.cli.options import RunSettings, Size, is_logical, read_sidecars, replicate
from asynccache.cli.workloads import TraceRequest, TraceSurvey
from asynccache.config import CacheConfig, Component, Full, Mamba, SlidingWindow
from asynccache.errors import ConfigError

MODEL = "asynccache-stand-in"
_TOKENS_PER_STATE = 512
_STATES_PER_REQUEST = 4


def configure(
    settings: RunSettings, trace: Sequence[TraceRequest] = (), survey: TraceSurvey | None = None
) -> CacheConfig:
    """The configuration of a run's cache. ``trace`` and ``survey``: the trace that the run replays and what ``survey``
    found in it; the size ``all`` depends on them.

    Raises:
        ConfigError: the settings do not fit together; the message names the field and the value.
    """
    made = settings.cache or _made(settings, trace, survey)
    return replicate(made, settings.replicated)


def _made(settings: RunSettings, trace: Sequence[TraceRequest], survey: TraceSurvey | None) -> CacheConfig:
    needed = 0 if survey is None else tokens_needed(settings, trace, survey)
    device, host = (needed if size == "all" else size for size in (settings.device_tokens, settings.host_tokens))
    logical = is_logical(settings.sidecars)
    components: list[Component] = [Full(
        bytes_per_token=0 if logical else settings.bytes_per_token, layers=1 if logical else settings.layers,
        device_tokens=device, host_tokens=host,
    )]
    if "swa" in settings.components:
        components.append(SlidingWindow(
            window=settings.window, bytes_per_token=settings.bytes_per_token, layers=settings.layers,
            device_tokens=_swa(settings, settings.device_tokens, device),
            host_tokens=_swa(settings, settings.host_tokens, host),
        ))
    if "mamba" in settings.components:
        components.append(Mamba(
            state_bytes=settings.mamba_bytes, layers=settings.layers,
            device_states=_states(settings, settings.device_tokens, device, len(trace)),
            host_states=_states(settings, settings.host_tokens, host, len(trace)) if host else 0,
        ))
    sidecars = tuple(text.sidecar(settings.page_size, settings.bytes_per_token, settings.layers)
                     for text in read_sidecars(settings.sidecars, settings.page_size))
    return CacheConfig(
        model=MODEL, components=tuple(components), sidecars=sidecars, page_size=settings.page_size,
        storage=settings.storage, write_policy=settings.write_policy, prefetch_policy=settings.prefetch_policy,
        eviction=settings.eviction, device=settings.device, freeze_gc=True,
    )


def tokens_needed(settings: RunSettings, trace: Sequence[TraceRequest], survey: TraceSurvey) -> int:
    """Tokens of room with which nothing is evicted: for every page of the trace and for the requests that run.

    Counted are the pages of each prompt that no earlier prompt has, one more page where a prompt may leave an earlier
    one inside of a page, and the outputs if they are committed.
    """
    page = settings.page_size
    kept = sum(-(-fresh // page) + 1 for fresh in survey.fresh_tokens)
    if settings.insert_outputs:
        kept += sum(-(-min(r.output_length, settings.decode_tokens) // page) + 1 for r in trace)
    longest = max(r.input_length for r in trace) + settings.decode_tokens
    running = settings.concurrency * (-(-longest // page) + 3)
    return (kept + running) * page


def _swa(settings: RunSettings, size: Size, tokens: int) -> int:
    if size == "all" or not tokens:
        return tokens
    return max(1, int(tokens * settings.swa_ratio) // settings.page_size) * settings.page_size


def _states(settings: RunSettings, size: Size, tokens: int, requests: int) -> int:
    running = settings.concurrency * _STATES_PER_REQUEST
    return running + (2 * requests if size == "all" else tokens // _TOKENS_PER_STATE)


def check_fits(settings: RunSettings, config: CacheConfig, trace: Sequence[TraceRequest]) -> None:
    """Refuse a trace whose longest request, with what it decodes, cannot fit into L1.

    Raises:
        ConfigError: it cannot; the message has the request's length and the room.
    """
    full = config.components[0]
    assert isinstance(full, Full)

    def decoded(request: TraceRequest) -> int:
        return min(request.output_length, settings.decode_tokens)

    number, longest = max(enumerate(trace, start=1), key=lambda item: item[1].input_length + decoded(item[1]))
    output = decoded(longest)
    needed = -(-(longest.input_length + output) // settings.page_size) * settings.page_size
    if needed > full.device_tokens:
        raise ConfigError(
            f"--device-tokens={full.device_tokens}: request {number} of the trace has {longest.input_length} prompt "
            f"tokens and decodes {output}: at least {needed} are needed"
        )
