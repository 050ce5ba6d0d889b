"""A process of its own with what another one stored.

    engine_child.py serve FOLDER [FAMILY ...]     each family (or all of ``FAMILIES``) from its store there

prints a line for each: its name, cached tokens by tier, the largest difference of a logit.

    engine_child.py share FAMILY URL

serves prompts by ``ContinuousBatching``, beside others on the same store. Each turn begins with a line of input:
prompts, as JSON. When all that was computed is stored, it says what it made: the tokens and hits of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import transformers
from asynccache_hf import ContinuousBatching

from tests.engine.engine_kit import model_of, prompt, served
from tests.engine.engine_models import FAMILIES

LENGTH = 61


async def serve(folder: str, *families: str) -> None:
    for family in families or FAMILIES:
        async with served(family, storage_url=f"file:{Path(folder, family)}?capacity=64MiB&segment=8MiB") as engine:
            made = await engine.check(prompt(LENGTH))
            sys.stdout.write(f"{family} {tuple(made.hits)} {engine.worst:.3g}\n")


def share(family: str, url: str) -> None:
    with ContinuousBatching(model_of(family), page_size=8, name=family, storage=url) as batching:
        print("ready", flush=True)  # noqa: T201
        for line in sys.stdin:
            done = batching.generate_batch(json.loads(line), max_new_tokens=6, eos_token_id=-1)
            batching.ask(lambda cache: cache.flush(timeout=20))
            print(json.dumps([(each.result(), each.hits) for each in done]), flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    what, *given = sys.argv[1:]
    share(*given) if what == "share" else asyncio.run(serve(*given))
