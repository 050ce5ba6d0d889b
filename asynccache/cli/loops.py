"""The event loop that ``--loop`` names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynccache.errors import ConfigError


def loop_factory(name: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop that ``--loop`` names. With None it is uvloop's if that is installed; if it is not, the
    result is None, which stands for asyncio's default.

    Raises:
        ConfigError: the loop is not installed.
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
