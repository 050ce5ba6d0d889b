"""A process of its own that serves what another one stored. Run by a test; arguments: a folder with a store per family,
and families; without any, all of ``FAMILIES``.

Prints a line for each family: its name, cached tokens by tier, the largest difference of a logit.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import transformers

from tests.engine.engine_kit import prompt, served
from tests.engine.engine_models import FAMILIES

LENGTH = 61


async def serve(folder: Path, family: str) -> None:
    async with served(family, storage_url=f"file:{folder / family}?capacity=64MiB&segment=8MiB") as engine:
        made = await engine.check(prompt(LENGTH))
        sys.stdout.write(f"{family} {tuple(made.hits)} {engine.worst:.3g}\n")


async def main() -> None:
    for family in sys.argv[2:] or FAMILIES:
        await serve(Path(sys.argv[1]), family)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    asyncio.run(main())
