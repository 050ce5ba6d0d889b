"""Reads ``--sidecars``, the pools that use the slots of another pool (the engine fills and verifies them like every
pool), and ``--replicated``, the pools that every rank holds whole instead of a part."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from msgspec.structs import replace

from asynccache.config import CacheConfig, Component, Replicated, Sidecar
from asynccache.errors import ConfigError

PRESET = "deepseek-v4"
_COARSE = 128
_OVER = [one.value for one in Replicated if one.over]


class SidecarText(NamedTuple):
    """One sidecar as the option describes it: its name, and ``source``, the pool whose slots it uses. Its size is
    ``bytes_per_token`` or, if this is 0, ``share`` times the run's ``--bytes-per-token``."""

    name: str
    source: str
    bytes_per_token: int = 0
    share: float = 0.0

    def sidecar(self, page_size: int, bytes_per_token: int, layers: int) -> Sidecar:
        """The sidecar for the configuration. It has ``layers`` layers, or fewer if its bytes cannot be divided evenly
        among so many."""
        layer = max(1, int(self.share * page_size * bytes_per_token / layers))
        page = page_size * self.bytes_per_token or layer * layers
        return Sidecar(name=self.name, indices_from=self.source, bytes_per_page=page, layers=gcd(page, layers))


_DEEPSEEK = (
    SidecarText("c4", "full", share=1 / 4),
    SidecarText("c4_indexer", "full", share=1 / 16),
    SidecarText("c128", "full", share=1 / _COARSE),
    SidecarText("c4_state", "swa", share=1 / 4),
    SidecarText("c4_indexer_state", "swa", share=1 / 16),
)
_COARSE_STATE = SidecarText("c128_state", "swa", share=1 / 4)


def check_sidecars(text: str) -> str:
    """``text`` unchanged, if it can be read; an empty text for 'none'.

    Raises:
        ConfigError: it cannot be read.
    """
    if text == "none":
        return ""
    read_sidecars(text, 1)
    return text


def read_sidecars(text: str, page_size: int) -> tuple[SidecarText, ...]:
    """The sidecars in ``text``: entries with commas between them, each ``NAME:FROM:BYTES_PER_TOKEN`` or the preset.

    Raises:
        ConfigError: an entry is neither.
    """
    entries = [entry.strip() for entry in text.split(",")] if text else []
    return tuple(one for entry in entries for one in (_preset(page_size) if entry == PRESET else (_entry(entry),)))


def is_logical(text: str) -> bool:
    """Return whether FULL has no bytes of its own, because all of its KV is in sidecars."""
    return PRESET in (entry.strip() for entry in text.split(","))


def _preset(page_size: int) -> tuple[SidecarText, ...]:
    """The preset's sidecars. Pages that are no multiple of the coarse compressor's block also need its state."""
    return _DEEPSEEK if page_size % _COARSE == 0 else (*_DEEPSEEK, _COARSE_STATE)


def _entry(entry: str) -> SidecarText:
    name, *rest = entry.split(":")
    try:
        source, size = rest
        count = int(size)
    except ValueError:
        raise ConfigError(f"{entry!r} must be NAME:FROM:BYTES_PER_TOKEN or {PRESET}") from None
    if count < 1:
        raise ConfigError(f"{entry!r} must have at least 1 byte per token")
    return SidecarText(name, source, count)


def check_replicas(text: str) -> str:
    """``text`` unchanged, if it can be read; an empty text for 'none'.

    Raises:
        ConfigError: it cannot be read.
    """
    return "" if text == "none" or not _replicas(text) else text


def replicate(config: CacheConfig, text: str) -> CacheConfig:
    """``config`` with the pools that ``text`` names marked as replicated.

    Raises:
        ConfigError: ``text`` names a pool that ``config`` does not have.
    """
    named = _replicas(text)
    names = [spec.name for spec in config.pools()]
    for name in named:
        if name not in names:
            raise ConfigError(f"--replicated={text}: no pool {name!r}; there are {', '.join(names)}")

    def mark(part: Component | Sidecar, name: str) -> Component | Sidecar:
        return replace(part, replicated=named[name]) if name in named else part

    components = tuple(mark(part, part.pool) for part in config.components)
    sidecars = tuple(mark(part, part.name) for part in config.sidecars)
    return replace(config, components=components, sidecars=sidecars)


def _replicas(text: str) -> dict[str, Replicated]:
    """For each pool that ``text`` names, the dimensions over which it is replicated: tp, cp, or tp+cp (the default)."""
    found: dict[str, Replicated] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, colon, over = entry.partition(":")
        over = over.replace("+", ",") if colon else Replicated.TP_CP.value
        if not name or over not in _OVER:
            raise ConfigError(f"{entry!r} must be NAME, NAME:tp, NAME:cp or NAME:tp+cp")
        found[name] = Replicated(over)
    return found
