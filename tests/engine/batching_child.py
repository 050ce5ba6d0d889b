"""A process of its own that continues what another one's ``ContinuousBatching`` stored. Arguments: a folder with a
store per family, and families. Prints for each family: its name, cached tokens by tier, the tokens that it made."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import transformers
from asynccache_hf import ContinuousBatching

from tests.engine.engine_kit import model_of, prompt


def main() -> None:
    for family in sys.argv[2:]:
        url = f"file:{sys.argv[1]}/{family}?capacity=64MiB&segment=8MiB"
        with ContinuousBatching(model_of(family), page_size=8, name=family, storage=url) as batching:
            (made,) = batching.generate_batch([prompt(45)], max_new_tokens=6, eos_token_id=-1)
            sys.stdout.write(f"{family} {tuple(made.hits or ())} {made.output}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main()
