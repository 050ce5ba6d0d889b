"""The internals of transformers' continuous batching. No other module uses a name of them.

transformers decides which requests a step computes, runs the model, chooses tokens and ends requests. Four of its
classes are subclassed here: its cache (``PageCache``: requests have the pages that they came with, so nothing is
allocated, shared or evicted), its scheduler and processor (what becomes of requests that are cancelled or fail), and
its manager (which makes the other three). This is right on 5.23 and 5.24; on another version, a name that is missing
fails the import, and what computes otherwise fails the trial (``trial_together``).

The attention of a step is computed by ``asynccache_hf.attending``.

Law: however a request ends, its ``RequestPages.over`` is called once, when no step will touch its pages again.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as paging
from transformers.generation.continuous_batching import continuous_api as api
from transformers.generation.continuous_batching import scheduler
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import logger

from asynccache import ConfigError
from asynccache_hf.attending import IMPLEMENTATIONS, KEYWORD, LAYER_TYPES, PagedAttention, StepRow, unpageable
from asynccache_hf.layout import Layout
from asynccache_hf.memory import TrackMemory

READ = 4
"""A step reads at most this many times the tokens that fit on the device. It is more than 1, because each of the
requests that share a page reads it."""

ELSEWHERE = "PrefixCache serves such a model one request at a time, and Scheduler on PagedModel many"


# which models


def check_model(model: Any, layout: Layout) -> None:
    """
    Raises:
        ConfigError: attention over pages cannot compute this model's layers, or the model's attention function is none
            that ``attending`` replaces.
    """
    who, reason = type(model).__name__, unpageable(model, layout)
    if reason is not None:
        raise ConfigError(f"{who}: {reason}; {ELSEWHERE}")
    used = getattr(model.config, "_attn_implementation", None)
    if used not in (*IMPLEMENTATIONS, "eager"):
        raise ConfigError(f"{who}: its attention is {used!r}; load it with attn_implementation='sdpa' or 'eager'")


# requests and their pages


@dataclass(slots=True)
class RequestPages:
    """A request's pages. ``cached``: how many tokens need no computing. ``places``: by component, where each token is
    kept. ``prompt``: the prompt's length; 0 as soon as all of it is computed. The thread that generates calls
    ``computed`` after each step that computes tokens of the prompt, with how many are computed so far, and ``over``
    when the request is over."""

    cached: int
    places: Mapping[str, torch.Tensor]
    prompt: int
    computed: Callable[[int], None]
    over: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """One kind of layers, with the answers that transformers asks for."""

    index: int
    window: int | None
    write_trash_index: int = 0
    read_trash_index: int = 0

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length + (past_length if self.window is None else min(past_length, self.window - 1))


class _NoSectors:
    """transformers' pool of free memory, which has nothing to do here."""

    def try_to_free_sectors(self) -> None: ...


class PageCache(PagedAttention, paging.PagedAttentionCache):  # type: ignore[misc]
    """The cache's pages as transformers' own paged cache. The constructor of transformers' class is not called: it
    would allocate memory. ``held`` may be changed by any thread; all else belongs to the thread that generates."""

    use_prefix_sharing = True
    allow_block_sharing = False
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0
    read_cache_limit = None
    bytes_per_sector = 1

    def __init__(self, layout: Layout, slots: Sequence[TrackMemory], tokens: int, step_tokens: int) -> None:
        """``slots``: the memory of each layer's keys and values. ``tokens``: how many tokens fit on the device.
        ``step_tokens``: the most tokens that one step computes."""
        PagedAttention.__init__(self, layout, slots)
        self.cache_allocators = {LAYER_TYPES[component]: _LayerKind(index, window)
                                 for index, (component, window) in enumerate(self.windows.items())}  # fmt: skip
        self.pool = _NoSectors()
        self.max_batch_tokens = step_tokens
        self.max_tokens_read = READ * tokens
        self.num_blocks = tokens // layout.page_size
        self.held: dict[str, RequestPages] = {}
        self._rows: list[StepRow] = []

    # a request

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return self.held[request_id].cached

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        return True

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        return {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Tell a request how much of its prompt is computed. transformers calls this after each step, for each request
        that is not over."""
        held = self.held.get(state.request_id)
        if held is not None and held.prompt:
            held.computed(min(held.prompt, state.position_offset))
            if state.position_offset >= held.prompt:
                held.prompt = 0

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Do nothing: transformers calls this before it tells the request's end."""

    def over(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None:
            held.over()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        for request_id in list(self.held):
            self.over(request_id)

    # room, of which there is always enough

    def evict_cached_blocks(self) -> bool:
        return False

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        return 1.0

    # a step

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Note that a request is part of the next step. transformers calls this for each of them."""
        self._rows.append(StepRow(self.held[request_id].places, past_length, past_length + query_length))

    def begin(self) -> None:
        """Plan the next step. All of its requests have been noted by ``extend_read_and_write_indices``."""
        rows, self._rows = self._rows, []
        self.plan(rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the pages to the layer's attention function: since transformers 5.24 the model calls this before it, and
        does not pass it the cache."""
        kwargs[KEYWORD] = self
        return key_states, value_states


# steps


class _CancellingScheduler(scheduler.FIFOScheduler):  # type: ignore[misc]
    """transformers' scheduler, which also tells the cache which requests were cancelled. A cancellation comes by
    another queue than its request and may arrive before it; it is kept until the request comes."""

    def clear_cancelled_requests(self) -> list[Any]:
        asked = set(self._requests_to_cancel)
        gone: list[Any] = super().clear_cancelled_requests()
        for state in gone:
            self.cache.over(state.request_id)
        self._requests_to_cancel |= asked & self.cache.held.keys()
        return gone


class StepProcessor(api.ContinuousBatchProcessor):  # type: ignore[misc]
    """Computes the steps. An error of the model fails the requests of the step that it was in, and no others."""

    @torch.no_grad()
    def _generation_step(self, model: Any) -> None:
        stream = self.inputs_and_outputs.compute_stream  # None on a CPU
        try:
            self.cache.begin()
            data = self.inputs_and_outputs.get_model_kwargs()
            data["attention_mask"] = self.cache.mask
            if stream is not None:                     # the plans were made on another stream
                stream.wait_stream(torch.get_device_module(self.model_device).current_stream(self.model_device))
            self.model_runner.compute_batch(model, data)
            self.inputs_and_outputs.retrieve_device_outputs()
        except Exception as error:
            if stream is not None:
                stream.synchronize()                   # what was queued before the error still writes to pages
            self.handle_batch_error(error)
            self.inputs_and_outputs.requests_in_batch = []

    def step(self, model: Any) -> list[str]:
        """Make one step, for a caller that has no thread. Returns the requests that got a token by it, in the order of
        their logits."""
        if not self.prepare_next_batch():
            return []
        self._generation_step(model)
        got = [each.state.request_id for each in self.inputs_and_outputs.requests_in_batch if each.has_new_token]
        self.update_batch()
        return got


class RequestOutput(NamedTuple):
    """The output of a request so far. ``tokens``: all its new tokens. ``finished``: there will be no more. ``error``:
    the error with which it failed; None: it did not fail."""

    request_id: str
    tokens: list[int]
    finished: bool
    error: BaseException | None = None


class _OutputRouter(api.OutputRouter):  # type: ignore[misc]
    """Hands every output to ``tell``. After a request's last output its pages are given up."""

    def __init__(self, cache: PageCache, tell: Callable[[RequestOutput], None]) -> None:
        super().__init__()
        self._cache = cache
        self._tell = tell

    def deliver(self, output: Any) -> None:
        self._hand_over(RequestOutput(output.request_id, output.generated_tokens, output.is_finished()))

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        self._hand_over(RequestOutput(state.request_id, list(state.generated_tokens), True, error))

    def _hand_over(self, output: RequestOutput) -> None:
        self._tell(output)
        if output.finished:
            self._cache.over(output.request_id)


@contextmanager
def _without_psutil_warning() -> Iterator[None]:
    """Keep back transformers' warning that psutil is not installed. transformers needs psutil only to limit the memory
    that requests are offloaded to, and here nothing is offloaded."""

    def allowed(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("psutil is not available")

    logger.addFilter(allowed)
    try:
        yield
    finally:
        logger.removeFilter(allowed)


class PagedManager(api.ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' manager, whose requests bring their pages. Constructing it may change the model's attention
    implementation; ``end`` puts that back."""

    _original_attn_impl: str | None

    def __init__(self, model: Any, generation: Any, seed: int | None, step_tokens: int) -> None:
        settings = ContinuousBatchingConfig(
            max_batch_tokens=step_tokens, max_requests_per_batch=step_tokens, use_async_batching=False,
            use_cuda_graph=False, max_blocks_per_request=0, auto_switch_to_flash=False, safety_margin=0.0, seed=seed,
            per_request_processors=bool(generation.do_sample),
        )  # fmt: skip
        try:
            super().__init__(model, generation, settings)
            lost = [type(each).__name__ for each in model._get_logits_processor(generation)
                    if getattr(each, "supports_continuous_batching", None) is False]  # fmt: skip
            if lost:
                raise ConfigError(f"generation_config: continuous batching would leave out {', '.join(lost)}; use "
                                  f"PrefixCache, or a configuration without it")  # fmt: skip
        except Exception as error:
            usual = getattr(self, "_original_attn_impl", None)
            if usual is not None:
                model.set_attn_implementation(usual)
            if isinstance(error, ValueError) and not isinstance(error, ConfigError):
                raise ConfigError(f"generation_config: {error}") from error
            raise
        self.page_cache: PageCache | None = None

    def processor(self, cache: PageCache, tell: Callable[[RequestOutput], None]) -> StepProcessor:
        """Return the processor that computes steps over the pages of ``cache``. ``tell``: called with each output of a
        request."""
        config = copy.copy(self.model.config.get_text_config())
        config._attn_implementation = "asynccache"  # so that transformers allocates and fills no masks
        with _without_psutil_warning():
            return StepProcessor(
                cache=cache, config=config, generation_config=self.generation_config,
                continuous_batching_config=self.continuous_batching_config, logit_processor=self.logit_processor,
                input_queue=self.input_queue, cancel_queue=self.cancel_queue, output_router=_OutputRouter(cache, tell),
                background_thread_status=self.background_thread_status, model_device=self.model.device,
                model_dtype=self.model.dtype, distributed_helper=self.distributed_helper,
                scheduler=_CancellingScheduler(cache, 0.0, self.continuous_batching_config.max_requests_per_batch),
            )  # fmt: skip

    def begin(self, cache: PageCache, tell: Callable[[RequestOutput], None], name: str) -> None:
        """Start the thread, which ends with the program if nobody ends it before."""
        self.page_cache, self._tell = cache, tell
        self.background_thread_status.clear()
        thread = threading.Thread(target=self._run_generation_loop, name=name, daemon=True)
        thread.start()
        self._generation_thread = thread               # one that could not be started cannot be stopped either

    def submit(self, request_id: str, tokens: list[int], most: int, ends: list[int], streaming: bool,
               held: RequestPages, options: Mapping[str, Any]) -> None:  # fmt: skip
        """Queue a request for the next step. The caller must call ``wake`` after it has submitted all requests that are
        to be computed together.

        Raises:
            RuntimeError: the thread that generates has ended; the message says why.
        """
        assert self.page_cache is not None
        self.page_cache.held[request_id] = held
        denied = self.background_thread_status.can_accept_new_requests()
        if denied is not None or not self.is_running():
            self.page_cache.held.pop(request_id, None)
            cause = self.background_thread_status.fatal_error
            raise RuntimeError(denied or "the thread that generates has ended") from cause
        self.input_queue.put(RequestState(
            request_id=request_id, initial_tokens=list(tokens), max_new_tokens=most, eos_token_id=ends,
            streaming=streaming, logit_processor_kwargs=dict(options),
        ))  # fmt: skip

    def wake(self) -> None:
        """Wake the thread that generates, if it is asleep, so that it looks for requests."""
        self._wake_up_loop.set()

    def end(self) -> None:
        """End the thread, fail the requests that it has, and give the model its attention implementation back."""
        if self._generation_thread is not None:
            self.stop(block=True, hard_stop=True)
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None

    def _create_batch_processor(self) -> StepProcessor:
        assert self.page_cache is not None
        made = self.processor(self.page_cache, self._tell)
        self.output_router = made.output_router
        return made

    def _run_generation_loop(self) -> None:
        try:
            takes_mode = "use_inference_mode" in inspect.signature(super()._run_generation_loop).parameters
            super()._run_generation_loop(*([False] if takes_mode else []))  # since 5.24
        finally:
            assert self.page_cache is not None
            self.page_cache.free_all_requests()

    def check_options(self, options: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: transformers has no such option for a single request, or its value is unusable.
        """
        try:
            self.logit_processor.check_kwargs(dict(options))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        width = int(self.model.get_output_embeddings().weight.shape[0])
        for name, least, most in (("temperature", 1e-5, 1e5), ("top_k", 1, width), ("top_p", 0.0, 1.0)):
            if name in options and not least <= options[name] <= most:  # nor NaN: it would fail the whole step
                raise ConfigError(f"{name}={options[name]}: must be from {least:g} to {most:g}")


def waiting(request_id: str, tokens: list[int]) -> Any:
    """A request for one token, as transformers' scheduler keeps it."""
    return RequestState(request_id=request_id, initial_tokens=tokens, max_new_tokens=1)


@contextmanager
def heard(model: Any) -> Iterator[list[torch.Tensor]]:
    """The logits that tokens were chosen from, a tensor ``[requests, vocabulary]`` a step."""
    logits: list[torch.Tensor] = []

    def listen(module: Any, args: Any, given: Mapping[str, Any], out: Any) -> None:
        made = out.logits[0]
        logits.append(made if "logits_to_keep" in given else made[given["logits_indices"].long()])

    hook = model.register_forward_hook(listen, with_kwargs=True)
    try:
        yield logits
    finally:
        hook.remove()
