"""The options of ``replay`` and ``stress``, and the settings of a run made from them.

Each option is declared once, as a field of ``RunSettings``: how it is written, how its text is parsed and what its
default is. The command line's parser and the checks come from that. An option that cannot be used is refused here, by
its name and value, before anything starts.

The file of ``--config`` describes a cache, as ``asynccache.load_config`` reads it, and the run uses that cache.

``--sidecars`` names pools that use the slots of another pool (the engine fills and verifies them like every pool), and
``--replicated`` the pools that every rank holds whole instead of a part.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from asynccache.checks import nearest
from asynccache.cli.parsing import NOT_NEGATIVE, POSITIVE, SHARE, Parse, check_device, choice, integer, port
from asynccache.config import (
    COMPONENTS,
    CacheConfig,
    Component,
    Full,
    Mamba,
    Replicated,
    Sidecar,
    SlidingWindow,
    eviction_policies,
    split_urls,
)
from asynccache.configuration import load_config
from asynccache.core.settings import PrefetchPolicy, WritePolicy
from asynccache.errors import ConfigError
from asynccache.redaction import shown
from asynccache.settings import Settings, fields_of

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


COMMANDS = ("replay", "stress")
SHARED = ("page_size", "storage", "write_policy", "prefetch_policy", "eviction", "device")
"""The options that have a setting of the same name in the file of ``--config``. An option that is given goes before the
file."""
DESCRIBED = ("components", "window", "bytes_per_token", "layers", "mamba_bytes", "sidecars", "device_tokens",
             "host_tokens", "swa_ratio")
"""The options that are refused beside ``--config``, because its file describes the components."""
WORKLOADS = ("mixed", "chat", "shared", "agent", "random")
LOOPS = ("uvloop", "asyncio")
MOST_RANKS = 64

Command = Literal["replay", "stress"]
Size = int | Literal["all"]


def _size(words: str, low: int) -> Callable[[str], Size]:
    def parse(text: str) -> Size:
        if text == "all":
            return "all"
        try:
            value = 0 if text == "none" else int(text)
        except ValueError:
            raise ConfigError(f"must be {words}") from None
        if value < low:
            raise ConfigError(f"must be {words}")
        return value
    return parse


def _components(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COMPONENTS:
            raise ConfigError(f"{name!r} is no component: one of {', '.join(COMPONENTS)}{nearest(name, COMPONENTS)}")
    if names[0] != "full" or len(set(names)) < len(names):
        raise ConfigError("must begin with full; swa and mamba may follow, each once")
    return tuple(name for name in COMPONENTS if name in names)


def _storage(text: str) -> str | tuple[str, ...] | None:
    urls = split_urls(text)
    if urls == ("none",):
        return None
    if not all(":" in url for url in urls):
        raise ConfigError("must be 'none' or a URL such as memory: or file:/var/kv?capacity=10GiB")
    return urls[0] if len(urls) == 1 else urls


def _option(
    parse: Parse | None, metavar: str, text: str | Callable[[], str], *, several: bool = False, otherwise: Any = None,
    **defaults: Any,
) -> Any:
    """Declare a field of ``RunSettings`` as an option; see ``Option``. ``defaults``: by command, or ``both``.
    ``otherwise``: the field's value under a command that does not have the option."""
    if "both" in defaults:
        defaults = dict.fromkeys(COMMANDS, defaults["both"])
    return field(default=otherwise, metadata={"option": (parse, defaults, metavar, text, several)})


def _whole(cls: type[Settings], name: str) -> Parse:
    """Return the parser of an option that has the bounds of a setting of the cache."""
    (kind,) = fields_of(cls)[name].kinds
    return integer(kind.ge, kind.le)


def _policy(names: Callable[[], tuple[str, ...]], **defaults: Any) -> Any:
    """Declare an option for a setting of the cache whose value is one of ``names``."""
    return _option(lambda text: choice(*names())(text), "NAME", lambda: ", ".join(names()), **defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of one run, with defaults filled in.

    ``cache``: the cache that the file of ``--config`` describes; None without that option. If there is one, the
    settings about the cache repeat what it says.
    """

    command: Command
    trace: str | None = None
    speed: float | None = _option(
        NOT_NEGATIVE, "X", "replay by the trace's clock, X times as fast; 0: as fast as the cache serves", replay=0.0)
    limit: int | None = _option(integer(1), "N", "serve the first N requests only", replay=None)
    workload: str | None = _option(choice(*WORKLOADS), "NAME", "mixed, chat, shared, agent or random", stress="mixed")
    duration: float | None = _option(
        POSITIVE, "SECONDS", "admit requests for so long; 20 if --requests is not given", stress=None)
    requests: int | None = _option(integer(1), "N", "stop after N requests", stress=None)
    rate: float = _option(
        NOT_NEGATIVE, "R",
        "requests that arrive per second on average; 0: as fast as the cache serves", stress=40.0, otherwise=0.0)
    cancel_rate: float = _option(
        SHARE, "P", "share of requests that are cancelled at a random await", stress=0.0, otherwise=0.0)
    faults: float = _option(
        SHARE, "P",
        "of all copies and backend calls, P/2 are delayed by 1-50 ms and P/4 fail; P/4 of the backend calls "
        "corrupt bytes",
        stress=0.0, otherwise=0.0)
    components: tuple[str, ...] = _option(
        _components, "LIST", "full, or full with swa, mamba or both", replay=("full",), stress=tuple(COMPONENTS))
    window: int = _option(
        _whole(SlidingWindow, "window"), "TOKENS", "sliding window of swa", replay=1024, stress=512)
    page_size: int = _option(_whole(CacheConfig, "page_size"), "TOKENS", "tokens in a page", replay=512, stress=16)
    bytes_per_token: int = _option(
        integer(1), "BYTES", "KV of one token in all layers, of full and of swa each", replay=16, stress=512)
    layers: int = _option(_whole(Full, "layers"), "N", "layers in every pool", replay=1, stress=4)
    mamba_bytes: int = _option(
        _whole(Mamba, "state_bytes"), "BYTES", "one recurrent state in all layers", both=65536)
    sidecars: str = _option(
        check_sidecars, "LIST",
        f"pools that use another pool's slots, as NAME:FROM:BYTES_PER_TOKEN,...; {PRESET}: compressed KV on full, "
        "which has no bytes of its own then, and compressor states on swa; none: no sidecars",
        both="")
    device_tokens: Size = _option(
        _size("a number of tokens, at least 1, or 'all'", 1), "N|all",
        "room in L1; all (replay only): so much that nothing is evicted", replay=1 << 20, stress=49152)
    host_tokens: Size = _option(
        _size("a number of tokens, 'all' or 'none'", 0), "N|all|none",
        "room in L2, as for L1; none: no host tier", replay=1 << 23, stress=98304)
    swa_ratio: float = _option(SHARE, "R", "room for swa as a share of the room for full", both=0.5)
    storage: str | tuple[str, ...] | None = _option(
        _storage, "URL",
        "L3: none, file:PATH?capacity=10GiB, memory:, redis://HOST, rediss://HOST, s3://BUCKET/PREFIX, gs://..., "
        "az://..., mooncake://HOST:PORT; given again: a farther store",
        replay=None, stress="memory:?capacity=1GiB", several=True)
    concurrency: int = _option(integer(1), "N", "requests that run at the same time", replay=16, stress=32)
    decode_tokens: int = _option(integer(0), "N", "decode at most N tokens of each output", both=256)
    insert_outputs: bool = _option(None, "", "commit the decoded tokens as well", replay=False, stress=True)
    verify: bool = _option(None, "", "compare every page that the cache hands out with what was computed", both=True)
    end_hints: float = _option(
        SHARE, "P", "share of conversations whose last request tells the cache that it is the last",
        replay=0.0, stress=0.5)
    shared_hints: bool = _option(
        None, "", "those last requests also tell how much of their prompt later requests share",
        replay=False, otherwise=False)
    prefill_tokens_per_s: float = _option(
        POSITIVE, "X", "tokens that the modelled engine computes per second, for time to first token", both=8000.0)
    write_policy: WritePolicy = _policy(lambda: tuple(one.value for one in WritePolicy), both="write_through")
    prefetch_policy: PrefetchPolicy = _policy(
        lambda: tuple(one.value for one in PrefetchPolicy), replay="wait_complete", stress="timeout")
    eviction: str = _policy(eviction_policies, both="p2c")
    device: str = _option(check_device, "cpu|cuda:N", "where L1 is; asynccache doctor describes the GPUs", both="cpu")
    seed: int = _option(integer(0), "N", "seed of everything that is drawn at random", both=0)
    loop: str | None = _option(
        choice(*LOOPS), "NAME", "event loop: uvloop (default if installed) or asyncio", both=None)
    tp: int = _option(
        integer(1), "N", "tensor parallel ranks; each is a process and holds a part of each page", both=1)
    cp: int = _option(integer(1), "N", "context parallel ranks; as for --tp", both=1)
    pp: int = _option(integer(1), "N", "pipeline stages; each rank holds the layers of its stage", both=1)
    replicated: str = _option(
        check_replicas, "LIST",
        "pools that every rank holds whole, as NAME, NAME:tp or NAME:cp; one of the ranks writes them if the "
        "store is shared",
        both="")
    rank_timeout: float = _option(POSITIVE, "SECONDS", "a rank that is silent for so long has failed", both=30.0)
    rank_delay: float = _option(
        NOT_NEGATIVE, "MS", "each rank waits a random time, up to MS milliseconds, before each batch", both=0.0)
    serve: int | None = _option(
        port, "PORT",
        "serve /metrics, /healthz, /statistics and /explain at 127.0.0.1:PORT during the run; 0: any free port",
        both=None)
    config: str | None = _option(str, "FILE", "a TOML file that describes the cache; see asynccache config", both=None)
    json: str | None = _option(
        str, "PATH|-", "write the report as JSON to a file, or to standard output (-)", both=None)
    report: str | None = _option(str, "FILE.html", "write the report as one page with plots", both=None)
    quiet: bool = _option(None, "", "neither a live display nor a summary", both=False)
    cache: CacheConfig | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks. If there are several, each one is a process."""
        return self.tp * self.cp * self.pp

    def plain(self) -> dict[str, object]:
        """The settings as plain values for the JSON report, without secrets."""
        return {name: shown(name, value) for name, value in msgspec.to_builtins(self).items()}


class Option(NamedTuple):
    """An option of the command line.

    parse: turns the text into the value, or raises a ConfigError without the option's name; None: the option is a
        switch, on or off.
    defaults: the default by command; a command that is not a key does not have the option.
    text: the help, or a function that returns it, because policies may be added later.
    several: the option may be given more than once.
    """

    name: str
    parse: Parse | None
    defaults: Mapping[str, Any]
    metavar: str
    text: str | Callable[[], str]
    several: bool = False

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def help(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()


OPTIONS = tuple(Option(one.name.replace("_", "-"), *one.metadata["option"]) for one in fields(RunSettings)
                if "option" in one.metadata)


def options_for(command: str) -> dict[str, Option]:
    """Return the options of ``command`` by field."""
    return {option.field: option for option in OPTIONS if command in option.defaults}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of ``command`` to ``parser``. Options' values stay text until ``resolve_options``."""
    if command == "replay":
        parser.add_argument("trace", metavar="TRACE", help="a trace in the Mooncake format (JSON lines)")
    for option in options_for(command).values():
        default = option.defaults[command]
        if option.name == "quiet":
            parser.add_argument("--quiet", action="store_true", default=None, help=option.help)
        elif option.parse is None:
            parser.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, default=None,
                                help=f"{option.help} (default: {'yes' if default else 'no'})")
        else:
            shown = "" if default in (None, "") else f" (default: {_written(default)})"
            parser.add_argument(f"--{option.name}", metavar=option.metavar, default=None,
                                action="append" if option.several else "store",
                                help=(option.help + shown).replace("%", "%%"))


def _written(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def resolve_options(
    command: Command, given: Mapping[str, object], env: Mapping[str, str] | None = None
) -> RunSettings:
    """The settings of a run.

    ``given``: the command line's options by field, as text; None: not given. ``env``: the environment (default: the
    process's own), which is read with the file of ``--config``.

    Raises:
        ConfigError: an option, or a setting in the file, cannot be used.
    """
    options = options_for(command)
    values = {name: _parsed(option, given[name]) for name, option in options.items() if given.get(name) is not None}
    path = values.get("config")
    cache = None if path is None else cache_of(path, os.environ if env is None else env, values)
    values = {name: option.defaults[command] for name, option in options.items()} | values
    values |= {} if cache is None else options_of(cache)
    values |= {"write_policy": WritePolicy(values["write_policy"]),
               "prefetch_policy": PrefetchPolicy(values["prefetch_policy"])}
    trace = given.get("trace")
    return _checked(RunSettings(command=command, trace=None if trace is None else str(trace), cache=cache, **values))


def cache_of(path: str, env: Mapping[str, str], given: Mapping[str, Any]) -> CacheConfig:
    """The cache that the file ``path`` describes. ``given``: the run's options, which win over the file where a cache
    has the same setting.

    Raises:
        ConfigError: the cache cannot be used, or ``given`` has an option that only the file may decide.
    """
    for name in DESCRIBED:
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')}={given[name]}: {path} describes the components; "
                              "change them there or by environment variables")
    return load_config(path, env=env, **{name: given[name] for name in SHARED if name in given})


def options_of(config: CacheConfig) -> dict[str, Any]:
    """The values that the run's options would have for the cache ``config``, as far as options can describe it."""
    found: dict[str, Any] = {name: getattr(config, name) for name in SHARED}
    found["components"] = tuple(component.pool for component in config.components)
    for component in config.components:
        if isinstance(component, Full):
            found |= {name: getattr(component, name)
                      for name in ("bytes_per_token", "layers", "device_tokens", "host_tokens")}
        elif isinstance(component, SlidingWindow):
            found["window"] = component.window
        else:
            found["mamba_bytes"] = component.state_bytes
    return found


def _parsed(option: Option, given: Any) -> Any:
    """Return the value of an option that was given as text, or as a list of texts if it may be given more than once.
    The value of a switch is returned as it is."""
    if option.parse is None:
        return given
    if option.several and isinstance(given, list):
        return _together([_parsed(option, one) for one in given])
    try:
        return option.parse(str(given))
    except ConfigError as error:
        raise ConfigError(f"--{option.name}={shown(option.field, str(given))}: {error}") from None


def _together(values: Sequence[str | tuple[str, ...] | None]) -> str | tuple[str, ...] | None:
    urls = [url for value in values if value is not None for url in ((value,) if isinstance(value, str) else value)]
    return None if not urls else urls[0] if len(urls) == 1 else tuple(urls)


def suggest(command: str, word: str) -> str:
    """For an option that ``command`` does not have: "; did you mean ...", or nothing if no option is like it."""
    names = [f"--{option.name}" for option in options_for(command).values()]
    return nearest(word.split("=")[0], names)


def _checked(settings: RunSettings) -> RunSettings:
    if settings.command == "stress":
        for name in ("device_tokens", "host_tokens"):
            if getattr(settings, name) == "all":
                raise ConfigError(f"--{name.replace('_', '-')}=all works with replay only: "
                                  "a stress run has no end, give a number of tokens")
    if settings.storage is not None and settings.host_tokens == 0:
        where = shown("storage", settings.storage)
        raise ConfigError(f"--storage={where} needs a host tier, and --host-tokens is none")
    if settings.ranks > MOST_RANKS:
        raise ConfigError(f"there are {settings.ranks} ranks, --tp {settings.tp} --cp {settings.cp} --pp "
                          f"{settings.pp}: this command runs {MOST_RANKS} at most")
    return settings
