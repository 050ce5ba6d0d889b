"""A vLLM engine in a process of its own, which does what a pipe tells it: see ``engine_kit.RunningEngine``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any


class Engine:
    """What can be asked of it, by name."""

    def __init__(
        self, transfer: dict[str, Any] | None, events: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        from vllm.config.kv_events import KVEventsConfig
        from vllm.config.kv_transfer import KVTransferConfig
        from vllm.entrypoints.llm import LLM

        connector = None if transfer is None else KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=transfer)  # fmt: skip
        told = None if events is None else KVEventsConfig(**events)
        self._llm = LLM(
            kv_transfer_config=connector, kv_events_config=told, skip_tokenizer_init=True, enforce_eager=True,
            dtype="float32", disable_log_stats=False, enable_prefix_caching=True, seed=0, **options,
        )  # fmt: skip
        client = self._llm.llm_engine.engine_core
        self._core: Any = getattr(client, "engine_core", None)     # where it runs in this process

    def generate(self, prompt: list[int], tokens: int, logprobs: int | None = None) -> dict[str, Any]:
        """Greedy: the tokens, the best log-probabilities at each, what came from a cache, and how long it took."""
        from vllm.sampling_params import SamplingParams

        few = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=logprobs, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        [request] = self._llm.generate([{"prompt_token_ids": prompt}], few, use_tqdm=False)
        seconds, [answer] = time.perf_counter() - began, request.outputs
        best = tuple({token: each.logprob for token, each in place.items()} for place in answer.logprobs or ())
        return {"tokens": tuple(answer.token_ids), "logprobs": best, "seconds": seconds,
                "cached": request.num_cached_tokens}  # fmt: skip

    def quiet(self) -> None:
        """Return when nothing is being stored any more. An engine in a process of its own goes on by itself; this one
        has to be stepped."""
        until = time.monotonic() + 60
        if self._core is not None:
            while self._core.scheduler.has_requests():
                assert time.monotonic() < until, "stores do not end"
                self._core.step_fn()
                time.sleep(0.001)
        before = -1.0
        while (now := self._moving()) != before or now % 1:
            assert time.monotonic() < until, "stores do not end"
            before = now
            time.sleep(0.1)
            self.generate([1], 1)                      # metrics come with answers

    def _moving(self) -> float:
        """Bytes written to tiers so far, and a half while a job is under way."""
        found = self.metrics()
        written = sum(value for name, value in found.items() if name.startswith("vllm:kv_offload_tiering_write_bytes"))
        jobs = [value for name, value in found.items() if name.startswith("vllm:kv_offload_tiering_active_cascade")]
        return written + 0.5 * any(jobs)

    def reset(self, host: bool) -> bool:
        """Forget what is on the device; with ``host``, what vLLM keeps in host memory, too. Tiers keep theirs."""
        return bool(self._llm.reset_prefix_cache(reset_connector=host))

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters and gauges: ``name{label=value}`` → value."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                labels = [f"{k}={v}" for k, v in sorted(metric.labels.items()) if k not in ("model_name", "engine")]
                found[f"{metric.name}{{{','.join(labels)}}}"] = value
        return found

    def close(self) -> None:
        """End the engine as its user would."""
        self._llm.llm_engine.engine_core.shutdown()


def serve(
    pipe: Connection, options: dict[str, Any], environment: Mapping[str, str], paths: list[str], log: str
) -> None:  # fmt: skip
    """Start an engine, say so, and answer calls until the other end is closed.

    A call is the name of one of its functions and its arguments. ``options`` are arguments of ``vllm.LLM``, and
    ``transfer``, the ``kv_connector_extra_config`` of its offloading connector, or None, and ``events``, the fields of
    its ``KVEventsConfig``, or None. What vLLM prints goes to the
    file ``log``. ``CALLS_ITSELF`` in the environment: the version that this vLLM says it is.
    """
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.path[:0] = paths
    if version := os.environ.get("CALLS_ITSELF"):
        import vllm

        vllm.__version__ = version
    engine = Engine(options.pop("transfer"), options.pop("events"), options)
    pipe.send(None)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(getattr(engine, what)(**arguments))
    engine.close()
