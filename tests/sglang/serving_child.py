"""A process that serves requests with SGLang's own cache and controller on one store, as it is told line by line.

    python -m tests.sglang.serving_child URL

A line of standard input is a JSON list, one of

    ["open", MODEL]     one of ``round_trip_child.MODELS``, with empty L1 and L2
    ["serve", NUMBER]   a prompt; the answer is how many of its tokens were found, after all their bytes were compared
    ["drain"]           until what was published is in L3
    ["forget"]          the same, and then L1 and L2 are emptied
    ["close"]

and its answer a line: ``{"answer": ...}``, or ``{"error": TRACEBACK}``.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from tests.sglang import standins

standins.install()

from tests.sglang.round_trip_child import MODELS
from tests.sglang.tiny_engine import Tiny, prompt


class Serving:
    """What can be asked, by name."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tiny: Tiny

    def open(self, model: str) -> None:
        self._tiny = Tiny(*MODELS[model], extra={"storage": self._url, "namespace": model})

    def serve(self, number: int) -> int:
        return self._tiny.serve(prompt(number))

    def drain(self) -> None:
        self._tiny.drain()

    def forget(self) -> None:
        self._tiny.forget()

    def close(self) -> None:
        self._tiny.close()


def main(url: str) -> None:
    serving = Serving(url)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        told: dict[str, Any]
        try:
            told = {"answer": getattr(serving, what)(*arguments)}
        except Exception:
            told = {"error": traceback.format_exc()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
