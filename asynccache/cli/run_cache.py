"""Makes the cache configuration of a run from its settings: how much room ``all`` means, what SWA and MAMBA get, which
pools are sidecars, and which are replicated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from msgspec.structs import replace

from asynccache.cli.options import PRESET, RunSettings
from asynccache.config import CacheConfig, Component, Full, Mamba, Replicated, Sidecar, SlidingWindow
from asynccache.errors import ConfigError

if TYPE_CHECKING:
    from asynccache.cli.traces import Trace, TraceSurvey

MODEL = "asynccache-stand-in"
_COARSE = 128
_DEEPSEEK = (("c4", "full", 1 / 4), ("c4_indexer", "full", 1 / 16), ("c128", "full", 1 / _COARSE),
             ("c4_state", "swa", 1 / 4), ("c4_indexer_state", "swa", 1 / 16))
_COARSE_STATE = ("c128_state", "swa", 1 / 4)
"""The preset's sidecars: name, the pool whose slots it uses, and its bytes as a share of those of a token. Pages that
are no multiple of the coarse compressor's block also need its state."""
_TOKENS_PER_STATE = 512
_STATES_PER_REQUEST = 4


def sidecars(text: str, page_size: int, bytes_per_token: int, layers: int) -> Iterator[Sidecar]:
    """Yield the sidecars in ``text``: entries with commas between them, each ``NAME:FROM:BYTES_PER_TOKEN`` or the
    preset. A sidecar of the preset has ``layers`` layers, and any sidecar has fewer if its bytes cannot be divided
    evenly among so many.

    Raises:
        ConfigError: an entry is neither.
    """
    for entry in () if text in ("none", "") else map(str.strip, text.split(",")):
        match entry.split(":"):
            case [one] if one == PRESET:
                for name, source, share in _DEEPSEEK if page_size % _COARSE == 0 else (*_DEEPSEEK, _COARSE_STATE):
                    size = max(1, int(share * page_size * bytes_per_token / layers)) * layers
                    yield Sidecar(name=name, indices_from=source, bytes_per_page=size, layers=layers)
            case [name, source, count] if re.fullmatch("[0-9]{1,18}", count) and int(count):
                size = page_size * int(count)
                yield Sidecar(name=name, indices_from=source, bytes_per_page=size, layers=gcd(size, layers))
            case _:
                raise ConfigError(f"--sidecars={text}: {entry!r} must be NAME:FROM:BYTES_PER_TOKEN or {PRESET}, of at "
                                  "least 1 byte per token")


def replicas(text: str) -> dict[str, Replicated]:
    """For each pool that ``text`` names, the dimensions over which it is replicated: tp, cp, or tp+cp (the default).

    Raises:
        ConfigError: an entry cannot be read.
    """
    found: dict[str, Replicated] = {}
    for entry in () if text == "none" else filter(None, map(str.strip, text.split(","))):
        name, colon, over = entry.partition(":")
        over = over.replace("+", ",") if colon else Replicated.TP_CP.value
        if not name or over not in [one.value for one in Replicated if one.over]:
            raise ConfigError(f"--replicated={text}: {entry!r} must be NAME, NAME:tp, NAME:cp or NAME:tp+cp")
        found[name] = Replicated(over)
    return found


def configure(
    settings: RunSettings, trace: Trace | None = None, survey: TraceSurvey | None = None
) -> CacheConfig:
    """The configuration of a run's cache. ``trace`` and ``survey``: the trace that the run replays and what ``survey``
    found in it; the size ``all`` depends on them.

    Raises:
        ConfigError: the settings do not fit together; the message names the field and the value.
    """
    config = settings.cache or _made(settings, trace, survey)
    named, names = replicas(settings.replicated), [spec.name for spec in config.pools()]
    for name in named:
        if name not in names:
            raise ConfigError(f"--replicated={settings.replicated}: no pool {name!r}; there are {', '.join(names)}")
    return replace(
        config,
        components=tuple(replace(one, replicated=named.get(one.pool, one.replicated)) for one in config.components),
        sidecars=tuple(replace(one, replicated=named.get(one.name, one.replicated)) for one in config.sidecars),
    )


def _made(settings: RunSettings, trace: Trace | None, survey: TraceSurvey | None) -> CacheConfig:
    needed = 0 if trace is None or survey is None else tokens_needed(settings, trace, survey)
    sizes = (settings.device_tokens, settings.host_tokens)
    device, host = (needed if size == "all" else size for size in sizes)
    logical = PRESET in map(str.strip, settings.sidecars.split(","))  # all KV of FULL is in sidecars
    components: list[Component] = [Full(
        bytes_per_token=0 if logical else settings.bytes_per_token, layers=1 if logical else settings.layers,
        device_tokens=device, host_tokens=host,
    )]
    if "swa" in settings.components:
        rooms = [tokens if size == "all" or not tokens
                 else max(1, int(tokens * settings.swa_ratio) // settings.page_size) * settings.page_size
                 for size, tokens in zip(sizes, (device, host), strict=True)]
        components.append(SlidingWindow(
            window=settings.window, bytes_per_token=settings.bytes_per_token, layers=settings.layers,
            device_tokens=rooms[0], host_tokens=rooms[1],
        ))
    if "mamba" in settings.components:
        running = settings.concurrency * _STATES_PER_REQUEST
        all_ = 0 if trace is None else 2 * len(trace.requests)
        states = [running + (all_ if size == "all" else tokens // _TOKENS_PER_STATE)
                  for size, tokens in zip(sizes, (device, host), strict=True)]
        components.append(Mamba(
            state_bytes=settings.mamba_bytes, layers=settings.layers, device_states=states[0],
            host_states=states[1] if host else 0,
        ))
    return CacheConfig(
        model=MODEL, components=tuple(components), page_size=settings.page_size,
        sidecars=tuple(sidecars(settings.sidecars, settings.page_size, settings.bytes_per_token, settings.layers)),
        storage=settings.storage, write_policy=settings.write_policy, prefetch_policy=settings.prefetch_policy,
        eviction=settings.eviction, device=settings.device, freeze_gc=True,
    )


def tokens_needed(settings: RunSettings, trace: Trace, survey: TraceSurvey) -> int:
    """Tokens of room with which nothing is evicted: for every page of the trace and for the requests that run.

    Counted are the pages of each prompt that no earlier prompt has, one more page where a prompt may leave an earlier
    one inside of a page, and the outputs if they are committed.
    """
    page = settings.page_size
    kept = sum(-(-fresh // page) + 1 for fresh in survey.fresh_tokens)
    if settings.insert_outputs:
        kept += sum(-(-min(r.output_length, settings.decode_tokens) // page) + 1 for r in trace.requests)
    longest = max(r.input_length for r in trace.requests) + settings.decode_tokens
    running = settings.concurrency * (-(-longest // page) + 3)
    return (kept + running) * page


def check_fits(settings: RunSettings, config: CacheConfig, trace: Trace) -> None:
    """Refuse a trace whose longest request, with what it decodes, cannot fit into L1.

    Raises:
        ConfigError: it cannot; the message has the request's length and the room.
    """
    full = config.components[0]
    assert isinstance(full, Full)
    total, number, output = max((one.input_length + (output := min(one.output_length, settings.decode_tokens)),
                                 -number, output) for number, one in enumerate(trace.requests, start=1))
    needed = -(-total // settings.page_size) * settings.page_size
    if needed > full.device_tokens:
        raise ConfigError(f"--device-tokens={full.device_tokens}: request {-number} of the trace has {total - output} "
                          f"prompt tokens and decodes {output}: at least {needed} are needed")
