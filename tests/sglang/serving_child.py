"""A process that serves requests with SGLang's own cache and controller, as it is told line by line.

    python -m tests.sglang.serving_child [VERSION]     which version its SGLang calls itself

A line of standard input is a JSON list, one of

    ["version"]                SGLang's
    ["open", MODEL, OPTIONS]   one of ``MODELS``, with empty L1 and L2; the answer is how each pool's pages are read
    ["serve", TOKENS]          the answer is how many of them were found, after all their bytes were compared
    ["drain"]                  until what was published is in L3
    ["to_host"]                the same, and then L1 is emptied
    ["forget"]                 the same, and then L1 and L2 are emptied
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

import sglang

from tests.sglang.tiny_engine import Tiny

MODELS = {
    "full": ("full", "page_first_direct"), "full layer_first": ("full", "layer_first"),
    "mla": ("mla", "page_first_direct"), "mla layer_first": ("mla", "layer_first"),
    "swa": ("swa", "page_first_direct"), "mamba": ("mamba", "page_first_direct"),
}  # fmt: skip


def main(*version: str) -> None:
    if version:
        [sglang.__version__] = version
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        told: dict[str, Any]
        try:
            if what == "open":
                model, options = arguments
                tiny = Tiny(*MODELS[model], extra=options)
                told = {"answer": {pool.name: type(pool.source).__name__ for pool in tiny.storage._pools.values()}}
            elif what == "version":
                told = {"answer": sglang.__version__}
            else:
                told = {"answer": getattr(tiny, what)(*arguments)}
        except Exception:
            told = {"error": traceback.format_exc()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
