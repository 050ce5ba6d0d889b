"""Time to vLLM's first token, by the tier that has the prefix: ``python -m benchmarks.vllm_ttft``. It needs vLLM.

A prompt has a prefix of 4,096 tokens and one token more. The prefix is nowhere (cold), on the device, in vLLM's host
tier, or only in a store: in our ``file:`` store, in a host process (``host:``, an ``asynccache serve`` of its own), in
vLLM's own ``fs`` tier, and in Redis if ``--redis`` says where. Each store has an engine of its own with the same model.
All engines run at the same time and are asked in turns, in another order each time, so that other work of the machine
slows all alike. They run in processes of their own, as under ``vllm serve``.

Every prompt is computed once by each engine. Then vLLM's own tiers are emptied and the prompt is asked for, several
times. All answers must be equal, and the whole prefix must have been cached.

On a CPU the "device" is memory as well, and a stand-in copies between it and vLLM's host tier:
examples/vllm_on_cpu/offload.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.host.host_kit import socket_path
from tests.host.host_processes import server_process
from tests.vllm.engine_kit import BLOCK, RunningEngine, installed, prompt, tier, write_model

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
BYTES_A_TOKEN = 6 * 2 * 4 * 64 * 4
HOST_BYTES = 512 << 20
SERVER_MEMORY = "512MiB"
GOALS = {"file / fs": 1.0, "host: / file": 0.8, "host: / vLLM's host tier": 1.3}

Seconds = dict[str, dict[str, list[float]]]
"""Seconds to the first token by store and tier, in the order in which they were measured."""


def tiers(folder: Path, server: str, redis: str | None) -> dict[str, Mapping[str, Any]]:
    """The stores to measure by name, each as an entry of ``secondary_tiers``. All but Redis are empty."""
    found: dict[str, Mapping[str, Any]] = {
        "file": tier(f"file:{folder}/file"),
        "host:": tier(server),
        "fs": {"type": "fs", "root_dir": str(folder / "fs")},
    }
    if redis is not None:
        found["redis"] = tier(redis, namespace=f"benchmark {os.getpid()}")
    return found


def measure(engines: Mapping[str, RunningEngine], prompts: int, rounds: int, blocks: int) -> Seconds:
    """Ask all engines in turns; returns the seconds to the first token.

    Raises:
        SystemExit: an answer differs, or not as many tokens were cached as should have been.
    """
    seconds: Seconds = {name: {"cold": [], "device": [], "host": [], "store": []} for name in engines}
    for name, engine in engines.items():
        engine.generate(prompt(999, blocks=2), 1, None)
        _say(f"{name} is warm")
    for number in range(prompts):
        tokens = prompt(1000 + number, blocks=blocks, tail=1)
        first: set[tuple[int, ...]] = set()
        for turn in range(rounds + 1):
            for name in _order(list(engines), number + turn):
                for where, answer in _one(engines[name], tokens, cold=not turn):
                    insisted = 0 if where == "cold" else blocks * BLOCK
                    if answer.cached != insisted:
                        raise SystemExit(f"{name}, {where}: {answer.cached} tokens cached, not {insisted}")
                    seconds[name][where].append(answer.seconds)
                    first.add(answer.tokens)
        if len(first) != 1:
            raise SystemExit(f"the answers differ: {first}")
        _say(f"prompt {number + 1} of {prompts}")
    return seconds


def _one(engine: RunningEngine, tokens: Sequence[int], *, cold: bool) -> Iterator[tuple[str, Any]]:
    if cold:
        yield "cold", engine.generate(tokens, 1, None)
        return
    engine.forget()
    yield "store", engine.generate(tokens, 1, None)
    yield "device", engine.generate(tokens, 1, None)
    engine.forget(host=False)
    yield "host", engine.generate(tokens, 1, None)


def _order(names: list[str], turn: int) -> list[str]:
    at = turn % len(names)
    names = names[at:] + names[:at]
    return names[::-1] if turn // len(names) % 2 else names


def told(seconds: Seconds, blocks: int) -> list[str]:
    """The figures as lines of text: medians, least and most in milliseconds, and the ratios that the goal is about."""
    size = blocks * BLOCK * BYTES_A_TOKEN / 1e6
    lines = [f"ms to the first token after {blocks * BLOCK} tokens ({size:.0f} MB of KV): median (minimum, maximum)",
             f"{'':10}" + "".join(f"{where:>22}" for where in ("cold", "device", "host", "store"))]  # fmt: skip
    for name, by_tier in seconds.items():
        cells = [f"{statistics.median(each) * 1e3:.0f} ({min(each) * 1e3:.0f}, {max(each) * 1e3:.0f})"
                 for each in by_tier.values()]  # fmt: skip
        lines.append(f"{name:10}" + "".join(f"{cell:>22}" for cell in cells))
    for what, goal in GOALS.items():
        said = ", ".join(f"{ratio:.2f} {of}" for of, ratio in ratios(seconds)[what].items())
        lines.append(f"{what}: {said}; goal: <= {goal}")
    return lines


def ratios(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Times to the first token divided by each other: from our file store and vLLM's fs tier, from a host process and
    the file store, and from a host process and vLLM's own host tier in the same engine. On a machine that does other
    work as well, the first ratio says most: it is of pairs that were measured right after each other."""
    return {
        "file / fs": _ratio(seconds["file"]["store"], seconds["fs"]["store"]),
        "host: / file": _ratio(seconds["host:"]["store"], seconds["file"]["store"]),
        "host: / vLLM's host tier": _ratio(seconds["host:"]["store"], seconds["host:"]["host"]),
    }


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    pairs = [one / other for one, other in zip(mine, theirs, strict=True)]
    return {"median of pairs": statistics.median(pairs),
            "of medians": statistics.median(mine) / statistics.median(theirs),
            "of the least": min(mine) / min(theirs)}  # fmt: skip


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="asynccache-vllm-") as folder:
            yield Path(folder)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="prompts for each engine (default: 2)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N",
                        help="how often each prompt is asked for from each tier (default: 7)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens of the prefix (default: 4096)")
    parser.add_argument("--redis", metavar="URL", help="redis://HOST:PORT of a server to measure as well")
    parser.add_argument("--folder", type=Path, help="an empty folder for the model and the stores (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(arguments)
    if not installed():
        raise SystemExit("vLLM is not installed: make test-vllm makes an environment that has it")
    blocks = max(1, args.tokens // BLOCK)
    with _folder(args.folder) as folder, ExitStack() as stack:
        write_model(folder / "model", "llama", **SIZES)
        server, engines = stack.enter_context(server_process(socket_path(), SERVER_MEMORY)), {}
        for name, each in tiers(folder, server.url, args.redis).items():
            engine = RunningEngine(folder / "model", folder, tiers=[each], processes=True, host_bytes=HOST_BYTES,
                                   max_len=(blocks + 2) * BLOCK)  # fmt: skip
            engines[name] = stack.enter_context(engine)
            _say(f"{name} runs")
        seconds = measure(engines, args.prompts, args.rounds, blocks)
    sys.stdout.write("\n".join(told(seconds, blocks)) + "\n")
    if args.json is not None:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
                 "tokens": blocks * BLOCK}  # fmt: skip
        args.json.write_text(json.dumps({"about": about, "seconds": seconds, "ratios": ratios(seconds)}, indent=1))


if __name__ == "__main__":
    main()
