"""``asynccache config show|check|schema|vllm|sglang``: prints the settings that hold, whether a file can be used, the
schema of files, or what an engine needs on its command line.

``show`` prints each setting with where it came from, in a form that can be loaded again. ``check`` prints a sentence
for everything that is wrong with a file, and its exit status is 1 then. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Literal

from asynccache.cli.engine_line import engine_line
from asynccache.cli.options import CommandOptions, Json, option
from asynccache.cli.output import answer
from asynccache.config import CacheConfig, wasted
from asynccache.configuration import Loaded, as_toml, read_config, schema
from asynccache.errors import ConfigError
from asynccache.redaction import redacted, shown
from asynccache.settings import Count, parse_size

ENGINES = ("vllm", "sglang")


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``config``."""

    action: Annotated[Literal["show", "check", "schema", "vllm", "sglang"], option(
        "show|check|schema|vllm|sglang", "show: print every setting that is in effect, and where it came from; check: "
        "say whether a file can be used, and everything that is wrong with it; schema: print what a file may say, as a "
        "JSON Schema; vllm: print the JSON for vLLM's --kv-transfer-config; sglang: print the flags for SGLang's "
        "server",
        argument=True)]
    file: Annotated[str | None, option(
        "FILE", "a TOML file (default: the one that ASYNCCACHE_CONFIG names)", argument=False)] = None
    json: Json = None
    storage: Annotated[tuple[str, ...], option(
        "URL", "vllm, sglang: a store, such as file:/var/kv?capacity=500GiB; may be given several times, the nearest "
        "first", several=True)] = ()
    host: Annotated[int | None, option("SIZE", "vllm, sglang: host memory, as in 32GiB", parse=parse_size)] = None
    namespace: Annotated[str | None, option(
        "TEXT", "vllm, sglang: what stands for the weights in keys (default: a digest of their files)")] = None
    compatible_with: Annotated[str | None, option(
        "VERSION", "vllm, sglang: the version of the engine whose pages are as this one's, in keys (default: its own)",
    )] = None
    block_size: Annotated[Count | None, option(
        "TOKENS", "vllm, sglang: tokens in a page of the stores (default: vLLM's block; 64)")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action in ENGINES and (self.file is not None or self.json):
            raise ConfigError(f"config {self.action} takes no {'FILE' if self.file is not None else '--json'}")
        for name in ("storage", "host", "namespace", "block_size", "compatible_with"):
            if self.action not in ENGINES and getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is for config {' and config '.join(ENGINES)}")


def execute(options: Options) -> int:
    """Run the command; returns its exit status.

    Raises:
        ConfigError: ``check`` was given no file, or an engine cannot use what was given.
    """
    if options.action in ENGINES:
        line = engine_line(options.action, options.storage, options.host, options.namespace, options.block_size,
                           options.compatible_with)
        print(line.text)
        print("\n".join(f"asynccache: assumed: {one}" for one in line.assumed), file=sys.stderr)
        return 0
    if options.action == "schema":
        answer(schema(), json.dumps(schema(), indent=2), options.json)
        return 0
    file = options.file or os.environ.get("ASYNCCACHE_CONFIG")
    if options.action == "check" and file is None:
        raise ConfigError("config check needs a FILE, or ASYNCCACHE_CONFIG that names one")
    loaded = read_config(file)
    problems = [*loaded.problems, *(_storage_problems(loaded) if options.action == "check" else ())]
    warnings, rooms = list[str](), list[str]()
    if options.action == "check" and not problems:
        assert loaded.config is not None
        warnings, rooms = [*_stale(loaded.config), *wasted(loaded.config.core())], list(loaded.config.rooms)
    for problem in (*problems, *(f"warning: {warning}" for warning in warnings)):
        print(f"asynccache: {problem}", file=sys.stderr)
    if options.action == "check":
        text = None if problems else "\n".join((f"{file}: can be used", *(f"  {line}" for line in rooms)))
        answer({"file": file, "ok": not problems, "problems": problems, "warnings": warnings, "rooms": rooms}, text,
               options.json)
    elif not problems:
        values = [{"setting": ".".join(path), "value": shown(path[-1], value), "from": origin}
                  for path, value, origin in loaded.values]
        answer(values, as_toml(loaded.values).removesuffix("\n"), options.json)
    return 1 if problems else 0


def _stale(config: CacheConfig) -> Iterator[str]:
    kept = [url for url in config.stores if not url.startswith("memory:")]
    if kept and not re.search(r"[0-9a-f]{16}", config.model):
        yield (f"model={config.model!r} names no weights, and {redacted(kept[0])} outlives the process: with other "
               f"weights under this name, old KV is found and is wrong. Use model = "
               f"asynccache.storage.weights_digest(folder)")


def _storage_problems(loaded: Loaded) -> Iterator[str]:
    """Yield each error with which a store would refuse to be opened, and where the setting that it is about came
    from."""
    config = loaded.config
    if config is None or not config.stores:
        return
    from asynccache.storage import check_stores
    from asynccache.storage.checked import store_layout

    origins = {path: f"{'.'.join(path)}: {origin}" for path, _, origin in loaded.values}
    for error in check_stores(config.stores, store_layout(config.pools()), config.storage_options):
        options = [("storage_options", word) for word in re.findall(r"[\w.-]+", str(error))]
        yield f"{error} ({next((origins[path] for path in options if path in origins), origins['storage',])})"
