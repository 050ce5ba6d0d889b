"""``asynccache store ls|stat|verify|gc|clear URL``: look at a store, and look after it.

Progress goes to standard error and only if it takes longer than two seconds; a person's answer or the JSON to standard
output. Here is what the command line says; ``store_actions`` does it. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asynccache.cli.output import check_writable, dump
from asynccache.cli.progress import Progress
from asynccache.cli.store_actions import Wanted, perform
from asynccache.cli.store_text import line, text
from asynccache.errors import ConfigError
from asynccache.storage import Stored, parse_size

ACTIONS = {
    "ls": "every page's key, size and age",
    "stat": "how much is stored, how old it is, and whether the store answers",
    "verify": "read every stored page; drop, and count, what is damaged",
    "gc": "remove what nobody can use, and pages older than --older-than",
    "clear": "forget every page",
}
TIMEOUT = 30.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all actions."""
    parser.add_argument("action", choices=list(ACTIONS), metavar="|".join(ACTIONS),
                        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("url", metavar="URL", help="the store, for example file:/var/kv")
    parser.add_argument("--limit", type=int, metavar="N", help="ls: no more than N pages")
    parser.add_argument("--rate", metavar="SIZE", help="verify: read at most so much a second, for example 100MiB")
    parser.add_argument("--older-than", metavar="AGE", help="gc: pages written longer ago than that, as in 7d or 12h")
    parser.add_argument("--dry-run", action="store_true", help="gc: count the old pages, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS",
                        help="give up when the store is silent for so long (default: 30; gc and clear, which do not "
                             "say how far they are, have an hour)")
    parser.add_argument("--json", metavar="PATH|-", help="the answer as JSON (ls: a line per page, the total last), to "
                                                         "a file or (-) instead of the text")


def execute(args: argparse.Namespace) -> int:
    """Do it and say what came out; the exit status: 1 if anything was damaged, could not be read, or was not done.

    Raises:
        ConfigError: an option is unusable, or this kind of store cannot do it. BackendError: it cannot be opened
        or read.
    """
    wanted = _wanted(args)
    if args.json is not None:
        check_writable(args.json)
    if args.action == "clear" and not (args.yes or _is_meant(wanted.shown)):
        return 1
    if args.action == "ls" and args.json is not None:
        with _json_lines(args.json) as write:
            report = _performed(wanted, lambda page: write({**page._asdict(), "key": page.key.hex()}))
            write({"total": {name: report[name] for name in ("pages", "bytes", "more")}})
        return 0
    now = time.time()
    report = _performed(wanted, lambda page: print(line(page, now)))
    if args.json != "-":
        print(text(report))
    if args.json is not None:
        dump(report, args.json)
    return 0 if report["ok"] else 1


def _performed(wanted: Wanted, show: Callable[[Stored], None]) -> dict[str, object]:
    progress = Progress(sys.stderr)
    try:
        return asyncio.run(perform(wanted, show, progress.tell))
    finally:
        progress.end()


def _wanted(args: argparse.Namespace) -> Wanted:
    """What the arguments say.

    Raises:
        ConfigError: an option is unusable, or belongs to another action.
    """
    for option, action in (("limit", "ls"), ("rate", "verify"), ("older_than", "gc")):
        if getattr(args, option) is not None and args.action != action:
            raise ConfigError(f"--{option.replace('_', '-')} is for asynccache store {action}")
    for option, action in (("dry_run", "gc"), ("yes", "clear")):
        if getattr(args, option) and args.action != action:
            raise ConfigError(f"--{option.replace('_', '-')} is for asynccache store {action}")
    rate = None if args.rate is None else parse_size("--rate", args.rate)
    older_than = None if args.older_than is None else duration("--older-than", args.older_than)
    if rate is not None and rate < 1:
        raise ConfigError(f"--rate={args.rate!r} must be at least one byte a second")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit} must be at least 1")
    if not 0 < args.timeout < float("inf"):
        raise ConfigError(f"--timeout={args.timeout} must be more than 0 seconds")
    if args.dry_run and older_than is None:
        raise ConfigError("--dry-run counts the pages that --older-than would remove: say how old, as in 7d")
    return Wanted(args.action, args.url, args.timeout, args.limit, rate, older_than, args.dry_run)


def duration(name: str, text: str) -> float:
    """Seconds in ``text``: a number and ``s``, ``m``, ``h``, ``d`` or ``w``.

    Raises:
        ConfigError: it is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}={text!r} is no duration; write for example 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _is_meant(url: str) -> bool:
    """Ask whoever sits there.

    Raises:
        ConfigError: nobody does.
    """
    if not sys.stdin.isatty():
        raise ConfigError("clear forgets every page: say --yes, there is nobody to ask")
    print(f"Forget every page of {url}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _json_lines(path: str) -> Iterator[Callable[[object], None]]:
    """Write JSON lines to a file or, for ``-``, to standard output."""
    if path == "-":
        yield lambda value: print(json.dumps(value))
        return
    with open(path, "w", encoding="utf-8") as file:
        yield lambda value: print(json.dumps(value), file=file)
