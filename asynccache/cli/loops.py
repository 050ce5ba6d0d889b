"""The event loop that ``--loop`` names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynccache.errors import ConfigError


def loop_factory(name: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of the loop that ``--loop`` names; None: asyncio's own.

    Raises:
        ConfigError: it is not installed.
    """
    if name == "asyncio":
        return asyncio.SelectorEventLoop
    try:
        import uvloop
    except ImportError:
        if name is None:
            return None
        raise ConfigError("--loop=uvloop: uvloop is not installed; use --loop asyncio") from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
