"""``asynccache serve``: the host process, which owns host memory and stores of one machine for all engines on it.

    asynccache serve --listen unix:/run/asynccache.sock --memory 64GiB --storage 'file:/var/kv?capacity=500GiB'

It runs until Ctrl-C or SIGTERM. Then it takes no more pages, has the stores write what waits, and ends; a second signal
ends it at once. On a terminal it shows what it does; elsewhere it prints a line a minute, for a log. A second one on
the same socket with ``--replace`` takes over memory, pages and socket from the first, which ends.

Imports neither torch nor NumPy, so that the process is about as large as the memory that it was asked for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Self

from asynccache.cli.options import CommandOptions, Json, Quiet, loop_factory, option
from asynccache.cli.output import number, percent, size, write
from asynccache.core.plan import Cleared, Medium
from asynccache.errors import ConfigError
from asynccache.host.behind import StoresBehind
from asynccache.host.memory import HostMemory, layout_of
from asynccache.host.pages import LONGEST_SHARE
from asynccache.host.server import HostServer
from asynccache.host.sockets import free_path
from asynccache.host.takeover import take_over
from asynccache.storage import Size, parse_host_port, parse_size

if TYPE_CHECKING:
    from asynccache.events import HeldReport, ZmqPublisher

LINE_EVERY, PANEL_EVERY = 60.0, 1.0
LONGEST_BEHIND = 64 << 20
METRICS_PATIENCE = 10.0
MOST_FILES = 1 << 16
MOST_WAITING_REPORTS = 64
KEPT_BATCHES, MOST_UNREAD_BATCHES = 4096, 10_000

LOG = logging.getLogger("asynccache.host")


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``serve``."""

    listen: Annotated[str, option("unix:PATH", "the socket to listen at; engines name it as host:PATH")] = ""
    memory: Annotated[Size, option("SIZE", "all the memory that pages and their headers may take, as in 64GiB",
                                   parse=parse_size)] = 0
    storage: Annotated[tuple[str, ...], option(
        "URL", "a store behind the memory; several: the nearest first", several=True)] = ()
    huge: Annotated[bool, option("", "use huge pages, which must be reserved (sysctl vm.nr_hugepages): first writes "
                                     "are several times as fast", const=True)] = False
    group: Annotated[str | None, option("GROUP", "let processes of this group connect, too")] = None
    limit: Annotated[tuple[str, ...], option(
        "LABEL=SIZE", "how much pages with this label (host:PATH?label=...) take at most", several=True)] = ()
    metrics: Annotated[str | None, option("HOST:PORT", "serve /metrics for Prometheus, and /healthz")] = None
    events: Annotated[str | None, option(
        "ENDPOINT", "publish which blocks are in the memory and in the stores, for routers, at for example tcp://*:5557"
    )] = None
    events_replay: Annotated[str | None, option(
        "ENDPOINT", "where routers ask for all that is there, and for missed events; without it those that come late, "
                    "or miss one, do not know it")] = None
    events_topic: Annotated[str, option("TEXT", "topic of the events")] = ""
    replace: Annotated[bool, option("", "take over from the host process that listens there, if there is one: its "
                                        "memory, with all pages, and its socket", const=True)] = False
    config: Annotated[str | None, option("FILE", "read options from this TOML file, by their names here; those that "
                                                 "are given here win")] = None
    json: Annotated[Json, option(
        "PATH|-", "write all counters as a line of JSON a minute to a file, or to standard output (-) instead of the "
                  "text", const="-")] = None
    quiet: Quiet = False

    @classmethod
    def read(cls, command: str, given: Mapping[str, Any]) -> Self:
        """Return the options, with those of the file that ``--config`` names."""
        path = given.get("config")
        if path is not None:
            given = {**_in_file(path, cls), **{name: value for name, value in given.items() if value is not None}}
        return super().read(command, given)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.listen.startswith("unix:/"):
            raise ConfigError(f"--listen={self.listen or '(missing)'} must be unix:/PATH")
        if not self.memory:
            raise ConfigError("--memory is missing: say how much there is for pages, as in 64GiB")
        if self.metrics is not None and parse_host_port(self.metrics) is None:
            raise ConfigError(f"--metrics={self.metrics} must be HOST:PORT")
        if self.events is None and (self.events_replay is not None or self.events_topic):
            raise ConfigError("--events is missing: --events-replay and --events-topic are about the events there")
        _ = self.limits

    @property
    def path(self) -> str:
        """The socket's path."""
        return self.listen.removeprefix("unix:")

    @property
    def limits(self) -> dict[str, int]:
        """Bytes at most, by label."""
        found = {}
        for text in self.limit:
            label, sign, amount = text.rpartition("=")
            if not sign or not label:
                raise ConfigError(f"--limit={text} must be LABEL=SIZE, as in llama=16GiB")
            found[label] = parse_size(f"--limit={label}", amount)
        return found


def _in_file(path: str, options: type[Options]) -> dict[str, Any]:
    """Return the options in a TOML file as the command line would give them. Raises ConfigError: it cannot be used."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config={path}: {error}") from None
    known = options.fields("serve").keys() - {"config"}
    for name in found:
        if name.replace("-", "_") not in known:
            raise ConfigError(f"--config={path}: unknown option {name!r}; one of {', '.join(sorted(known))}")
    return {name.replace("-", "_"): _as_given(value) for name, value in found.items()}


def _as_given(value: Any) -> Any:
    if isinstance(value, dict):  # [limit] label = "16GiB"
        return [f"{name}={amount}" for name, amount in value.items()]
    return value if isinstance(value, (bool, list)) else str(value)


def execute(options: Options) -> int:
    """Serve until a signal comes, or another process takes over. Returns the exit status, 0: that is how it should end.

    Raises:
        ConfigError: an option cannot be used, or somebody else listens there.
        BackendError: a store cannot be opened.
    """
    log, handler = logging.getLogger("asynccache"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    _allow_descriptors()
    try:
        if not options.quiet:
            log.addHandler(handler)
            log.setLevel(logging.INFO)
        with asyncio.Runner(loop_factory=loop_factory(None)) as runner:
            return runner.run(_serve(options))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _allow_descriptors() -> None:
    """Allow this process as many file descriptors as it may have: a client takes three, and the stores some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(options: Options) -> int:
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            main.cancel()  # the second signal
        stopped.set()

    for number_of in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_of, stop)
    if options.events is not None:
        _import_events()  # before anything is taken over
    taken = await asyncio.to_thread(take_over, options.path) if options.replace else None
    if taken is None:
        free_path(options.path)  # before a store says that its folder is in use
    memory = HostMemory.make(options.memory, huge=options.huge) if taken is None else taken.memory
    if taken is not None and memory.layout != layout_of(options.memory, huge=options.huge):
        print(f"asynccache: the memory that was taken over has {size(memory.layout.size)} for pages", file=sys.stderr)
    behind = None
    if options.storage:
        behind = StoresBehind(options.storage, min(LONGEST_BEHIND, memory.layout.units // LONGEST_SHARE * 4096))
        await behind.open()
    server = HostServer(options.path, memory, behind=behind, group=options.group, limits=options.limits)
    try:
        await server.open(taken)
        gc.freeze()  # what is there by now stays, so it need not be looked through again
        gc.set_threshold(50_000, 50, 1000)  # pages are no garbage, and there are many of them
        async with AsyncExitStack() as parts:
            patience = 0.0 if taken is None else METRICS_PATIENCE  # the other one listens there, and is ending
            for what, told in _tells(server, options, patience):
                try:
                    await parts.enter_async_context(told)
                except ConfigError as error:
                    if taken is None:
                        raise
                    LOG.error("all pages were taken over; going on without %s: %s", what, error)
            if not options.quiet:
                shown = loop.create_task(_show(server, options))
                parts.callback(shown.cancel)
            ends = [loop.create_task(event.wait()) for event in (stopped, server.closed)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        return 0
    finally:
        try:
            await server.aclose()
        finally:
            if behind is not None and behind.hangs:
                LOG.warning("going without a store that hangs")
                sys.stderr.flush()
                os._exit(0 if server.closed.is_set() else 1)  # the loop and its threads would wait for it


def _tells(
    server: HostServer, options: Options, patience: float
) -> Iterator[tuple[str, AbstractAsyncContextManager[object]]]:
    """Yield the contexts in which metrics and events of ``server`` are served, by name."""
    if options.metrics is not None:
        from asynccache.host.metrics import serve_metrics

        yield "metrics", serve_metrics(server, options.metrics, patience=patience)
    if options.events is not None:
        yield "events", publish(server, options, patience)


def _import_events() -> tuple[type[ZmqPublisher], type[HeldReport]]:
    """Return the classes that make and send events. Raises ConfigError: their package is not installed."""
    try:
        from asynccache.events import HeldReport, ZmqPublisher
    except ModuleNotFoundError as error:
        raise ConfigError(f"--events needs the extra [events]: {error}") from None
    return ZmqPublisher, HeldReport


@asynccontextmanager
async def publish(server: HostServer, options: Options, patience: float) -> AsyncIterator[ZmqPublisher]:
    """Publish KV events of what the server holds, as long as this lasts. Gives the publisher. ``patience``: for how
    many seconds it tries again while somebody else uses the address.

    Raises:
        ConfigError: an address cannot be used.
    """
    publisher_class, report = _import_events()
    assert options.events is not None
    until = time.monotonic() + patience
    while True:
        try:
            publisher = publisher_class(
                options.events, options.events_replay, topic=options.events_topic, first=time.time_ns(),
                keep=KEPT_BATCHES, high_water=MOST_UNREAD_BATCHES,
            )  # fmt: skip
            break
        except ConfigError:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(0.05)

    def tell(medium: str, there: bool, keys: Sequence[bytes]) -> bool:
        if publisher.stats().waiting >= MOST_WAITING_REPORTS:
            return False
        publisher(report(Medium(medium), there, keys))
        return True

    try:
        publisher(Cleared())
        server.announce(tell)
        yield publisher
    finally:
        if not server.handed_over:
            publisher(Cleared())
        await asyncio.to_thread(publisher.close)


async def _show(server: HostServer, options: Options) -> None:
    """Show what the server does until cancelled: a panel on a terminal, a line a minute elsewhere."""
    began, last = time.monotonic(), server.counts()
    if sys.stderr.isatty() and options.json is None:
        with suppress(ImportError):  # rich is optional here
            await _live(server, options, began)
    print(f"asynccache serves {options.listen} with {size(server.memory.layout.size)} for pages", file=sys.stderr,
          flush=True)  # fmt: skip
    while True:
        await asyncio.sleep(LINE_EVERY)
        now = server.counts()
        for sentence in server.long_reserved():
            print(sentence, file=sys.stderr)
        if options.json is not None:
            line = json.dumps({"time": round(time.time(), 3), **now}) + "\n"
            if options.json == "-":
                sys.stdout.write(line)
                sys.stdout.flush()
                continue
            await asyncio.to_thread(write, options.json, line, mode="a")
        print(" · ".join(f"{name} {text}" for name, text in rows(now, last, LINE_EVERY)), file=sys.stderr, flush=True)
        last = now


async def _live(server: HostServer, options: Options, began: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    last = server.counts()
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(PANEL_EVERY)
            now = server.counts()
            parts: list[tuple[str, str]] = [
                (f"asynccache serve {options.listen} · {time.monotonic() - began:.0f} s", "bold")]
            for name, text in rows(now, last, PANEL_EVERY):
                parts += [(f"\n{name:<10}", "dim"), (text, "")]
            parts += [(f"\n{sentence}", "yellow") for sentence in server.long_reserved()]
            live.update(Text.assemble(*parts), refresh=True)
            last = now


def rows(now: Mapping[str, float], last: Mapping[str, float], seconds: float) -> list[tuple[str, str]]:
    """Return the rows of the display: names and texts. ``last``: the counters ``seconds`` ago."""
    def rate(name: str) -> str:
        return f"{(now[name] - last.get(name, 0)) / seconds:,.0f}/s"

    asked = now["hits"] + now["misses"]
    found = [
        ("memory", f"{percent(now['capacity_bytes'] - now['free_bytes'], now['capacity_bytes'])} of "
                   f"{size(now['capacity_bytes'])}, {number(now['pages'])} pages"),
        ("clients", f"{number(now['clients'])} of {number(now['processes'])} processes"),
        ("hits", f"{percent(now['hits'], asked)} of {number(asked)} pages, {rate('hits')}"),
        ("stored", f"{number(now['stored'])} pages, {rate('stored')}; {number(now['evicted'])} evicted"),
    ]  # fmt: skip
    if now["reserved_bytes"]:
        found.append(("writing", f"{size(now['reserved_bytes'])}, the oldest for {now['oldest_reservation']:.1f} s"))
    bad = [f"{number(now[name])} {text}" for name, text in (
        ("no_room", "found no room"), ("damaged", "damaged"), ("malformed", "malformed requests"),
        ("died", "clients ended or died")) if now[name]]  # fmt: skip
    if bad:
        found.append(("also", ", ".join(bad)))
    for name in (name for name in now if name.endswith(".waiting")):
        store = name.removesuffix(".waiting")
        state = "" if not now[f"{store}.breaker"] else "; left alone, it does not answer"
        written, read = (number(now.get(f"{store}.{what}", 0)) for what in ("written", "read"))
        dropped = now.get(f"{store}.dropped", 0)
        lost = f", {number(dropped)} not taken" if dropped else ""
        found.append((store, f"{written} pages written{lost}, {read} read, {number(now[name])} waiting{state}"))
    return found
