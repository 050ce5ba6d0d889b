"""``ContinuousBatching``: transformers' continuous batching on the cache's pages.

There are three kinds of threads. One has the event loop of the cache, where each request has a task; one is
transformers' own, which generates; the others are the callers'. A request's task takes a lease when the request
arrives, or, if the request shares a beginning with an earlier one, when that beginning is computed. The task waits
until the pages are on the device, and only then hands the request to transformers. So no step ever sees a request that
waits for room, for a load or for another request. The task publishes the prompt while it is being computed, and the
whole text in the end.

Law: a lease is released when transformers will not touch its pages again, and not before.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from asynccache_shim.request import Finish, as_tokens

from asynccache import CacheClosed, ConfigError, Lease, LoadFailed, checks
from asynccache_hf.ahead import UncomputedPrompt, UncomputedPrompts
from asynccache_hf.attending import places_of, replace_attention
from asynccache_hf.batch_request import BatchPrompt, BatchRequest
from asynccache_hf.cached_model import CachedModel, config_of, most_new_tokens
from asynccache_hf.continuous import PageCache, PagedManager, RequestOutput, RequestPages, check_model
from asynccache_hf.describing import identified
from asynccache_hf.generation import LOAD_ATTEMPTS
from asynccache_hf.paged import bind
from asynccache_hf.trial_together import tried_together

NAME = "asynccache-batching"


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
        """Describes the model (which runs it a few times), opens a cache and starts the thread that generates.

        ``storage``: the URL of a store, as ``file:/var/tmp/kv``. ``step_tokens``: the most tokens that one step
        computes, of all requests together. ``generation_config``: transformers' configuration for all requests
        (default: the model's own). ``seed``: the seed of sampling. ``name`` names the weights; without it a digest of
        the weights is computed. ``on_event`` is passed to the ``AsyncCache``, and is called in the cache's thread.
        ``settings`` go to ``Layout.cache_config``.

        A model that was loaded with ``eager`` attention computes by ``paged|eager`` until this object is closed; other
        calls of the model, such as ``model.generate``, raise ``ValueError`` meanwhile.

        Raises:
            ConfigError: the model cannot be served like this, or a setting is unusable. Nothing is left open.
        """
        step_tokens = checks.integer("step_tokens", step_tokens, 1)
        seed = None if seed is None else checks.integer("seed", seed)
        generation = _generation(model, generation_config)
        identity, layout, expected = identified(model, page_size, name)
        model = identity.model
        check_model(model, layout)
        settings |= {"storage": storage, "device_tokens": device_tokens, "host_tokens": host_tokens}
        config = config_of(layout, settings)
        replace_attention()
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._positions = int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)
        self._device_tokens, self._step_tokens = device_tokens, step_tokens
        self._ids = count(1)
        self._open: dict[str, _ServedRequest] = {}
        self._prompts = UncomputedPrompts(page_size)
        self._door = threading.Lock()
        self._closing = False
        self._manager = PagedManager(model, generation, seed, step_tokens)
        try:
            tried_together(self._manager, model, layout, expected)
            super().__init__(identity, layout, NAME, config, on_event)
        except BaseException:
            self._manager.end()
            raise

    def _bind(self) -> None:
        slots = [own.slots[0] for own in bind(self._layout, self._cache.pools)]
        self._pages = PageCache(self._layout, slots, self._device_tokens, self._step_tokens)
        self._manager.begin(self._pages, self._on_output, f"{NAME}-generates")

    def __repr__(self) -> str:
        return f"<ContinuousBatching of {self._layout.model!r}: {len(self._open)} requests, {self._counts}>"

    # what is asked of it

    def generate_batch(
        self, prompts: Iterable[Sequence[int]], *, max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None, extra_key: str | bytes | None = None, **options: Any,
    ) -> list[BatchRequest]:  # fmt: skip
        """Continue all ``prompts`` (lists of tokens), and return their requests, in the same order, when the last one
        is over. A request that failed has its ``error``, and does not disturb the others. The arguments are those of
        ``add_request``. If the call is interrupted, all requests are aborted.

        Raises:
            ConfigError: an argument is unusable; no request was begun.
            CacheClosed: this is closed.
        """
        asked = [self._asked(f"prompts[{i}]", tokens, max_new_tokens, eos_token_id, extra_key, False, options)
                 for i, tokens in enumerate(prompts)]  # fmt: skip
        requests = self._begin(asked)
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
        eos_token_id: int | Sequence[int] | None = None, extra_key: str | bytes | None = None, **options: Any,
    ) -> BatchRequest:  # fmt: skip
        """Begin to continue the prompt ``tokens``. Returns its request at once.

        ``max_new_tokens``, ``eos_token_id`` (one or several; -1: none): by default those of the generation
        configuration. ``extra_key``: the namespace of the prompt. ``options``: options of sampling for this request
        alone, allowed if the generation configuration samples and sets the option for all requests: ``temperature``,
        ``top_k``, ``top_p``.

        Raises:
            ConfigError: an argument is unusable.
            CacheClosed: this is closed.
        """
        asked = self._asked("tokens", tokens, max_new_tokens, eos_token_id, extra_key, True, options)
        return self._begin([asked])[0]

    @property
    def closed(self) -> str | None:
        if self._closing:
            return "the cache is closed"
        return super().closed if self._manager.is_running() else "the thread that generates has ended"

    def close(self) -> None:
        """End all requests that are not over (their error is ``CacheClosed``), save the pages that are not saved yet,
        for at most the cache's ``close_deadline`` seconds, and end the threads. May be called again, and by several
        threads at once."""
        with self._door:
            self._closing = True
        super().close()

    def _close(self) -> None:
        try:
            self._loop.call(self._end_all())
        finally:
            try:
                self._manager.end()
            finally:
                super()._close()

    def _asked(
        self, what: str, tokens: Any, most: Any, ends: Any, extra_key: Any, streaming: bool, options: Mapping[str, Any],
    ) -> BatchPrompt:  # fmt: skip
        try:
            prompt = as_tokens(tokens).tolist()
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
        if max(prompt) >= self._vocabulary:
            raise ConfigError(f"{what}: token {max(prompt)} is none of the model's {self._vocabulary}")
        settings = self._manager.generation_config
        most = checks.integer("max_new_tokens", most_new_tokens(settings, len(prompt)) if most is None else most, 1)
        self._layout.check_length(len(prompt) + most - 1)
        if self._positions and len(prompt) + most - 1 > self._positions:
            raise ConfigError(f"{what}: {len(prompt)} tokens and {most} new ones are more than the model's "
                              f"{self._positions} positions")  # fmt: skip
        given = settings.eos_token_id if ends is None else ends
        stops = frozenset() if given is None else frozenset(
            checks.integer("eos_token_id", each) for each in (given if isinstance(given, (list, tuple)) else [given])
        )  # fmt: skip
        self._manager.check_options(options)
        now = self._identity.now()
        key = self._identity.within(now, checks.namespace("extra_key", extra_key))
        return BatchPrompt(prompt, most, stops, key, streaming, dict(options), now)

    def _begin(self, asked: Sequence[BatchPrompt]) -> list[BatchRequest]:
        requests = [BatchRequest(f"request-{next(self._ids)}", each, self._abort) for each in asked]
        with self._door:  # what comes in before the end is ended with the rest
            if self._closing:
                raise CacheClosed("the cache is closed")
            self._loop.soon(self._serve_all, requests)
        return requests

    def _abort(self, request: BatchRequest) -> None:
        with suppress(CacheClosed):  # closing ends all requests
            self._loop.soon(self._abort_soon, request.id)

    # in the thread that generates

    def _on_output(self, output: RequestOutput) -> None:
        served = self._open.get(output.request_id)
        if served is not None:
            served.request.tell(output.tokens)
            if output.finished:
                served.output = output

    # in the cache's thread

    def _serve_all(self, requests: Sequence[BatchRequest]) -> None:
        for request in requests:
            served = self._open[request.id] = _ServedRequest(request, asyncio.get_running_loop())
            served.task = asyncio.create_task(self._serve(served), name=f"{NAME} {request.id}")

    def _abort_soon(self, request_id: str) -> None:
        served = self._open.get(request_id)
        if served is None:
            return
        served.aborted = True
        if served.handed:
            self._manager.cancel_request(request_id)
        elif served.task is not None and served.begun:  # a task that is cancelled before it begins does nothing at all
            served.task.cancel()

    async def _end_all(self) -> None:
        left = list(self._open.values())
        for served in left:
            served.closed = True
            self._abort_soon(served.request.id)
        if tasks := [served.task for served in left if served.task is not None]:
            await asyncio.wait(tasks)  # unlike gather, this cancels none of them when it is cancelled itself

    async def _serve(self, served: _ServedRequest) -> None:
        finish, error = Finish.FAILED, None
        served.begun = True
        try:
            finish = Finish.ABORTED if served.aborted else await self._leased(served)
        except asyncio.CancelledError:
            finish = Finish.ABORTED
        except Exception as failed:
            error = failed
        if served.closed and finish is not Finish.LENGTH and finish is not Finish.STOP:
            finish, error = Finish.FAILED, _closed()
        del self._open[served.request.id]
        served.request.end(finish, error)

    async def _leased(self, served: _ServedRequest) -> Finish:
        asked, attempt = served.request.asked, 1
        while True:
            prompt = self._prompts.enter(asked.tokens, asked.extra_key)
            try:
                await prompt.turn()
                async with self._cache.lease(asked.tokens, new_tokens=asked.most, extra_key=asked.extra_key) as lease:
                    prompt.reach(lease.cached)
                    try:
                        await lease.loaded()
                    except LoadFailed:
                        if attempt == LOAD_ATTEMPTS:
                            raise
                        attempt += 1
                        continue  # enter again, behind the prompts that wait, one of which may load the pages
                    return await self._run(served, lease, prompt)
            finally:
                self._prompts.leave(prompt)

    async def _run(self, served: _ServedRequest, lease: Lease, prompt: UncomputedPrompt) -> Finish:
        """Run a request whose pages are loaded. From here on its task ends only when transformers has ended the
        request."""
        request, asked = served.request, served.request.asked
        self._counts = self._counts.plus(len(asked.tokens), lease.hits)
        request.hits = lease.hits
        places = places_of(self._layout, self._layout.tables(lease), self._model.device)
        held = RequestPages(lease.cached, places, len(asked.tokens), served.note_computed, served.over)
        ends = sorted(asked.ends) or [-1]
        self._manager.submit(request.id, asked.tokens, asked.most, ends, asked.streaming, held, asked.options)
        served.handed = True
        # Other tasks that got their leases in this turn of the loop submit their requests before this wakes the thread.
        asyncio.get_running_loop().call_soon(self._manager.wake)
        failed = await self._prompt_published(served, lease, prompt)
        while not served.ended:
            await served.next_news()
        if failed is not None:
            raise failed
        if served.output is None:
            if served.aborted:
                return Finish.ABORTED
            raise RuntimeError("the thread that generates has ended")
        if served.output.error is not None:
            raise served.output.error
        made = served.output.tokens
        if self._identity.now() == asked.now:  # else it is not known what computed it
            await lease.commit([*asked.tokens, *made[:-1]])  # the last token was not computed
        return Finish.STOP if made[-1] in asked.ends else Finish.LENGTH

    async def _prompt_published(
        self, served: _ServedRequest, lease: Lease, prompt: UncomputedPrompt
    ) -> Exception | None:
        """Publish the prompt while it is being computed, until all of it is published or the request is over. Returns
        None, or the error that prevented this. After an error transformers has been told to cancel the request, and
        the caller must keep the lease until the request is over, because transformers still uses its pages."""
        tokens = served.request.asked.tokens
        at = lease.cached
        try:
            while at < len(tokens):
                if at < served.computed:
                    at = served.computed
                    if self._identity.now() == served.request.asked.now:
                        await lease.commit(tokens[:at])
                    prompt.reach(at)
                elif served.ended:
                    return None
                else:
                    await served.next_news()
            # SWA pages that the window has left at the prompt's end are given back. Those that it leaves while decoding
            # stay until the end, because another thread uses their places for the whole request.
            lease.advance(at)
        except Exception as error:
            self._manager.cancel_request(served.request.id)
            return error
        finally:
            self._prompts.leave(prompt)
        return None


class _ServedRequest:
    """A request, and the news of it from the thread that generates. ``computed``: how many tokens of the prompt are
    computed. ``ended``: True when no step will touch its pages again. ``output``: all its tokens, or its error; None if
    it was cancelled."""

    def __init__(self, request: BatchRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.begun = self.handed = self.aborted = self.closed = False
        self.computed, self.ended = 0, False
        self.output: RequestOutput | None = None
        self._loop = loop
        self._news = asyncio.Event()

    def note_computed(self, computed: int) -> None:
        """Note how many tokens of the prompt are computed. Called by the thread that generates."""
        self.computed = computed
        self._loop.call_soon_threadsafe(self._news.set)

    def over(self) -> None:
        """Note that no step will touch the request's pages again. Called by the thread that generates."""
        self.ended = True
        self._loop.call_soon_threadsafe(self._news.set)

    async def next_news(self) -> None:
        """Return when there was news since the last call, or at once if the request is over."""
        if not self.ended:
            await self._news.wait()
            self._news.clear()


def _closed() -> CacheClosed:
    return CacheClosed("the cache was closed before the request was over")


def _generation(model: Any, given: Any) -> Any:
    """The generation configuration of all requests.

    Raises:
        ConfigError: the configuration asks for something that continuous batching cannot do.
    """
    settings = copy.deepcopy(model.generation_config if given is None else given)
    for name, usual, why in (
        ("num_beams", 1, "beams take over each other's KV, and the pages of a request hold one sequence"),
        ("num_return_sequences", 1, "ask for the prompt as often as you want answers"),
        ("max_time", None, "requests have no clock; abort() a request whose time is over, or use PrefixCache"),
    ):
        if (getattr(settings, name, None) or usual) != usual:
            raise ConfigError(f"generation_config.{name}={getattr(settings, name)}: {why}")
    return settings
