"""One run from settings to exit status: build the cache, drive the workload, look for what is left, report.

The order at the end matters: all requests have ended, then the cache is flushed, then counted and audited, then
closed, and then only may no task be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from asynccache.cli import report as reports
from asynccache.cli.display import Display, choose
from asynccache.cli.driver import Driver
from asynccache.cli.engine import Engine
from asynccache.cli.meter import Meter
from asynccache.cli.options import Settings
from asynccache.cli.request import Source
from asynccache.cli.serving import Server
from asynccache.cli.sizing import check_fits, configure
from asynccache.cli.summary import summary
from asynccache.cli.tally import Tally
from asynccache.cli.trace import Survey, TraceSource, read_trace, survey
from asynccache.cli.workloads import StressSource
from asynccache.config import CacheConfig
from asynccache.errors import ConfigError

_SESSIONS_PER_PLACE = 4
_DURATION = 20.0
_FLUSH_SECONDS = 60.0


def execute(settings: Settings) -> int:
    """Run, print, write; the exit status.

    Raises:
        AsyncCacheError: something in the settings, the trace or the store cannot be used.
    """
    torch.set_num_threads(1)  # the engine's own threads are the parallel part
    display = choose(settings.quiet)
    with asyncio.Runner(loop_factory=_loop_factory(settings.loop)) as runner:
        run = runner.run(_Session(settings, display).run())
    return 0


def _loop_factory(name: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
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
