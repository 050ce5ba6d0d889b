"""``ContinuousBatching``: many requests at a time to one model of transformers, on the cache's pages. The scheduler of
``asynccache_shim`` serves them, in a thread of its own; callers are not asynchronous, and may be many threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from asynccache_shim import Limits, SchedulerConfig
from asynccache_shim.request import MAX_SEED, as_tokens

from asynccache import ConfigError, checks
from asynccache_hf.cached_model import BatchRequest, CachedModel, config_of, most_new_tokens
from asynccache_hf.description import identified
from asynccache_hf.sampling import sampled, sampling_of


class ContinuousBatching(CachedModel):
    """A model of transformers that serves many requests at a time. May be used by several threads."""

    def __init__(
        self,
        model: Any,
        *,
        storage: str | None = None,
        page_size: int = 16,
        device_tokens: int = 16384,
        host_tokens: int = 65536,
        step_tokens: int = 1024,
        generation_config: Any = None,
        seed: int | None = None,
        name: str | None = None,
        on_event: Callable[[Any], None] | None = None,
        **settings: Any,
    ) -> None:
        """Describes the model (which runs it a few times), opens a cache and starts the threads that serve.

        ``storage``: the URL of a store, as ``file:/var/tmp/kv``. ``step_tokens``: the most tokens that one step
        computes, of all requests together. ``generation_config``: transformers' configuration for all requests
        (default: the model's own). Its ``max_time`` ends a request, as ``Finish.LENGTH``, with the first token that is
        made so many seconds or more after the request came. ``seed``: the seed of sampling; the same requests in the
        same order draw the same tokens. ``name`` names the weights; without it a digest of the weights is computed.
        ``on_event`` is passed to the ``AsyncCache``, and is called in the cache's thread. ``settings`` go to
        ``Layout.cache_config``.

        Raises:
            ConfigError: the model cannot be served like this, or a setting is unusable. Nothing is left open.
        """
        page_size = checks.integer("page_size", page_size, 1)
        step_tokens = checks.integer("step_tokens", step_tokens, page_size + 1)
        self._seed = None if seed is None else checks.integer("seed", seed)
        self._generation = generation = copy.deepcopy(model.generation_config if generation_config is None else
                                                      generation_config)  # fmt: skip
        self._sampling = sampling_of(generation)
        most = generation.max_time
        self._max_time = None if most is None else checks.number("generation_config.max_time", most, 0)
        identity, layout, _ = identified(model, page_size, name)
        self._ids = count(1)
        settings |= {"storage": storage, "device_tokens": device_tokens, "host_tokens": host_tokens}
        steps = SchedulerConfig(step_tokens=step_tokens, max_running=step_tokens - page_size)
        super().__init__(identity, layout, "asynccache-batching", config_of(layout, settings), steps, on_event)

    def generate_batch(
        self, prompts: Iterable[Sequence[int]], *, max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None, namespace: str | bytes | None = None, **options: Any,
    ) -> list[BatchRequest]:  # fmt: skip
        """Continue all ``prompts`` (lists of tokens), and return their requests, in the same order, when the last one
        is over. A request that failed has its ``error``, and does not disturb the others. The arguments are those of
        ``add_request``. If the call is interrupted, all requests are aborted.

        Raises:
            ConfigError: an argument is unusable; no request was begun.
            CacheClosed: this is closed.
        """
        given = {f"prompts[{i}]": tokens for i, tokens in enumerate(prompts)}
        requests = self._asked(given, max_new_tokens, eos_token_id, namespace, options)
        self._begin(requests)
        try:
            for request in requests:
                request.wait()
        except BaseException:
            for request in requests:
                request.abort()
            raise
        return requests

    def add_request(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None, namespace: str | bytes | None = None, **options: Any,
    ) -> BatchRequest:  # fmt: skip
        """Begin to continue the prompt ``tokens``. Returns its request at once.

        ``max_new_tokens``, ``eos_token_id`` (one or several; -1: none): by default those of the generation
        configuration. ``namespace``: the namespace of the prompt. ``options``: options of sampling for this request
        alone, allowed if the generation configuration samples: ``temperature``, ``top_k``, ``top_p``, ``seed``.

        Raises:
            ConfigError: an argument is unusable.
            CacheClosed: this is closed.
        """
        requests = self._asked({"tokens": tokens}, max_new_tokens, eos_token_id, namespace, options)
        self._begin(requests)
        return requests[0]

    def _asked(
        self, prompts: Mapping[str, Any], most: Any, ends: Any, namespace: Any, options: Mapping[str, Any]
    ) -> list[BatchRequest]:
        """The requests for ``prompts``, whose names are those that a message calls them by."""
        given = self._generation.eos_token_id if ends is None else ends
        given = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
        stops = frozenset(checks.integer("eos_token_id", each) for each in given) - {-1}
        if options and not self._sampling.temperature:
            raise ConfigError(f"{next(iter(options))}: the generation configuration does not sample")
        sampling = sampled(self._sampling, options)
        namespace, now = checks.namespace("namespace", namespace), self._identity.now()
        requests = []
        for what, each in prompts.items():
            try:
                tokens = as_tokens(each)
            except ConfigError as error:
                raise ConfigError(f"{what}: {error}") from None
            if tokens.max() >= self._vocabulary:
                raise ConfigError(f"{what}: token {tokens.max()} is none of the model's {self._vocabulary}")
            usual = most_new_tokens(self._generation, len(tokens)) if most is None else most
            new = checks.integer("max_new_tokens", usual, 1)
            self._layout.check_length(len(tokens) + new - 1)
            if self._positions and len(tokens) + new - 1 > self._positions:
                raise ConfigError(f"{what}: {len(tokens)} tokens and {new} new ones are more than the model's "
                                  f"{self._positions} positions")  # fmt: skip
            if self._seed is not None and "seed" not in options:
                sampling = sampling._replace(seed=(self._seed * 0x9E3779B97F4A7C15 + next(self._ids)) % MAX_SEED)
            requests.append(self._request(tokens, Limits(new, stops, self._max_time), namespace, now, sampling))
        return requests
