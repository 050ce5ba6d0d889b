"""Reads ``--replicated``: the pools that every rank holds whole instead of a part."""

from __future__ import annotations

from dataclasses import replace

from asynccache.config import CacheConfig, Component, Replicated, Sidecar
from asynccache.errors import ConfigError

_OVER = [one.value for one in Replicated if one.over]


def check_replicas(text: str) -> str:
    """``text`` unchanged, if it can be read; an empty text for 'none'.

    Raises:
        ConfigError: it cannot be read.
    """
    return "" if text == "none" or not _read(text) else text


def replicate(config: CacheConfig, text: str) -> CacheConfig:
    """``config`` with the pools that ``text`` names marked as replicated.

    Raises:
        ConfigError: ``text`` names a pool that ``config`` does not have.
    """
    named = _read(text)
    names = [spec.name for spec in config.pools()]
    for name in named:
        if name not in names:
            raise ConfigError(f"--replicated={text}: no pool {name!r}; there are {', '.join(names)}")

    def mark(part: Component | Sidecar, name: str) -> Component | Sidecar:
        return replace(part, replicated=named[name]) if name in named else part

    components = tuple(mark(part, part.pool) for part in config.components)
    sidecars = tuple(mark(part, part.name) for part in config.sidecars)
    return replace(config, components=components, sidecars=sidecars)  # type: ignore[arg-type]


def _read(text: str) -> dict[str, Replicated]:
    """For each pool that ``text`` names, the dimensions over which it is replicated: tp, cp, or tp+cp (the default)."""
    found: dict[str, Replicated] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, colon, over = entry.partition(":")
        over = over.replace("+", ",") if colon else Replicated.TP_CP.value
        if not name or over not in _OVER:
            raise ConfigError(f"{entry!r} must be NAME, NAME:tp, NAME:cp or NAME:tp+cp")
        found[name] = Replicated(over)
    return found
