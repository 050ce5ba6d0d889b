"""A command that gets signals when it reaches a certain function: ``interrupt_child.py PLACE SIGNALS ARG...``.

``SIGNALS``: their names, such as ``INT,INT`` for Ctrl-C twice, sent one after the other when a function is called for
the first time; after a semicolon those of its second call, and so on: ``INT,INT;;INT`` sends the last at the third.

``PLACE``: ``module:Class.function``, ``import:module`` for the moment when that is imported, or ``exit`` for when the
command is over and the interpreter is not.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def press(signals: str) -> None:
    for name in filter(None, signals.split(",")):
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


class AtImport:
    """A finder of modules that sends the signals when ``name`` is looked for, once, and finds nothing."""

    def __init__(self, name: str, signals: str) -> None:
        self._name, self._signals = name, signals

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            signals, self._signals = self._signals, ""
            press(signals)


def found(place: str) -> tuple[Any, str]:
    """The class or module that has the function ``module:Class.function``, and the function's name there."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def pressing(function: Callable[..., Any], signals: str) -> Callable[..., Any]:
    """``function``, which first sends the signals of its first call, its second, and so on, as ``signals`` says."""
    left = signals.split(";")

    @functools.wraps(function)
    def pressed(*arguments: Any, **named: Any) -> Any:
        press(left.pop(0) if left else "")
        return function(*arguments, **named)

    return pressed


if __name__ == "__main__":
    place, signals, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    if place == "exit":
        atexit.register(press, signals)
    elif place.startswith("import:"):
        sys.meta_path.insert(0, AtImport(place.removeprefix("import:"), signals))
    else:
        owner, name = found(place)
        setattr(owner, name, pressing(getattr(owner, name), signals))
    from asynccache.cli.entry import main

    sys.argv[1:] = arguments
    sys.exit(main())
