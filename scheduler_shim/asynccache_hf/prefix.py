"""``PrefixCache``: ``model.generate`` that does not compute again the beginning that a prompt shares with an earlier
one.

A call for one row takes a lease, fills transformers' own cache from the lease's pages, lets transformers generate, and
publishes what that cache has in the end. The event loop of the cache is in a thread of its own; the model runs in the
calling thread. Several rows that want their likeliest tokens, and nothing that only transformers does, are requests to
the scheduler; other rows are generated one after the other.

Pages are given back when transformers has returned, also if it raised an error.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from asynccache_shim import Limits, SchedulerConfig
from asynccache_shim.model import Checkpoint
from asynccache_shim.request import as_tokens
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.configuration_utils import GenerationMode

from asynccache import AsyncCache, CacheFull, ConfigError, Hits, Lease, LoadFailed, checks
from asynccache_hf.cached_model import CachedModel, config_of, most_new_tokens
from asynccache_hf.call import VERSION, cache_name, parameters
from asynccache_hf.description import identified
from asynccache_hf.layout import Layout
from asynccache_hf.sampling import NO_PAGES, SPECULATION, refuse, sampling_of
from asynccache_hf.trial import ExpectedLogits, TrialStage, compared, tolerance

REFUSED = {
    "cache": "the cache is what this object brings",
    "past_key_values": "the cache is what this object brings",
    "cache_params": "the cache is what this object brings",
    "cache_implementation": "the cache is what this object brings",
    "assistant_model": SPECULATION,
    "custom_generate": "a loop of your own may use the cache in ways that are not known",
    "encoder_outputs": "an encoder's states are not a prefix of anything",
    "position_ids": "they follow from the tokens",
}
"""Arguments that ``generate`` takes, ``PrefixCache`` does not, and why."""

REFUSED_FOR_ROWS = {
    "streamer": "a stream has one row, and there are several",
    "prefix_allowed_tokens_fn": "it is told the number of a row, and rows are not always computed together",
    "negative_prompt_ids": "it is of one row, and rows are not always computed together",
    "negative_prompt_attention_mask": "it is of one row, and rows are not always computed together",
}
"""Arguments that ``PrefixCache`` takes for a single row only."""

MORE_THAN_TOKENS = "the model would compute from more than tokens, and the cache finds a prompt by its tokens alone"

PASSED = frozenset(REFUSED_FOR_ROWS) | {
    "generation_config", "logits_processor", "stopping_criteria", "synced_gpus", "tokenizer", "trust_remote_code",
}  # fmt: skip
"""Arguments of ``generate`` that no generation configuration has, and no forward call is given."""

OWN_LOOP = ("logits_processor", "stopping_criteria", "synced_gpus")
"""Arguments of ``generate`` that only its own loop uses."""

LOAD_ATTEMPTS = 8
"""The number of leases that one row takes at most: after each failure to copy its cached pages to the device it takes
another one. The scheduler's ``load_attempts`` has the same default."""

OURS = {"cache_implementation": None, "use_cache": True, "num_return_sequences": 1}
"""Options that ``PrefixCache`` sets in its calls of ``generate`` where the generation configuration has another
value."""


NOT_TRIED = (
    *NO_PAGES, "penalty_alpha", "dola_layers", "stop_strings", "max_time", "max_length", "min_length",
    "min_new_tokens", "prefill_chunk_size",
)  # fmt: skip
"""Settings of the model's own generation configuration that are left out when ``generate`` is tried."""


class PrefixCache(CachedModel):
    """A model of transformers with a cache of prefixes. May be used by several threads."""

    def __init__(
        self,
        model: Any,
        *,
        storage: str | None = None,
        page_size: int = 16,
        device_tokens: int = 16384,
        host_tokens: int = 65536,
        name: str | None = None,
        on_event: Callable[[Any], None] | None = None,
        **settings: Any,
    ) -> None:
        """Describes the model (which runs it a few times) and opens a cache. ``storage`` is the URL of a store, as
        ``file:/var/tmp/kv``; ``name`` names the weights; without it a digest of the weights is computed. ``on_event``
        is passed to the ``AsyncCache``, and is called in the cache's thread. ``settings`` go to
        ``Layout.cache_config``.

        Raises:
            ConfigError: the model cannot be cached, or a setting is unusable. Nothing is left open.
        """
        settings |= {"storage": storage, "device_tokens": device_tokens, "host_tokens": host_tokens}
        identity, layout, expected = identified(model, page_size, name)
        try_generate(identity.model, layout, expected)
        steps = SchedulerConfig(step_tokens=1024 + page_size)
        super().__init__(identity, layout, "asynccache-prefix", config_of(layout, settings), steps, on_event)

    def generate(self, input_ids: Any = None, *, namespace: str | bytes | None = None, **options: Any) -> Any:
        """Return what ``model.generate(input_ids, **options)`` returns, without computing the tokens that are cached.
        ``input_ids``: ``[rows, tokens]``, shorter rows padded on the left. ``namespace``: the namespace of the prompts.
        Adapters that are active, and weights that have changed, have namespaces of their own in it.

        Several rows are computed together. If tokens are sampled, or ``logits_processor``, ``stopping_criteria`` or a
        setting that works on logits is given, each row has a call of transformers' own, so random numbers go to other
        rows than in a batch of transformers.

        Blocks the thread. A prompt is generated without the cache if the cache has no room for it, if its pages cannot
        be copied to the device, or if it is longer than ``Layout.limit``.

        Raises:
            ConfigError: an argument asks for something that a cache of prefixes cannot do, and the message names it; or
                the model is in ``train()`` mode, or was moved or converted.
            CacheClosed: the cache is closed.
        """
        began = time.monotonic()
        ids = _tokens(input_ids, options)
        namespace = checks.namespace("namespace", namespace)
        given = options.pop("attention_mask", None)
        typed = self._has_types(options)
        settings = _settings(self._model, options)
        copies = int(settings.num_return_sequences or 1)
        tells = self._layout.pool("full") or self._layout.pool("swa")  # states tell no length
        ours = OURS if tells else {**OURS, "prefill_chunk_size": None}
        options |= {name: value for name, value in ours.items() if getattr(settings, name) not in (None, value)}
        now = self._identity.now()
        key = self._identity.within(f"{now}, token_type_ids" if typed else now, namespace)
        asked = _Asked(options, settings, namespace, key, now, typed, began)
        mask = _mask(ids, given, settings)
        rows = [(row[kept], len(row) - int(kept.sum())) for row, kept in zip(ids, mask, strict=True)
                for _ in range(copies)]  # fmt: skip
        made = None
        if len(rows) > 1:
            for name, why in REFUSED_FOR_ROWS.items():
                if options.get(name) is not None:
                    raise ConfigError(f"{name}: {why}")
            if settings.return_dict_in_generate:
                raise ConfigError(
                    "return_dict_in_generate=True: several rows have no single such answer; ask one at a time"
                )
            made = self._together(rows, asked)
        if made is None:
            made = [self._row(row, pads, asked) for row, pads in rows]
        return made[0] if len(rows) == 1 and not rows[0][1] else _stacked(made, rows, settings)

    def _has_types(self, options: dict[str, Any]) -> bool:
        """Remove ``token_type_ids`` from ``options``. Return True if they are there, which then are zeros, and the
        model takes them: some models compute something else from zeros than without them."""
        given = options.pop("token_type_ids", None)
        if given is None:
            return False
        takes, zeros = "token_type_ids" in parameters(self._model), isinstance(given, torch.Tensor) and not given.any()
        if not zeros or (takes and self._layout.recurrent):
            raise ConfigError(f"token_type_ids: {MORE_THAN_TOKENS}")
        return takes

    def _publish(
        self, asked: _Asked, lease: Lease, tokens: Sequence[int], checkpoint: Checkpoint | None = None
    ) -> None:
        """Publish ``tokens``, unless the model has changed since the call began: then it is not known what computed
        them."""
        if self._identity.now() == asked.now:
            self._loop.call(_published(lease, tokens, checkpoint))

    # several rows

    def _together(self, rows: Sequence[tuple[torch.Tensor, int]], asked: _Asked) -> list[Any] | None:
        """Return the outputs of ``rows``, which the scheduler computes in common steps; None if more is asked for than
        it does. A row for which the cache has no room, or whose pages cannot be loaded, is generated without it."""
        settings, bounds = asked.settings, [asked.bounded(len(row), pads) for row, pads in rows]
        longest = max(len(row) + most - 1 for (row, _), (_, most) in zip(rows, bounds, strict=True))
        own = asked.typed or any(asked.options.get(name) for name in OWN_LOOP)
        # What transformers refuses, and what fails in the model, fails alone and not in a step with others' requests.
        own = own or any(most_new_tokens(settings, len(row) + pads) < 1 for row, pads in rows)
        own = own or any(int(row.max()) >= self._vocabulary for row, _ in rows)
        if own or settings.do_sample or any(longest > most for most in (self._layout.limit, self._positions) if most):
            return None
        try:
            sampling = sampling_of(settings)
        except ConfigError:
            return None
        stops = frozenset(end for end in _ends(settings) if end >= 0)
        limits = [Limits(most, stops, options.get("max_time")) for options, most in bounds]
        requests = [self._request(as_tokens(row.tolist()), limit, asked.namespace, asked.now, sampling)
                    for (row, _), limit in zip(rows, limits, strict=True)]  # fmt: skip
        self._begin(requests)
        made = []
        try:
            for request, (row, pads) in zip(requests, rows, strict=True):
                try:
                    made.append(torch.cat([row, row.new_tensor(request.result())]).unsqueeze(0))
                except (CacheFull, LoadFailed):
                    made.append(self._without(row, pads, asked))
        except BaseException:
            for request in requests:
                request.abort()
            raise
        return made

    # one row

    def _row(self, row: torch.Tensor, pads: int, asked: _Asked) -> Any:
        """Return the output of one row, which had ``pads`` before it."""
        tokens, most = row.tolist(), asked.bounded(len(row), pads)[1]
        limit = self._layout.limit
        if limit is not None and len(tokens) + most - 1 > limit:
            return self._without(row, pads, asked)
        try:
            lease = self._loop.call(_loaded_lease(self._cache, tokens, most, asked.key))
        except (CacheFull, LoadFailed):
            return self._without(row, pads, asked)
        try:
            self._count(len(tokens), lease.hits)
            start = self._prefilled(asked, lease, tokens)
            opened = self._paged.open(self._layout.tables(lease), start)
            options, _ = asked.bounded(len(tokens), pads)
            out = generate_after(self._model, opened.cache, start, row.unsqueeze(0), options, asked.typed)
            made = _sequences(out)[0].tolist()
            stop = len(made) - 1  # the last token has not been computed
            with torch.inference_mode():
                opened.save(stop)
            self._paged.synchronize()
            self._publish(asked, lease, made[:stop])
            return out
        finally:
            self._loop.call(lease.__aexit__(None, None, None))

    def _without(self, row: torch.Tensor, pads: int, asked: _Asked) -> Any:
        self._count(len(row), Hits(0, 0, 0))
        options, _ = asked.bounded(len(row), pads)
        return generate_after(self._model, None, 0, row.unsqueeze(0), options, asked.typed)

    def _prefilled(self, asked: _Asked, lease: Lease, tokens: Sequence[int]) -> int:
        """Compute the prompt as far as checkpoints of states are due in it, and return how many tokens are computed
        when transformers takes over. They are due where FULL alone matched, and at the last page's end that the same
        prompt could hit. A state can be read only at the end of a call, so a call of our own ends at each."""
        at = lease.cached
        if not self._layout.recurrent:
            return at
        whole, last = np.asarray(tokens, np.int32), (len(tokens) - 1) // self._layout.page_size * self._layout.page_size
        for stop in sorted({lease.checkpoint_at, last}):
            if stop > at:
                checkpoint = Checkpoint(stop, int(lease.states[1])) if len(lease.states) > 1 else None
                self._paged.compute(self._layout.chunk(lease, whole, at, stop, checkpoint))
                self._publish(asked, lease, tokens[:stop], checkpoint)
                at = stop
        if self._layout.one_by_one and at and at < len(tokens) - 1:
            self._paged.compute(self._layout.chunk(lease, whole, at, len(tokens) - 1, None))
            at = len(tokens) - 1
        return at


def generate_after(
    model: Any, cache: Any, start: int, ids: torch.Tensor, options: Mapping[str, Any], typed: bool = False
) -> Any:
    """Call ``model.generate`` for the prompts ``ids``, ``[rows, tokens]``, whose first ``start`` tokens are in
    ``cache``. If ``cache`` is None, the model makes its own. ``typed``: give it ``token_type_ids``, all 0.

    transformers computes only the tokens after these if the cache tells how many they are. One of recurrent states
    alone does not, so its first call is cut here."""
    options = {**options, "attention_mask": torch.ones_like(ids)}
    if typed:
        options["token_type_ids"] = torch.zeros_like(ids)
    if cache is None:
        return model.generate(ids, **options)
    if not start:
        return model.generate(ids, **{cache_name(model): cache}, **options)
    first = [True]

    def cut(module: Any, args: Any, given: dict[str, Any]) -> Any:
        if not first or not any(value is cache for value in given.values()):
            return None
        first.clear()
        if given["input_ids"].shape[1] < ids.shape[1]:
            return None
        return args, {**given, "input_ids": given["input_ids"][:, start:], "attention_mask": None}

    hook = model.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        return model.generate(ids, **{cache_name(model): cache}, **options)
    finally:
        hook.remove()


def try_generate(model: Any, layout: Layout, expected: ExpectedLogits) -> None:
    """Try whether ``model.generate`` goes on from a cache that it is given. ``expected``: what the model was tried with
    before.

    Raises:
        ConfigError: it does not; the message names transformers' version, and what is missing or differs.
    """
    who = f"{type(model).__name__} with {VERSION}: generate() on a cache that it is given"
    stage, plan = TrialStage(model, replace(layout, packed=False), expected), expected.plan
    start = plan.stop - 1 if layout.one_by_one else plan.late
    options = {**dict.fromkeys(NOT_TRIED), **OURS, "num_beams": 1, "do_sample": False, "max_new_tokens": 1,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    try:
        for begin, stop in itertools.pairwise(dict.fromkeys((0, plan.late, start))):
            stage.compute(1, stage.first, begin, stop, 0, checkpoint=1)
        with torch.inference_mode():
            opened = stage.paged.open({"full": stage.first, "swa": stage.first, "mamba": np.zeros(1, np.int32)}, start)
            out = generate_after(model, opened.cache, start, expected.ids.unsqueeze(0), options)
            opened.save(plan.stop)
    except Exception as error:
        raise ConfigError(f"{who} raises {type(error).__name__}: {error}") from error
    missed = compared(plan.stop - 1, out.logits[0], expected.logits[-1:]).error
    # In half precision the experts of this one token may be others: a token in many is, see ``trial.TOLERANCE``.
    if missed > tolerance(model) * (4 if model.dtype in (torch.float16, torch.bfloat16) else 1):
        raise ConfigError(f"{who} makes logits that differ by {missed:.2g} of their spread from those of one call")


# in the cache's thread


async def _loaded_lease(
    cache: AsyncCache, tokens: Sequence[int], new_tokens: int, namespace: str | bytes | None
) -> Lease:
    """Return a granted lease for ``tokens`` and ``new_tokens`` more, whose cached pages are on the device. Cancelling
    gives everything back.

    Raises:
        CacheFull: the pages can never be had.
        LoadFailed: cached pages could not be copied to the device, ``LOAD_ATTEMPTS`` times.
    """
    attempts = LOAD_ATTEMPTS
    while True:
        lease = await cache.lease(tokens, new_tokens=new_tokens, namespace=namespace).__aenter__()
        try:
            await lease.loaded()
        except BaseException as error:
            lease.release()
            attempts -= 1
            if not attempts or not isinstance(error, LoadFailed):
                raise
        else:
            return lease


async def _published(lease: Lease, tokens: Sequence[int], checkpoint: Checkpoint | None) -> None:
    await lease.commit(tokens, checkpoint=checkpoint)
    lease.adopt()


# arguments


class _Asked(NamedTuple):
    """A call of ``PrefixCache.generate``: its options for transformers, and the generation configuration that they
    make.
    """

    options: Mapping[str, Any]
    settings: Any
    namespace: str | bytes | None
    """The caller's namespace."""
    key: str | bytes | None
    """The namespace in which the call's prompts are cached."""
    now: str
    """The model's identity when the call began."""
    typed: bool
    """True if the model is given ``token_type_ids``."""
    began: float
    """When the call began, by ``time.monotonic``."""

    def bounded(self, length: int, pads: int) -> tuple[dict[str, Any], int]:
        """Return the options of a row of ``length`` tokens that is to be generated now, and how many tokens it may get.
        ``max_length`` and ``min_length`` count the ``pads`` before it, which were cut off. Of ``max_time`` some may
        have passed."""
        options, settings = dict(self.options), self.settings
        if pads and settings.min_length:
            options["min_length"] = max(0, int(settings.min_length) - pads)
        if pads and settings.max_length and settings.max_new_tokens is None:
            options["max_length"] = int(settings.max_length) - pads
        if settings.max_time is not None:
            options["max_time"] = max(0.0, settings.max_time - (time.monotonic() - self.began))
        return options, max(1, int(most_new_tokens(settings, length + pads)))


def _tokens(input_ids: Any, options: dict[str, Any]) -> torch.Tensor:
    """Return the prompts, ``[rows, tokens]``: ``input_ids`` or, if that is None, the option ``inputs``, which
    transformers takes as well and which is removed from ``options``."""
    given = options.pop("inputs", None) if input_ids is None else input_ids
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.is_floating_point() or not given.numel():
        raise ConfigError(f"input_ids={checks.shown(given)} must be a tensor of tokens, [rows, tokens]")
    return given


def _settings(model: Any, options: Mapping[str, Any]) -> Any:
    """Return the generation configuration of a call with ``options``, as transformers has it. An option goes before the
    ``generation_config`` among the options, and that goes before the model's own.

    Raises:
        ConfigError: the options ask for something that a cache of prefixes cannot do; the message names it.
    """
    for name, why in REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"{name}={checks.shown(options[name])}: {why}")
    if not options.get("use_cache", True):
        raise ConfigError("use_cache=False: then there is nothing to cache; call model.generate")
    given = options.get("generation_config")
    settings = copy.deepcopy(model.generation_config if given is None else given)
    if given is not None:
        settings.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    for name, value in settings.update(**options).items():
        if value is not None and name not in PASSED:
            raise ConfigError(f"{name}: {MORE_THAN_TOKENS}")
    refuse(settings, NO_PAGES)
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(f"generation mode {mode.value!r}: it uses the cache in ways that are not known")
    return settings


def _mask(ids: torch.Tensor, given: Any, settings: Any) -> torch.Tensor:
    """Return the mask of the places of ``ids`` that are tokens. Without ``given`` these are, as in transformers, all
    that are not the pad token, unless that token ends an answer, too."""
    pad = settings.pad_token_id
    if given is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
        if pad is not None and int(pad) not in _ends(settings):
            mask = ids.ne(int(pad))
    else:
        mask = torch.as_tensor(given).to(ids.device).bool()
    if mask.shape != ids.shape:
        raise ConfigError(f"attention_mask: its shape is {tuple(mask.shape)}, and that of input_ids {tuple(ids.shape)}")
    if (mask[:, :-1] & ~mask[:, 1:]).any() or not mask[:, -1].all():
        raise ConfigError("attention_mask: rows must be padded on the left, and all else be tokens")
    return mask


def _ends(settings: Any) -> list[int]:
    """The tokens that end an answer, in the order in which they were given: transformers pads with the first."""
    ends = settings.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


# results


def _sequences(out: Any) -> torch.Tensor:
    return torch.as_tensor(out if isinstance(out, torch.Tensor) else out.sequences)


def _stacked(made: Sequence[Any], rows: Sequence[tuple[torch.Tensor, int]], settings: Any) -> Any:
    """Return all rows in one tensor: the padding that a row came with, the row, and padding where others are longer. If
    the only row's output is an object and not a tensor, return that object with this tensor as its ``sequences``."""
    pad = settings.pad_token_id
    pad = next(iter(_ends(settings)), 0) if pad is None else int(pad)
    sequences = [_sequences(out)[0] for out in made]
    whole = [torch.cat([own.new_full((pads,), pad), own]) for own, (_, pads) in zip(sequences, rows, strict=True)]
    stacked = pad_sequence(whole, batch_first=True, padding_value=pad)
    if isinstance(made[0], torch.Tensor):
        return stacked
    made[0].sequences = stacked
    return made[0]
