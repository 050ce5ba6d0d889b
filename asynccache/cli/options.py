"""The options of ``replay`` and ``stress`` as one table, and the settings of a run made from it.

A row of the table says how an option is written, how its text is parsed and what its default is. The command line's
parser, the reader of ``--config`` and the checks all come from the table. The command line wins over the environment,
the environment over the file, the file over the defaults. An option that cannot be used is refused here, by its name
and value, before anything starts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from asynccache.cli.devices import check_device
from asynccache.cli.replicas import check_replicas
from asynccache.cli.runfile import Told, cache_of, from_environment, from_file, options_of
from asynccache.cli.sidecars import PRESET, check_sidecars
from asynccache.config import EVICTION_POLICIES, CacheConfig, split_urls
from asynccache.configuration import nearest, read_file
from asynccache.core.settings import PrefetchPolicy, WritePolicy
from asynccache.errors import ConfigError
from asynccache.redaction import shown

COMPONENTS = ("full", "swa", "mamba")
WORKLOADS = ("mixed", "chat", "shared", "agent", "random")
LOOPS = ("uvloop", "asyncio")
MOST_RANKS = 64

Size = int | Literal["all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of one run, with defaults filled in; the options of the same names are described in ``OPTIONS``.

    ``trace``, ``speed`` and ``limit`` are None under ``stress``; ``workload``, ``duration`` and ``requests`` are None
    under ``replay``. ``cache``: the cache that the file of ``--config`` describes, None if it describes none; if there
    is one, the settings about the cache repeat what it says.
    """

    command: Literal["replay", "stress"]
    trace: str | None = None
    speed: float | None = None
    limit: int | None = None
    workload: str | None = None
    duration: float | None = None
    requests: int | None = None
    rate: float = 0.0
    cancel_rate: float = 0.0
    faults: float = 0.0
    components: tuple[str, ...]
    window: int
    page_size: int
    bytes_per_token: int
    layers: int
    mamba_bytes: int
    sidecars: str = ""
    device_tokens: Size
    host_tokens: Size
    swa_ratio: float
    storage: str | tuple[str, ...] | None
    concurrency: int
    decode_tokens: int
    insert_outputs: bool
    end_hints: float
    shared_hints: bool = False
    prefill_tokens_per_s: float
    write_policy: WritePolicy
    prefetch_policy: PrefetchPolicy
    eviction: str
    device: str = "cpu"
    seed: int
    loop: str | None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    replicated: str = ""
    rank_timeout: float = 30.0
    rank_delay: float = 0.0
    serve: int | None = None
    config: str | None = None
    json: str | None = None
    report: str | None = None
    quiet: bool = False
    cache: CacheConfig | None = None

    @property
    def ranks(self) -> int:
        """How many ranks there are. If there are several, each one is a process."""
        return self.tp * self.cp * self.pp

    def plain(self) -> dict[str, object]:
        """The settings as plain values for the JSON report, without secrets."""
        values: dict[str, object] = json.loads(json.dumps(asdict(self), default=lambda member: member.value))
        return {name: shown(name, value) for name, value in values.items()}


class Option(NamedTuple):
    """One row of the table.

    parse: turns the text into the value, or raises a ConfigError without the option's name; None: the option is a
        switch, on or off.
    defaults: the default by command; a command that is not a key does not have the option.
    several: the option may be given more than once.
    """

    name: str
    parse: Callable[[str], Any] | None
    defaults: Mapping[str, Any]
    metavar: str
    help: str
    several: bool = False

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError("must be an integer") from None
        if value < low:
            raise ConfigError(f"must be at least {low}")
        return value
    return parse


def _port(text: str) -> int:
    port = _integer(0)(text)
    if port > 65535:
        raise ConfigError("must be a port: 0 to 65535")
    return port


def _real(text: str, wanted: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"must be {wanted}") from None
    if not low <= value <= high:
        raise ConfigError(f"must be {wanted}")
    return value


def _share(text: str) -> float:
    return _real(text, "a share between 0 and 1", 0.0, 1.0)


def _not_negative(text: str) -> float:
    return _real(text, "a number, 0 or more", 0.0, 1e15)


def _positive(text: str) -> float:
    return _real(text, "a number above 0", 1e-9, 1e15)


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ConfigError(f"must be one of {', '.join(names)}{_nearest(text, names)}")
        return text
    return parse


def _size(none: bool) -> Callable[[str], Size]:
    words = "a number of tokens, 'all' or 'none'" if none else "a number of tokens, at least 1, or 'all'"

    def parse(text: str) -> Size:
        if text == "all":
            return "all"
        if text == "none" and none:
            return 0
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"must be {words}") from None
        if value < (0 if none else 1):
            raise ConfigError(f"must be {words}")
        return value
    return parse


def _components(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COMPONENTS:
            raise ConfigError(f"{name!r} is no component: one of {', '.join(COMPONENTS)}{_nearest(name, COMPONENTS)}")
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



def _both(value: Any) -> Mapping[str, Any]:
    return {"replay": value, "stress": value}


def _each(replay: Any, stress: Any) -> Mapping[str, Any]:
    return {"replay": replay, "stress": stress}


OPTIONS: tuple[Option, ...] = (
    Option("speed", _not_negative, {"replay": 0.0}, "X",
           "replay by the trace's clock, X times as fast; 0: as fast as the cache serves"),
    Option("limit", _integer(1), {"replay": None}, "N", "serve the first N requests only"),
    Option("workload", _choice(*WORKLOADS), {"stress": "mixed"}, "NAME", "mixed, chat, shared, agent or random"),
    Option("duration", _positive, {"stress": None}, "SECONDS",
           "admit requests for so long; 20 if --requests is not given"),
    Option("requests", _integer(1), {"stress": None}, "N", "stop after N requests"),
    Option("rate", _not_negative, {"stress": 40.0}, "R",
           "requests that arrive per second on average; 0: as fast as the cache serves"),
    Option("cancel-rate", _share, {"stress": 0.0}, "P", "share of requests that are cancelled at a random await"),
    Option("faults", _share, {"stress": 0.0}, "P",
           "of all copies and backend calls, P/2 are delayed by 1-50 ms and P/4 fail; P/4 of the backend calls corrupt "
           "bytes"),
    Option("components", _components, _each(("full",), COMPONENTS), "LIST", "full, or full with swa, mamba or both"),
    Option("window", _integer(1), _each(1024, 512), "TOKENS", "sliding window of swa"),
    Option("page-size", _integer(1), _each(512, 16), "TOKENS", "tokens in a page"),
    Option("bytes-per-token", _integer(1), _each(16, 512), "BYTES",
           "KV of one token in all layers, of full and of swa each"),
    Option("layers", _integer(1), _each(1, 4), "N", "layers in every pool"),
    Option("mamba-bytes", _integer(1), _each(65536, 65536), "BYTES", "one recurrent state in all layers"),
    Option("sidecars", check_sidecars, _both(""), "LIST",
           f"pools that use another pool's slots, as NAME:FROM:BYTES_PER_TOKEN,...; {PRESET}: compressed KV on full, "
           "which has no bytes of its own then, and compressor states on swa; none: no sidecars"),
    Option("device-tokens", _size(none=False), _each(1 << 20, 49152), "N|all",
           "room in L1; all (replay only): so much that nothing is evicted"),
    Option("host-tokens", _size(none=True), _each(1 << 23, 98304), "N|all|none",
           "room in L2, as for L1; none: no host tier"),
    Option("swa-ratio", _share, _both(0.5), "R", "room for swa as a share of the room for full"),
    Option("storage", _storage, _each(None, "memory:?capacity=1GiB"), "URL",
           "L3: none, file:PATH?capacity=10GiB, memory:, redis://HOST, rediss://HOST, s3://BUCKET/PREFIX, gs://..., "
           "az://..., mooncake://HOST:PORT; given again: a farther store", several=True),
    Option("concurrency", _integer(1), _each(16, 32), "N", "requests that run at the same time"),
    Option("decode-tokens", _integer(0), _both(256), "N", "decode at most N tokens of each output"),
    Option("insert-outputs", None, _each(False, True), "", "commit the decoded tokens as well"),
    Option("end-hints", _share, _each(0.0, 0.5), "P",
           "share of conversations whose last request tells the cache that it is the last"),
    Option("shared-hints", None, {"replay": False}, "",
           "those last requests also tell how much of their prompt later requests share"),
    Option("prefill-tokens-per-s", _positive, _both(8000.0), "X",
           "tokens that the modelled engine computes per second, for time to first token"),
    Option("write-policy", _choice(*(p.value for p in WritePolicy)), _both("write_through"), "NAME",
           ", ".join(p.value for p in WritePolicy)),
    Option("prefetch-policy", _choice(*(p.value for p in PrefetchPolicy)), _each("wait_complete", "timeout"), "NAME",
           ", ".join(p.value for p in PrefetchPolicy)),
    Option("eviction", _choice(*EVICTION_POLICIES), _both("lru"), "NAME", ", ".join(EVICTION_POLICIES)),
    Option("device", check_device, _both("cpu"), "cpu|cuda:N", "where L1 is; asynccache doctor describes the GPUs"),
    Option("seed", _integer(0), _both(0), "N", "seed of everything that is drawn at random"),
    Option("loop", _choice(*LOOPS), _both(None), "NAME", "event loop: uvloop (default if installed) or asyncio"),
    Option("tp", _integer(1), _both(1), "N", "tensor parallel ranks; each is a process and holds a part of each page"),
    Option("cp", _integer(1), _both(1), "N", "context parallel ranks; as for --tp"),
    Option("pp", _integer(1), _both(1), "N", "pipeline stages; each rank holds the layers of its stage"),
    Option("replicated", check_replicas, _both(""), "LIST",
           "pools that every rank holds whole, as NAME, NAME:tp or NAME:cp; one of the ranks writes them if the store "
           "is shared"),
    Option("rank-timeout", _positive, _both(30.0), "SECONDS", "a rank that is silent for so long has failed"),
    Option("rank-delay", _not_negative, _both(0.0), "MS",
           "each rank waits a random time, up to MS milliseconds, before each batch"),
    Option("serve", _port, _both(None), "PORT",
           "serve /metrics, /healthz, /statistics and /explain at 127.0.0.1:PORT during the run; 0: any free port"),
    Option("config", str, _both(None), "FILE", "a TOML file with these options by name"),
    Option("json", str, _both(None), "PATH|-", "write the report as JSON"),
    Option("report", str, _both(None), "FILE.html", "write the report as one page with plots"),
    Option("quiet", None, _both(False), "", "neither a live display nor a summary"),
)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of ``command`` to ``parser``. Their values stay text until ``resolve_options``."""
    for option in OPTIONS:
        if command not in option.defaults:
            continue
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
    command: Literal["replay", "stress"], given: Mapping[str, object], env: Mapping[str, str] | None = None
) -> RunSettings:
    """The settings of a run.

    ``given``: the command line's options by field, as text; None: not given. ``env``: the environment (default: the
    process's own). A file that ``--config`` names is read as well; it may also describe the cache.

    Raises:
        ConfigError: an option, or a setting in the file, is unknown or cannot be used.
    """
    env = os.environ if env is None else env
    options = {o.field: o for o in OPTIONS if command in o.defaults}
    told, cache = _told(command, given, env, options)
    values = {o.field: o.defaults[command] for o in options.values()} | told
    values |= {} if cache is None else options_of(cache)
    values["write_policy"] = WritePolicy(values["write_policy"])
    values["prefetch_policy"] = PrefetchPolicy(values["prefetch_policy"])
    trace = given.get("trace")
    return _checked(RunSettings(command=command, trace=None if trace is None else str(trace), cache=cache, **values))


def _told(
    command: str, given: Mapping[str, object], env: Mapping[str, str], options: Mapping[str, Option]
) -> tuple[dict[str, Any], CacheConfig | None]:
    """The values that the file, the environment and the command line give, where a later one of these wins; and the
    cache that the file describes, None if it describes none."""
    names = {o.name: o.field for o in options.values() if o.name != "config"}
    path = given.get("config")
    file = read_file(str(path), f"--config={path}") if path else None

    def parse(field: str, value: object, where: str) -> Any:
        return _parsed(options[field], value, where)

    told = Told({}, []) if file is None else from_file(file, command, names, parse)
    above = from_environment(env, command, names, parse)
    if problems := told.problems + above.problems:
        raise ConfigError("\n".join(problems))
    values = told.values | above.values
    for field, option in options.items():
        if (text := given.get(field)) is not None:
            values[field] = _parsed(option, text, f"--{option.name}")
    return values, None if file is None else cache_of(file, env, values)


def _parsed(option: Option, value: object, where: str) -> Any:
    if option.parse is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}={value!r} must be true or false")
        return value
    if isinstance(value, (bool, dict)):
        raise ConfigError(f"{where}={value!r} must be a number or a string")
    if option.several and isinstance(value, list):
        return _together([_parsed(option, one, where) for one in value])
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return option.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{where}={shown(option.field, text)}: {error}") from None


def _together(values: Sequence[str | tuple[str, ...] | None]) -> str | tuple[str, ...] | None:
    urls = [url for value in values if value is not None for url in ((value,) if isinstance(value, str) else value)]
    return None if not urls else urls[0] if len(urls) == 1 else tuple(urls)


def _nearest(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    hint = nearest(name, names)
    return f"; {hint}" if hint else ""


def suggest(command: str, word: str) -> str:
    """For an option that ``command`` does not have: "; did you mean ...", or nothing if no option is like it."""
    names = [f"--{o.name}" for o in OPTIONS if command in o.defaults]
    return _nearest(word.split("=")[0], names)


def _checked(settings: RunSettings) -> RunSettings:
    if settings.command == "stress":
        for name in ("device_tokens", "host_tokens"):
            if getattr(settings, name) == "all":
                raise ConfigError(f"--{name.replace('_', '-')}=all works with replay only: "
                                  "a stress run has no end, give a number of tokens")
    if settings.storage is not None and settings.host_tokens == 0:
        where = shown("storage", settings.storage)
        raise ConfigError(f"--storage={where} needs a host tier, and --host-tokens is none")
    if settings.ranks > 1:
        _check_ranks(settings)
    return settings


def _check_ranks(settings: RunSettings) -> None:
    count = f"there are {settings.ranks} ranks, --tp {settings.tp} --cp {settings.cp} --pp {settings.pp}"
    if settings.ranks > MOST_RANKS:
        raise ConfigError(f"{count}: this command runs {MOST_RANKS} at most")
