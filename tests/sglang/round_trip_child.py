"""A process that serves requests with SGLang's own cache and controller; tests run it twice, with the same folder.

    python -m tests.sglang.round_trip_child write|read|upgraded|declared FOLDER

It prints a line of JSON for each model: ``write`` what was found in L2 and in L3 within the process, ``read`` what was
found in L3 by a process that never computed any of it, ``upgraded`` the same for a SGLang that calls itself another
version, ``declared`` for one whose user has said that its pages are those of the version that wrote them.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from tests.sglang import standins

standins.install()

import sglang

from tests.sglang.tiny_engine import Tiny, prompt

MODELS = {
    "full": ("full", "page_first_direct"), "full layer_first": ("full", "layer_first"),
    "mla": ("mla", "page_first_direct"), "mla layer_first": ("mla", "layer_first"),
    "swa": ("swa", "page_first_direct"), "mamba": ("mamba", "page_first_direct"),
}  # fmt: skip


def options(name: str, folder: str) -> dict[str, Any]:
    return {"storage": f"file:{folder}/{name.replace(' ', '-')}?capacity=64MiB", "namespace": "w1"}


def write(tiny: Tiny) -> dict[str, int]:
    cold = tiny.serve(prompt(1)) + tiny.serve(prompt(2))
    tiny.to_host()
    from_host = tiny.serve(prompt(1))
    tiny.forget()
    return {"cold": cold, "L2": from_host, "L3": tiny.serve(prompt(1))}


def read(tiny: Tiny) -> dict[str, int]:
    found = tiny.serve(prompt(1))
    longer = tiny.serve(prompt(2)[:12] + prompt(3)[:4])
    other = tiny.serve(prompt(4))
    return {"L3": found, "fork": longer, "other": other}


def main(what: str, folder: str, names: list[str]) -> None:
    added = {"compatible_with": sglang.__version__} if what == "declared" else {}
    if what in ("upgraded", "declared"):
        sglang.__version__ = "99.0"
    for name in names or MODELS:
        told: dict[str, Any] = {"model": name}
        try:
            tiny = Tiny(*MODELS[name], extra=options(name, folder) | added)
            told |= {"pools": {pool.name: type(pool.source).__name__ for pool in tiny.storage._pools.values()}}
            told |= (write if what == "write" else read)(tiny)
            tiny.drain()
            tiny.close()
        except BaseException:
            told["error"] = traceback.format_exc()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
