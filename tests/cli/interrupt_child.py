"""A command that gets signals when it reaches a certain function: ``interrupt_child.py PLACE SIGNALS ARG...``.

``SIGNALS``: their names, such as ``INT,INT`` for Ctrl-C twice, sent one after the other.

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
from typing import Any


def press(signals: str) -> None:
    for name in filter(None, signals.split(",")):
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


class AtImport:
    """Presses when ``name`` is looked for, once; finds nothing."""

    def __init__(self, name: str, signals: str) -> None:
        self._name, self._signals = name, signals

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            signals, self._signals = self._signals, ""
            press(signals)


def at_call(place: str, signals: str) -> None:
    """Press when the function is called for the first time."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function, left = getattr(owner, name), [signals]

    @functools.wraps(function)
    def pressed(*arguments: Any, **named: Any) -> Any:
        press(left.pop() if left else "")
        return function(*arguments, **named)

    setattr(owner, name, pressed)


if __name__ == "__main__":
    place, signals, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    if place == "exit":
        atexit.register(press, signals)
    elif place.startswith("import:"):
        sys.meta_path.insert(0, AtImport(place.removeprefix("import:"), signals))
    else:
        at_call(place, signals)
    from asynccache.cli.entry import main

    sys.argv[1:] = arguments
    sys.exit(main())
