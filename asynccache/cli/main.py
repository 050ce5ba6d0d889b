"""The command ``asynccache``: finds out what is wanted, and says in a sentence what cannot be done.

Exit status: 0 all was well, 1 something was wrong with the cache or the run, 2 the input could not be used, 3 a bug in
asynccache (``--debug``, or ``ASYNCCACHE_DEBUG=1``, shows where), 130 interrupted by Ctrl-C. SIGTERM does the same,
and ``entry`` makes that 143.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, NoReturn

from asynccache import __version__, compiled
from asynccache.cli.entry import INTERRUPTED
from asynccache.cli.options import add_arguments, settle, suggest
from asynccache.cli.output import debugging
from asynccache.cli.presses import Presses
from asynccache.errors import AsyncCacheError, ConfigError

BENCHES = {
    "store": "the storage tier: CPU and bandwidth per page",
    "tree": "the core: time and memory per operation",
    "runtime": "what an await adds to a call of the core",
    "ranks": "operations on their way to workers and back, beside a bare TCP echo of the same bytes",
    "cuda": "the CUDA device: copies by fragment, wake-ups, submitting, and what copies cost a computation",
    "ttft": "time to first token of a real model, by the tier that has the prefix",
}
STORE = "look at what a store holds: how much it is, and whether every page is undamaged"
PLAN = "what each GiB of host memory or disk would save, from one pass over a recorded trace"
EXPLAIN = "ask a cache that is served where a prompt's pages are, and what ends its match"
DOCTOR = "what there is for a GPU on this machine, how fast it is, and what will be used and why"
CONFIG = "which settings hold and where they come from; whether a file can be used; what a file may say"
BUG = 3
_COMMANDS: dict[Literal["replay", "stress"], str] = {
    "replay": "serve the requests of a recorded trace, and verify every page",
    "stress": "serve made-up conversations, with faults and cancellations if wanted, and verify every page",
}


class _Parser(argparse.ArgumentParser):
    """Answers what it cannot use with one sentence."""

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()
        hint = ""
        if message.startswith("unrecognized arguments: -") and words[-1] in _COMMANDS:
            hint = suggest(words[-1], message.split()[2])
        self.exit(2, f"{self.prog}: {message}{hint}\n{self.prog} --help lists what there is\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--debug"]
    if len(arguments) < len(given):
        os.environ["ASYNCCACHE_DEBUG"] = "1"
    debug = debugging()
    _have_streams()
    try:
        return _dispatch(arguments)
    except AsyncCacheError as error:
        return _refused(f"{error}{_see(arguments) if isinstance(error, ConfigError) else ''}", debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return _refused(f"{named}{error.strerror or error}", debug)
    except Exception as error:
        _refused(f"{type(error).__name__}: {error}; this is a bug in asynccache, --debug shows where", debug)
        return BUG


def _have_streams() -> None:
    """Who has closed its standard output or error wants to hear nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives


def _refused(sentence: str, debug: bool) -> int:
    """A sentence and a hint for everything that is wrong, and nothing else unless it is asked for."""
    if debug:
        traceback.print_exc()
    for line in sentence.split("\n"):  # a file can be wrong in several places
        print(f"asynccache: {line}", file=sys.stderr)
    return 2


def _see(arguments: list[str]) -> str:
    command = arguments[0] if arguments and arguments[0] in (*_COMMANDS, "store", "config", "plan", "explain") else ""
    return f"; see asynccache {command} --help" if command else ""


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    if arguments[:1] == ["store"]:
        return _store(arguments[1:])
    if arguments[:1] == ["doctor"]:
        return _doctor(arguments[1:])
    if arguments[:1] == ["config"]:
        return _config(arguments[1:])
    if arguments[:1] == ["plan"]:
        return _plan(arguments[1:])
    if arguments[:1] == ["explain"]:
        return _explain(arguments[1:])
    if arguments[:1] and arguments[0] in _COMMANDS:
        return _run(arguments)
    _parser().parse_args(arguments or ["--help"])
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="asynccache", description="A hierarchical KV cache for LLM serving: its tools.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (or ASYNCCACHE_DEBUG=1)")
    parser.add_argument("--version", action="version", version=f"asynccache {__version__}, {compiled.CORE} core")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, text in _COMMANDS.items():
        _fill(commands.add_parser(name, help=text, description=text), name)
    commands.add_parser("store", help=STORE, add_help=False)
    commands.add_parser("config", help=CONFIG, add_help=False)
    commands.add_parser("plan", help=PLAN, add_help=False)
    commands.add_parser("explain", help=EXPLAIN, add_help=False)
    commands.add_parser("doctor", help=DOCTOR, add_help=False)
    commands.add_parser("bench", help="measure: " + ", ".join(BENCHES), add_help=False)
    return parser


def _fill(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "replay":
        parser.add_argument("trace", metavar="TRACE", help="a trace in the Mooncake format (JSON lines)")
    add_arguments(parser, command)


def _run(arguments: list[str]) -> int:
    name: Literal["replay", "stress"] = "replay" if arguments[0] == "replay" else "stress"
    parser = _Parser(prog=f"asynccache {name}", description=_COMMANDS[name] + ".")
    _fill(parser, name)
    settings = settle(name, vars(parser.parse_args(arguments[1:])))
    with Presses() as presses:
        from asynccache.cli.session import execute  # torch, which --help and bad input need not wait for

        return execute(settings, presses)


def _config(arguments: list[str]) -> int:
    from asynccache.cli import config

    parser = _Parser(prog="asynccache config", description=CONFIG[0].upper() + CONFIG[1:] + ".")
    config.add_arguments(parser)
    return config.execute(parser.parse_args(arguments or ["--help"]))


def _doctor(arguments: list[str]) -> int:
    from asynccache.cli import doctor

    parser = _Parser(prog="asynccache doctor", description=DOCTOR[0].upper() + DOCTOR[1:] + ".")
    doctor.add_arguments(parser)
    return doctor.execute(parser.parse_args(arguments))


def _store(arguments: list[str]) -> int:
    from asynccache.cli import store

    parser = _Parser(prog="asynccache store", description=STORE[0].upper() + STORE[1:] + ".")
    store.add_arguments(parser)
    return store.execute(parser.parse_args(arguments or ["--help"]))


def _plan(arguments: list[str]) -> int:
    from asynccache.cli import plan

    parser = _Parser(prog="asynccache plan", description=PLAN[0].upper() + PLAN[1:] + ".")
    plan.add_arguments(parser)
    return plan.execute(parser.parse_args(arguments or ["--help"]))


def _explain(arguments: list[str]) -> int:
    from asynccache.cli import explain

    parser = _Parser(prog="asynccache explain", description=EXPLAIN[0].upper() + EXPLAIN[1:] + ".")
    explain.add_arguments(parser)
    return explain.execute(parser.parse_args(arguments or ["--help"]))


def _bench(arguments: list[str]) -> int:
    """Each benchmark is a module of its own, imported when it is asked for."""
    parser = _Parser(prog="asynccache bench", description="Measure a part of the cache.")
    parser.add_argument("bench", choices=list(BENCHES), metavar="|".join(BENCHES),
                        help="; ".join(f"{name}: {text}" for name, text in BENCHES.items()))
    chosen: str = parser.parse_args(arguments[:1] or ["--help"]).bench
    module: Any = import_module(f"asynccache.cli.bench_{chosen}")
    own = _Parser(prog=f"asynccache bench {chosen}", description=BENCHES[chosen] + ".", conflict_handler="resolve")
    own.add_argument("--json", metavar="PATH|-", nargs="?", const="-", default="-",
                     help="where the figures go (default: -)")
    own.add_argument("--report", metavar="FILE.html", help="write them as one page with plots, too")
    module.add_arguments(own)
    options = own.parse_args(arguments[1:])
    from asynccache.cli.output import check_writable, dump, write_page

    table = getattr(module, "table", None)             # for a person, where JSON is not asked for
    path = options.json or ("-" if table is None else None)
    if path is not None:
        check_writable(path)
    if options.report is not None:
        check_writable(options.report, "--report")
    figures = {"core": compiled.CORE, **module.run(options)}
    if table is not None and path != "-":
        print(table(figures))
        print(f"the {compiled.CORE} core ran")
    if path is not None:
        dump(figures, path)
    if options.report is not None:
        write_page(figures, options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
