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

from asynccache.configuration import Effective, Loaded, as_toml, read_config, schema
from asynccache.errors import ConfigError
from asynccache.redaction import shown

ACTIONS = {
    "show": "print every setting that is in effect, and where it came from",
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
        print(json.dumps(schema(), indent=2))
        return 0
    file: str | None = options.file or os.environ.get("ASYNCCACHE_CONFIG")
    if options.action == "show":
        return _show(file, options.json)
    if file is None:
        raise ConfigError("config check needs a FILE, or ASYNCCACHE_CONFIG that names one")
    return _check(file)


def _show(file: str | None, as_json: bool) -> int:
    loaded = read_config(file)
    if loaded.config is None:
        return _tell(loaded.problems)
    values = loaded.values
    print(json.dumps(_plain(values), indent=2) if as_json else as_toml(values), end="\n" if as_json else "")
    return 0


def _plain(values: Iterable[Effective]) -> list[dict[str, object]]:
    return [{"setting": ".".join(path), "value": shown(path[-1], value), "from": origin}
            for path, value, origin in values]


def _check(file: str) -> int:
    loaded = read_config(file)
    problems = [*loaded.problems, *_storage_problems(loaded)]
    if not problems:
        print(f"{file}: can be used")
        return 0
    return _tell(problems)


def _tell(problems: Iterable[str]) -> int:
    for problem in problems:
        print(f"asynccache: {problem}", file=sys.stderr)
    return 1


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
