"""The orders of a rank's process, and its end. Imports no torch, which takes seconds."""

from __future__ import annotations

import os
import sys
import threading
import time

import msgspec

from asynccache.cli.options import RunSettings

FAREWELL = 1.0
"""Seconds in which a rank that lost the command may close its stores by itself, as it does when its link ends."""


class Duty(msgspec.Struct, frozen=True):
    """The orders of a rank, which the command gives it at its start. ``address``: that of the head's link."""

    rank: int
    address: str
    settings: RunSettings


def read_duty() -> Duty:
    """Read this process's duty from standard input, and end the process when the command is gone."""
    duty = msgspec.json.decode(sys.stdin.buffer.readline(), type=Duty)
    threading.Thread(target=_end_with_the_command, name="asynccache-parent", daemon=True).start()
    return duty


def _end_with_the_command() -> None:
    while os.read(0, 1):
        pass
    time.sleep(FAREWELL)
    os._exit(2)
