"""``asynccache config show|check|schema``: prints the settings that hold, checks a file, prints the schema of files.

``show`` prints each setting with where it came from, in a form that can be loaded again. ``check`` prints a sentence
for everything that is wrong with a file, and its exit status is 1 then. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from asynccache.cli.options import SECTIONS, Option, RunSettings, options_for, resolve_options, said_of
from asynccache.config import CacheConfig
from asynccache.configuration import Loaded, as_toml, describes_cache, read_config, read_file, schema
from asynccache.configuration.building import Effective
from asynccache.errors import ConfigError
from asynccache.redaction import shown

ACTIONS = {
    "show": "print every setting that holds, and where it came from",
    "check": "say whether a file can be used, and everything that is wrong with it",
    "schema": "print what a file may say, as a JSON Schema",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("action", choices=list(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("file", metavar="FILE", nargs="?",
                        help="a TOML file (default: the one that ASYNCCACHE_CONFIG names)")
    parser.add_argument("--json", action="store_true", help="show: print JSON instead of TOML")


def execute(options: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises:
        ConfigError: ``check`` was given no file.
    """
    if options.action == "schema":
        print(json.dumps(whole_schema(), indent=2))
        return 0
    file: str | None = options.file or os.environ.get("ASYNCCACHE_CONFIG")
    if options.action == "show":
        return _show(file, options.json)
    if file is None:
        raise ConfigError("config check needs a FILE, or ASYNCCACHE_CONFIG that names one")
    return _check(file)


def _show(file: str | None, as_json: bool) -> int:
    if file is not None and not describes_cache(read_file(file).table):
        if problems := list(dict.fromkeys(_problems(file))):
            return _tell(problems)
        values = list(_of_runs(file))
    else:
        loaded = read_config(file)
        if loaded.config is None:
            return _tell(list(map(str, loaded.problems)))
        values = list(loaded.values)
    print(json.dumps(_plain(values), indent=2) if as_json else as_toml(values), end="\n" if as_json else "")
    return 0


def _plain(values: Iterable[Effective]) -> list[dict[str, object]]:
    return [{"setting": ".".join(path), "value": shown(path[-1], value), "from": origin}
            for path, value, origin in values]


def _of_runs(name: str) -> Iterator[Effective]:
    """Yield the options that hold for each command that a file without a cache has a section for; for ``stress`` if it
    has none. Values are shown as they were written."""
    file = read_file(name)
    for section in [each for each in SECTIONS if each in file.table] or ["stress"]:
        said = said_of(section, file, os.environ).values
        for field, option in options_for(section).items():
            if field in said:
                written = said[field].written
                value = tuple(written) if isinstance(written, list) else written
                yield Effective((section, option.name), value, said[field].origin)
            elif field != "config":
                yield Effective((section, option.name), option.defaults[section], "default")


def _check(file: str) -> int:
    problems = list(dict.fromkeys(_problems(file)))
    if not problems:
        print(f"{file}: can be used")
        return 0
    return _tell(problems)


def _tell(problems: list[str]) -> int:
    for problem in problems:
        print(f"asynccache: {problem}", file=sys.stderr)
    return 1


def _problems(name: str) -> Iterator[str]:
    try:
        file = read_file(name)
    except ConfigError as error:
        yield str(error)
        return
    cache = describes_cache(file.table)
    if cache:
        loaded = read_config(file)
        yield from map(str, loaded.problems)
        yield from _storage_problems(loaded)
    sections = [section for section in SECTIONS if section in file.table] or ([] if cache else ["stress"])
    for section in sections:
        yield from _run_problems(section, name)


def _run_problems(section: str, name: str) -> Iterator[str]:
    try:
        settings = resolve_options("stress" if section == "stress" else "replay", {"config": name, "trace": "-"})
        config = settings.cache or _pages_of(settings)
    except ConfigError as error:
        yield from str(error).split("\n")
        return
    described = read_config(name).config
    if described is None or described.storage != config.storage:
        yield from (f"{error} (storage of {section})" for error in _wrong_stores(config))


def _storage_problems(loaded: Loaded) -> Iterator[str]:
    """Yield each error with which a store would refuse to be opened, and where the setting that it is about came
    from."""
    if loaded.config is None:
        return
    origins = {path: f"{'.'.join(path)}: {origin}" for path, _, origin in loaded.values}
    for error in _wrong_stores(loaded.config):
        options = [("storage_options", word) for word in re.findall(r"[\w.-]+", str(error))]
        yield f"{error} ({next((origins[path] for path in options if path in origins), origins['storage',])})"


def _wrong_stores(config: CacheConfig) -> list[ConfigError]:
    if not config.stores:
        return []
    from asynccache.storage import check_stores
    from asynccache.storage.checked import store_layout

    return check_stores(config.stores, store_layout(config.pools()), config.storage_options)


def _pages_of(settings: RunSettings) -> CacheConfig:
    """The cache of a run with a few pages in each tier, because the real number may depend on the trace."""
    from asynccache.cli.sizing import configure  # here, because it imports what reads traces

    tokens = 16 * settings.page_size
    return configure(replace(settings, device_tokens=tokens, host_tokens=tokens))


def whole_schema() -> dict[str, Any]:
    """The JSON Schema of a file, with the sections ``[stress]`` and ``[replay]``."""
    return schema({section: _section(section) for section in SECTIONS})


def _section(section: str) -> dict[str, Any]:
    options = [option for field, option in options_for(section).items() if field != "config"]
    names = {name: option for option in options for name in (option.name, option.field)}
    return {
        "type": "object", "description": f"Options of asynccache {section}.", "additionalProperties": False,
        "properties": {name: _option(option) for name, option in names.items()},
    }


def _option(option: Option) -> dict[str, Any]:
    kinds = "boolean" if option.parse is None else ["string", "integer", "number", "array"]
    return {"description": option.help, "type": kinds}
