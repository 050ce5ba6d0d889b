"""vLLM's real engine on the CPU, in a process of its own, with a small random model; and what its answers must be.

``RunningEngine`` starts one and asks it, ``Models`` writes the models and remembers what an engine without any tier
answers. Most of an engine's start is imports, so processes are forked from one that has imported vLLM and done nothing
else. Where vLLM is not installed nothing here can be used: tests ask ``installed()`` first.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Self

from tests.vllm import engine_child

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BLOCK = 32
STARTS_WITHIN = 300.0
ANSWERS_WITHIN = 300.0
BOUND = 1e-4
"""By how much a log-probability may differ from that of a run without any tier. Sums in another order (a prompt that is
computed in other pieces, or by two ranks) differ by a few 1e-6; KV of another block by 0.1 and more."""

Kind = Literal["llama", "gemma3"]


def installed() -> bool:
    """Whether vLLM is installed."""
    return find_spec("vllm") is not None


def prompt(number: int, blocks: int = 16, tail: int = 8) -> list[int]:
    """Tokens that differ for each ``number``: so many whole blocks, and ``tail`` more, which are always computed."""
    rng = random.Random(number)
    return [rng.randrange(2, 2048) for _ in range(blocks * BLOCK + tail)]


def tier(url: str, **more: Any) -> dict[str, Any]:
    """Our tier, for ``secondary_tiers``. Its deadline is long, for a machine that does other things as well."""
    return {"type": "asynccache", "storage": url, "lookup_timeout": 10.0, **more}


@dataclass(frozen=True)
class Answer:
    """An engine's answer to a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """By token of the answer: the best tokens there and their log-probabilities."""
    cached: int
    """Tokens of the prompt that were not computed."""
    seconds: float

    def same_as(self, other: Answer) -> None:
        """Assert that the tokens are equal, and the log-probabilities up to ``BOUND``."""
        assert self.tokens == other.tokens
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            both = mine.keys() & theirs.keys()
            assert len(both) >= len(mine) - 1, "the last of the best may be another one, if two are nearly equal"
            worst = max(abs(mine[token] - theirs[token]) for token in both)
            assert worst <= BOUND, f"log-probabilities differ by {worst}"

    def distance(self, other: Answer) -> float:
        """The difference between the best log-probability of the first token here and the other answer's for that
        token; the other one may not have it."""
        token, best = max(self.logprobs[0].items(), key=lambda item: item[1])
        return abs(best - other.logprobs[0].get(token, min(other.logprobs[0].values())))


def insist_on_sense(answers: Sequence[Answer]) -> None:
    """Assert that answers to different prompts would show wrong KV: they differ, no token stands out everywhere, and
    no answer is certain."""
    tokens = [token for answer in answers for token in answer.tokens]
    assert len(set(tokens)) > len(tokens) / 2, f"the same tokens again and again: {tokens}"
    for answer in answers:
        for place in answer.logprobs:
            entropy = -sum(math.exp(p) * p for p in place.values())
            assert entropy > 0.3, f"the model is certain: {place}"
    for one, other in pairwise(answers):
        assert one.distance(other) > 100 * BOUND


class EngineError(AssertionError):
    """The engine's process ended or did not answer; the end of what it wrote."""


class RunningEngine:
    """``with RunningEngine(model, tiers=[...]) as engine``: one engine until the end of the block.

    ``tiers`` are vLLM's ``secondary_tiers``; None: no offloading at all. ``processes``: the engine runs in a process of
    its own beside the one that asks, as under ``vllm serve``; otherwise both are one, which starts faster. ``folder``
    is where it works and logs. ``events``: fields of vLLM's ``KVEventsConfig``.
    """

    def __init__(
        self, model: Path, folder: Path, *, tiers: Sequence[Mapping[str, Any]] | None = None, tp: int = 1,
        processes: bool = False, host_bytes: int = 64 << 20, max_len: int = 2048,
        environment: Mapping[str, str] | None = None, block_size: int = BLOCK,
        events: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        transfer = None if tiers is None else {
            "spec_name": "CpuTieringSpec", "spec_module_path": "vllm_on_cpu.offload", "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
        }  # fmt: skip
        options = {"model": str(model), "max_model_len": max_len, "transfer": transfer, "tensor_parallel_size": tp,
                   "block_size": block_size, "events": None if events is None else dict(events)}  # fmt: skip
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)) if tp > 1 else "auto",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes or tp > 1)), **(environment or {}),
        }  # fmt: skip
        self._log = folder / f"engine-{len(list(folder.glob('engine-*.log')))}.log"
        self._log.touch()
        self._pipe, theirs = multiprocessing.Pipe()
        self._process: BaseProcess | None = _processes().Process(
            target=engine_child.serve, args=(theirs, options, variables, [str(EXAMPLES)], str(self._log)))
        self._theirs: Connection | None = theirs

    def __enter__(self) -> Self:
        assert self._process is not None
        assert self._theirs is not None
        self._process.start()
        self._theirs.close()                           # the end of the child is the end of its side of the pipe
        try:
            self._next(STARTS_WITHIN)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        if self._process is None:
            return
        self._process.join(timeout=60)
        ended = self._process.exitcode
        self.kill()
        if ended != 0:
            how = "does not end" if ended is None else f"ended with {ended}"
            raise EngineError(f"the engine {how}: {self.log[-3000:]}")

    def kill(self) -> None:
        """Kill all of its processes (SIGKILL), and remove what vLLM shares among them in ``/dev/shm``."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            process.close()
            for path in re.findall(r"/dev/shm/vllm_offload_[-\w]+\.mmap", self.log):
                Path(path).unlink(missing_ok=True)

    @property
    def log(self) -> str:
        """The output of vLLM and its tiers so far."""
        return self._log.read_text(errors="replace")

    def generate(self, prompt: Sequence[int], tokens: int = 8, logprobs: int | None = 8) -> Answer:
        """Generate greedily. ``logprobs``: how many of the best log-probabilities to return at each place."""
        return Answer(**self.ask("generate", prompt=list(prompt), tokens=tokens, logprobs=logprobs))

    def quiet(self) -> None:
        """Return when everything that was computed is stored."""
        self.ask("quiet")

    def forget(self, *, host: bool = True) -> None:
        """Empty vLLM's own tiers: the device's, and the host's with ``host``. Stores keep their chunks."""
        self.quiet()
        assert self.ask("reset", host=host)

    def counters(self) -> dict[str, float]:
        """vLLM's own counters and gauges: ``name{label=value}`` → value."""
        found: dict[str, float] = self.ask("metrics")
        return found

    def from_tier(self, kind: str = "asynccache") -> tuple[int, int]:
        """vLLM's counters of the first secondary tier, of this type: chunks that were hits, and bytes read."""
        found = self.counters()
        name = f"{{tier=1:{kind}}}"
        return (int(found.get(f"vllm:kv_offload_tiering_chunk_hits{name}", 0)),
                int(found.get(f"vllm:kv_offload_tiering_read_bytes{name}", 0)))  # fmt: skip

    def chunks(self, what: str) -> dict[str, int]:
        """The counters of our tier: ``lookups``, ``loaded_chunks`` or ``stored_chunks``, by result."""
        start = f"vllm:kv_offload_asynccache_{what}{{result="
        return {name[len(start) : -1]: int(value) for name, value in self.counters().items() if name.startswith(start)}

    def ask(self, what: str, **arguments: Any) -> Any:
        """Make one call of the child; returns its answer. ``EngineError`` if it takes more than ``ANSWERS_WITHIN``
        seconds."""
        assert self._process is not None, "it does not run"
        self._pipe.send((what, arguments))
        return self._next(ANSWERS_WITHIN)

    def _next(self, within: float) -> Any:
        if not self._pipe.poll(within):
            raise EngineError(f"no answer in {within} s: {self.log[-3000:]}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise EngineError(f"the engine has ended: {self.log[-6000:]}") from None


@functools.cache
def _processes() -> Any:
    """How processes are started: forked from one that has imported what an engine needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama",
         "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "vllm.v1.kv_offload.tiering.spec",
         "tests.vllm.engine_child"]
    )  # fmt: skip
    return context


def write_model(folder: Path, kind: Kind, **options: int) -> None:
    """One of ``examples/vllm_on_cpu/models.py``; in a process of its own, since this one need not import all that."""
    code = f"from vllm_on_cpu import models; models.{kind}({str(folder)!r}, **{options!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
                   timeout=STARTS_WITHIN, capture_output=True)  # fmt: skip


class Models:
    """Small models, written when they are first wanted, and what they answer without any tier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[Kind, dict[int, Answer]] = {}

    def folder(self, kind: Kind, seed: int = 0) -> Path:
        """The folder of the model of this kind. Another seed makes other weights."""
        folder = self._folder / f"{kind}-{seed}"
        if not folder.exists():
            write_model(folder, kind, seed=seed)
        return folder

    def answers(self, kind: Kind) -> Mapping[int, Answer]:
        """The answers of an engine without a tier, by the prompt's number, 0 to 3; checked by ``insist_on_sense``."""
        if kind not in self._answers:
            with RunningEngine(self.folder(kind), self._folder) as engine:
                found = {number: engine.generate(prompt(number)) for number in range(4)}
            assert all(answer.cached == 0 for answer in found.values())
            insist_on_sense(list(found.values()))
            self._answers[kind] = found
        return self._answers[kind]
