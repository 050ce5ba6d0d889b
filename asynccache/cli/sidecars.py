"""``--sidecars``: pools that hang on others, as text. The engine fills and verifies them as it does every pool."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from asynccache.config import Sidecar
from asynccache.errors import ConfigError

PRESET = "deepseek-v4"
_COARSE = 128


class Hung(NamedTuple):
    """One pool: ``share`` of the bytes that a token has in the sliding window, or so many bytes of its own."""

    name: str
    source: str
    bytes_per_token: int = 0
    share: float = 0.0

    def sidecar(self, page_size: int, bytes_per_token: int, layers: int) -> Sidecar:
        """As a spec; in as many of the ``layers`` as its bytes divide into."""
        layer = max(1, int(self.share * page_size * bytes_per_token / layers))
        page = page_size * self.bytes_per_token or layer * layers
        return Sidecar(name=self.name, indices_from=self.source, bytes_per_page=page, layers=gcd(page, layers))


_DEEPSEEK = (
    Hung("c4", "full", share=1 / 4),
    Hung("c4_indexer", "full", share=1 / 16),
    Hung("c128", "full", share=1 / _COARSE),
    Hung("c4_state", "swa", share=1 / 4),
    Hung("c4_indexer_state", "swa", share=1 / 16),
)
_COARSE_STATE = Hung("c128_state", "swa", share=1 / 4)


def check_sidecars(text: str) -> str:
    """``text`` as it is, if it can be read; 'none' is nothing.

    Raises:
        ConfigError: it cannot.
    """
    if text == "none":
        return ""
    read_sidecars(text, 1)
    return text


def read_sidecars(text: str, page_size: int) -> tuple[Hung, ...]:
    """``NAME:FROM:BYTES_PER_TOKEN``, or a preset, separated by commas.

    Raises:
        ConfigError: an entry is neither.
    """
    entries = [entry.strip() for entry in text.split(",")] if text else []
    return tuple(hung for entry in entries for hung in (_preset(page_size) if entry == PRESET else (_entry(entry),)))


def is_logical(text: str) -> bool:
    """Whether FULL has no bytes of its own: all of its KV is in what hangs on it."""
    return PRESET in (entry.strip() for entry in text.split(","))


def _preset(page_size: int) -> tuple[Hung, ...]:
    """A page that is no multiple of the coarse compressor's block needs its state, too."""
    return _DEEPSEEK if page_size % _COARSE == 0 else (*_DEEPSEEK, _COARSE_STATE)


def _entry(entry: str) -> Hung:
    name, *rest = entry.split(":")
    try:
        source, size = rest
        count = int(size)
    except ValueError:
        raise ConfigError(f"{entry!r} must be NAME:FROM:BYTES_PER_TOKEN or {PRESET}") from None
    if count < 1:
        raise ConfigError(f"{entry!r}: at least 1 byte per token")
    return Hung(name, source, count)
