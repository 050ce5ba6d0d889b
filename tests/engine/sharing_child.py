"""A process of its own that serves, beside others, prompts from a store that they share. Argument: the store's URL.
Each turn begins with a line of input: prompts, as JSON. When all that was computed is stored, it says what it made: the
tokens and hits of each."""

from __future__ import annotations

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import transformers
from asynccache_hf import ContinuousBatching

from tests.engine.engine_kit import model_of


def main() -> None:
    with ContinuousBatching(model_of("llama"), page_size=8, name="llama", storage=sys.argv[1]) as batching:
        print("ready", flush=True)  # noqa: T201
        for line in sys.stdin:
            done = batching.generate_batch(json.loads(line), max_new_tokens=6, eos_token_id=-1)
            batching.ask(lambda cache: cache.flush(timeout=20))
            print(json.dumps([(each.result(), each.hits) for each in done]), flush=True)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()
