"""The options of every command, each declared once, as a field of a ``Settings`` struct; and those of ``replay`` and
``stress``, with the settings of a run made from them.

A field with a help text is an option: its annotation has its type, its bounds, its help and how it is written (see
``option``), and its default is the option's. The command line's parser is made from that, and what is given is read and
checked by the same declaration as files, the environment and Python.

An option that cannot be used is refused here, by its name and value, before anything starts. The file of ``--config``
describes a cache, as ``asynccache.load_config`` reads it, and the run uses that cache. ``--sidecars`` names pools that
use the slots of another pool (the engine fills and verifies them like every pool), and ``--replicated`` the pools that
every rank holds whole instead of a part.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import msgspec
from msgspec import Meta

from asynccache import checks
from asynccache.cli.traces import CONVERSATIONS, MOST_BLOCK
from asynccache.config import (
    COMPONENTS,
    MOST_LAYERS,
    MOST_PAGE,
    CacheConfig,
    Full,
    SlidingWindow,
    eviction_policies,
    split_urls,
)
from asynccache.configuration import load_config
from asynccache.core.settings import PrefetchPolicy, WritePolicy
from asynccache.errors import ConfigError
from asynccache.memory.device import parse_device
from asynccache.redaction import shown
from asynccache.settings import Amount, Count, Field, Settings, Share, fields_of

PRESET = "deepseek-v4"
"""The name of the sidecars of a model of DeepSeek-V4's kind: ``run_cache.sidecars``."""
MOST = 1e15
Rate = Annotated[float, Meta(gt=0, le=MOST)]
"""A number above 0, such as a rate or a time."""
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Concurrency = Annotated[int, Meta(ge=1, le=1 << 16)]
"""How many at the same time: each takes memory from the beginning."""


def option(metavar: str, text: str, **extra: Any) -> Meta:
    """Declare an option. ``text``: its help.

    ``extra``: ``argument`` is True for a positional argument, False for one that may be left out. ``const`` is the
    value of the option when it is given without one. With ``several`` it may be repeated, and is a tuple, or ``parse``
    gets a line for each. Only the command ``only`` has it. ``written`` is the default as the help shows it. A command's
    name stands for the metavar and the help that it has there instead. ``parse`` and ``choices`` are those of
    ``Field``.
    """
    return Meta(description=text, extra={"metavar": metavar, **extra})


Json = Annotated[str | None, option("PATH|-", "print one JSON document in place of the text; with a PATH, write it to "
                                              "that file and print the text", const="-")]
Quiet = Annotated[bool, option("", "print neither progress nor a summary", const=True)]


def parsed_device(name: str, text: str) -> str:
    """Return ``text``, if it can be the name of a device; whether there is such a device is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        parse_device(text)
    except ConfigError as error:
        raise ConfigError(f"{name}={text}: {error}") from None
    return text


class CommandOptions(Settings, frozen=True, kw_only=True):
    """The options of one command, or of several that differ in a few."""

    changed: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """By command, the defaults that differ from those of the fields."""
    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The titles under which the help shows options; options without a title come first."""

    @classmethod
    def fields(cls, command: str = "") -> dict[str, Field]:
        """Return the options of ``command`` by name."""
        return {name: field for name, field in fields_of(cls).items()
                if field.meaning and field.extra.get("only", command) == command}  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, command: str = "") -> None:
        """Add the options of ``command`` to ``parser``. What is given stays text until ``read``."""
        defaults, fields = cls.changed.get(command, {}), cls.fields(command)
        places: dict[str, Any] = {}
        for title, names in cls.groups.items():
            if here := [name for name in names if name in fields]:
                places |= dict.fromkeys(here, parser.add_argument_group(title))
        if places:  # a list of forty options would take a screen above the groups
            words = [field.extra["metavar"] for field in fields.values() if "argument" in field.extra]
            parser.usage = " ".join(("%(prog)s [options]", *words))
        for name in dict.fromkeys((*places, *fields)):
            field, place = fields[name], places.get(name, parser)
            flag, default, extra = f"--{name.replace('_', '-')}", defaults.get(name, field.default), field.extra
            metavar, meaning = extra.get(command, (extra["metavar"], field.meaning))
            text, choices = meaning.replace("%", "%%"), ", ".join(field.choices)
            if "argument" in extra:
                place.add_argument(name, metavar=metavar, help=text, choices=field.choices or None,
                                    nargs=None if extra["argument"] else "?")
                continue
            if isinstance(default, bool):
                action: Any = "store_true" if "const" in extra else argparse.BooleanOptionalAction
                text += "" if "const" in extra else f" (default: {'yes' if default else 'no'})"
                place.add_argument(flag, action=action, default=None, help=text)
                continue
            many = default if isinstance(default, tuple) else () if field.required or default is None else (default,)
            texts = [f"{one:g}" if isinstance(one, float) else str(getattr(one, "value", one)) for one in many]
            written = extra.get("written", ",".join(texts))
            text += (f": {choices}" if choices else "") + (f" (default: {written})" if written else "")
            kind = {"nargs": "?", "const": extra["const"]} if "const" in extra else {
                "action": "append" if "several" in extra else "store"}
            place.add_argument(flag, metavar=metavar, help=text, required=field.required, **kind)

    @classmethod
    def values(cls, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the options of ``command`` that were given, and its own defaults. ``given``: the text of
        each, or None.

        Raises:
            ConfigError: a text cannot be used; the message names the option, the text and what it must be.
        """
        found = dict(cls.changed.get(command, {}))
        for name, field in cls.fields(command).items():
            if (text := given.get(name)) is not None:
                label = field.extra["metavar"] if "argument" in field.extra else f"--{name.replace('_', '-')}"
                if isinstance(text, bool):
                    found[name] = text
                elif "several" in field.extra and "parse" not in field.extra:
                    texts = text if isinstance(text, list) else [text]
                    found[name] = field.check(label, [one for one in texts if one])  # an empty one names none
                else:
                    found[name] = field.read(label, "\n".join(text) if isinstance(text, list) else text)
        return found

    @classmethod
    def read(cls, command: str, given: Mapping[str, Any]) -> Self:
        """Return the options of ``command``. Raises ConfigError: as ``values``, or they do not fit together."""
        return cls(**cls.values(command, given))


BlockSize = Annotated[int, Meta(ge=1, le=MOST_BLOCK)]
TRACE = "a trace of Mooncake's, Qwen-Bailian's or AgentX's format; .gz, or a folder of files"
BLOCK_SIZE = "tokens of a block, if the records do not say it: 512, or 16 for Qwen-Bailian and 64 for AgentX"
CONVERSATIONS_OPEN = f"conversations of an AgentX trace that are open at the same time: {CONVERSATIONS}"

Command = Literal["replay", "stress"]
Loop = Literal["uvloop", "asyncio"]
Workload = Literal["mixed", "chat", "shared", "agent", "random"]
Size = int | Literal["all"]
LOOPS: tuple[str, ...] = get_args(Loop)
WORKLOADS: tuple[str, ...] = get_args(Workload)
MOST_RANKS = 64
DURATION = 20.0
"""Seconds of a ``stress`` run that was told neither ``--duration`` nor ``--requests``."""
SHARED = ("page_size", "storage", "write_policy", "prefetch_policy", "eviction", "device")
"""The options that have a setting of the same name in the file of ``--config``. An option that is given goes before the
file."""
DESCRIBED = ("components", "window", "bytes_per_token", "layers", "mamba_bytes", "sidecars", "device_tokens",
             "host_tokens", "swa_ratio")
"""The options that are refused beside ``--config``, because its file describes the components."""
ROOM = {"device_tokens": 131_072, "host_tokens": 262_144}
"""Room for tokens on device and host in ``replay``: any request of a published trace fits. ``plan`` has the same
device, and the same host as its smallest. The cache of ``stress`` is smaller, so that 20 seconds fill it."""
PREFILL_RATE = 8000.0
EVICTION = "p2c"


def loop_factory(name: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The function that makes the event loop that ``--loop`` names. With None it is uvloop's if that is installed; if
    it is not, the result is None, which stands for asyncio's default.

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


def _size(name: str, text: str) -> Size:
    least = 1 if name == "--device-tokens" else 0
    if text == "all":
        return "all"
    value = 0 if text == "none" else int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if value < least:
        raise ConfigError(f"{name}={text} must be a number of tokens, at least {least}, or 'all'"
                          f"{'' if least else ', or none'}")
    return value


def _components(name: str, text: str) -> tuple[str, ...]:
    names = [checks.choice(name, one.strip(), COMPONENTS) for one in text.split(",")]
    if names[0] != "full" or len(set(names)) < len(names):
        raise ConfigError(f"{name}={text} must begin with full; swa and mamba may follow, each once")
    return tuple(one for one in COMPONENTS if one in names)


def _storage(name: str, text: str) -> str | tuple[str, ...] | None:
    urls = [url for line in text.split("\n") for url in split_urls(line) if url != "none"]
    if not all(":" in url for url in urls):
        raise ConfigError(f"{name}={checks.shown(text)} must be 'none' or a URL such as memory: or "
                          "file:/var/kv?capacity=10GiB")
    return tuple(urls) if len(urls) > 1 else urls[0] if urls else None


class RunSettings(CommandOptions, frozen=True, kw_only=True):
    """All settings of one run, with defaults filled in, also for options that only the other command has.
    """

    changed: ClassVar[Mapping[str, Mapping[str, Any]]] = {"replay": {"workload": None, "rate": 0.0, **ROOM}}
    groups: ClassVar[Mapping[str, Sequence[str]]] = {
        "the load": ("speed", "limit", "block_size", "conversations", "workload", "duration", "requests", "rate",
                     "concurrency", "decode_tokens", "insert_outputs", "end_hints", "shared_hints",
                     "prefill_tokens_per_s", "cancel_rate", "faults", "seed"),
        "the cache": ("config", "device_tokens", "host_tokens", "page_size", "bytes_per_token", "layers", "eviction",
                      "write_policy", "device", "loop"),
        "storage": ("storage", "prefetch_policy"),
        "windows, recurrent states and sidecars": ("components", "window", "swa_ratio", "mamba_bytes", "sidecars"),
        "several ranks": ("tp", "cp", "pp", "replicated", "rank_timeout", "rank_delay"),
        "what is shown and written": ("verify", "serve", "json", "report", "quiet"),
    }

    command: Command
    trace: Annotated[str | None, option("TRACE", TRACE, argument=True, only="replay")] = None
    speed: Annotated[NotNegative | None, option(
        "X", "replay by the trace's clock, X times as fast; 0: as fast as the cache serves", only="replay")] = 0.0
    limit: Annotated[Count | None, option("N", "serve the first N requests only", only="replay")] = None
    block_size: Annotated[BlockSize | None, option("TOKENS", BLOCK_SIZE, only="replay")] = None
    conversations: Annotated[Concurrency | None, option("N", CONVERSATIONS_OPEN, only="replay")] = None
    workload: Annotated[Workload | None, option("NAME", "what is asked for", only="stress")] = "mixed"
    duration: Annotated[Rate | None, option(
        "SECONDS", "admit requests for so long; 20 if --requests is not given", only="stress")] = None
    requests: Annotated[Count | None, option("N", "stop after N requests", only="stress")] = None
    rate: Annotated[NotNegative, option(
        "R", "requests that arrive per second on average; 0: as fast as the cache serves", only="stress")] = 20.0
    cancel_rate: Annotated[Share, option(
        "P", "share of requests that are cancelled at a random await", only="stress")] = 0.0
    faults: Annotated[Share, option(
        "P", "of all copies and backend calls, P/2 are delayed by 1-50 ms and P/4 fail; P/4 of the backend calls "
             "corrupt bytes", only="stress")] = 0.0
    components: Annotated[tuple[str, ...], option(
        "LIST", "full, or full with swa, mamba or both", parse=_components)] = ("full",)
    window: Annotated[Count, option("TOKENS", "sliding window of swa")] = 512
    page_size: Annotated[int, Meta(ge=1, le=MOST_PAGE), option("TOKENS", "tokens in a page")] = 16
    bytes_per_token: Annotated[Amount, option(
        "BYTES", "bytes that stand for the KV of one token in all layers, of full and of swa each")] = 512
    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS), option("N", "layers in every pool")] = 4
    mamba_bytes: Annotated[Count, option("BYTES", "one recurrent state in all layers")] = 65536
    sidecars: Annotated[str, option(
        "LIST", f"pools that use another pool's slots, as NAME:FROM:BYTES_PER_TOKEN,...; {PRESET}: compressed KV on "
                "full, which has no bytes of its own then, and compressor states on swa; none: no sidecars",
)] = "none"
    device_tokens: Annotated[Size, option(
        "N", "tokens that the device has room for (L1)", parse=_size,
        replay=("N|all", "tokens that the device has room for (L1); all: so many that nothing is evicted"))] = 32_768
    host_tokens: Annotated[Size, option(
        "N|none", "tokens that the host has room for (L2); none: no host tier", parse=_size,
        replay=("N|all|none", "tokens that the host has room for (L2), as for L1; none: no host tier"))] = 49_152
    swa_ratio: Annotated[Share, option("R", "room for swa as a share of the room for full")] = 0.5
    storage: Annotated[str | tuple[str, ...] | None, option(
        "URL", "L3: none, file:PATH?capacity=10GiB, host:PATH, memory:, redis://HOST, rediss://HOST, "
               "s3://BUCKET/PREFIX, gs://..., az://..., mooncake://HOST:PORT; given again: a farther store",
        several=True, parse=_storage,
    )] = "memory:?capacity=1GiB"  # fmt: skip
    concurrency: Annotated[Concurrency, option("N", "requests that run at the same time")] = 32
    decode_tokens: Annotated[Amount, option("N", "decode at most N tokens of each output")] = 256
    insert_outputs: Annotated[bool, option("", "commit the decoded tokens as well")] = True
    verify: Annotated[bool, option("", "compare every page that the cache hands out with what was computed")] = True
    end_hints: Annotated[Share, option(
        "P", "share of conversations whose last request tells the cache that it is the last")] = 0.0
    shared_hints: Annotated[bool, option(
        "", "those last requests also tell how much of their prompt later requests share", only="replay")] = False
    prefill_tokens_per_s: Annotated[Rate, option(
        "X", "tokens that the modelled engine computes per second, for time to first token")] = PREFILL_RATE
    write_policy: Annotated[WritePolicy, option("NAME", "when pages are copied to L2 and L3")] = (
        WritePolicy.WRITE_THROUGH)
    prefetch_policy: Annotated[PrefetchPolicy, option("NAME", "how long a request waits for L3")] = (
        PrefetchPolicy.TIMEOUT)
    eviction: Annotated[str, option(
        "NAME", "the policy by which pages are evicted", choices=eviction_policies)] = EVICTION
    device: Annotated[str, option(
        "cpu|cuda:N", "where L1 is; asynccache doctor describes the GPUs", parse=parsed_device)] = "cpu"
    seed: Annotated[Amount, option("N", "seed of everything that is drawn at random")] = 0
    loop: Annotated[Loop | None, option("NAME", "event loop, uvloop if that is installed")] = None
    tp: Annotated[Count, option(
        "N", "tensor parallel ranks; each is a process and holds a part of each page")] = 1
    cp: Annotated[Count, option("N", "context parallel ranks; as for --tp")] = 1
    pp: Annotated[Count, option("N", "pipeline stages; each rank holds the layers of its stage")] = 1
    replicated: Annotated[str, option(
        "LIST", "pools that every rank holds whole, as NAME, NAME:tp or NAME:cp; one of the ranks writes them if the "
                "store is shared")] = "none"
    rank_timeout: Annotated[Rate, option("SECONDS", "a rank that is silent for so long has failed")] = 30.0
    rank_delay: Annotated[NotNegative, option(
        "MS", "each rank waits a random time, up to MS milliseconds, before each batch")] = 0.0
    serve: Annotated[Annotated[int, Meta(ge=0, le=65535)] | None, option(
        "PORT", "serve /metrics, /healthz, /statistics and /explain at 127.0.0.1:PORT during the run; 0: any free port",
    )] = None
    config: Annotated[str | None, option(
        "FILE", "a TOML file that describes the cache; see asynccache config")] = None
    json: Json = None
    report: Annotated[str | None, option("FILE.html", "write the report as one page with plots")] = None
    quiet: Quiet = False
    cache: CacheConfig | None = None
    """The cache that the file of ``--config`` describes; None without that option. If there is one, the settings about
    the cache repeat what it says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.storage in ("none", ""):
            self._set("storage", None)
        if self.command == "stress" and "all" in (self.device_tokens, self.host_tokens):
            name = "device" if self.device_tokens == "all" else "host"
            raise ConfigError(f"--{name}-tokens=all works with replay only: a stress run has no end, give a number of "
                              "tokens")
        if self.storage is not None and self.host_tokens == 0:
            raise ConfigError(f"--storage={shown('storage', self.storage)} needs a host tier, and --host-tokens is "
                              "none")
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"there are {self.ranks} ranks, --tp {self.tp} --cp {self.cp} --pp {self.pp}: this "
                              f"command runs {MOST_RANKS} at most")

    @property
    def ranks(self) -> int:
        """The number of ranks. If there are several, each one is a process."""
        return self.tp * self.cp * self.pp

    @property
    def admits_for(self) -> float | None:
        """For how many seconds requests are admitted; None: until there are no more."""
        if self.command == "replay" or (self.duration is None and self.requests is not None):
            return None
        return self.duration or DURATION

    def plain(self) -> dict[str, object]:
        """The settings as plain values for the JSON report, without secrets."""
        return {name: shown(name, value) for name, value in msgspec.to_builtins(self).items()}

    @classmethod
    def read(cls, command: str, given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Self:
        """The settings of a run.

        ``given``: the command line's options by field, as text; None: not given. ``env``: the environment (default: the
        process's own), which is read with the file of ``--config``.

        Raises:
            ConfigError: an option, or a setting in the file, cannot be used.
        """
        values = {"command": command, **cls.values(command, given)}
        if values.get("host_tokens") == 0 and given.get("storage") is None:
            values["storage"] = None  # a store needs a host tier, and nobody has asked for a store
        if (path := values.get("config")) is None:
            return cls(**values)
        for name in DESCRIBED:
            if given.get(name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}={given[name]}: {path} describes the components; "
                                  "change them there or by environment variables")
        own = {name: values[name] for name in SHARED if given.get(name) is not None}
        cache = load_config(path, env=os.environ if env is None else env, **own)
        values |= {name: getattr(cache, name) for name in SHARED}
        values["components"] = tuple(component.pool for component in cache.components)
        for component in cache.components:
            if isinstance(component, Full):
                names = ("bytes_per_token", "layers", "device_tokens", "host_tokens")
                values |= {name: getattr(component, name) for name in names}
            elif isinstance(component, SlidingWindow):
                values["window"] = component.window
            else:
                values["mamba_bytes"] = component.state_bytes
        return cls(cache=cache, **values)
