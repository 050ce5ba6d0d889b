"""The identity of a model: weights and adapters, which decide the KV of given tokens. A cache must not serve KV that
was computed with others.

``ModelIdentity`` names them. The weights as they are at first are part of the model's name. Everything that may change
later gives a namespace: the active adapters, by their names, weights and scaling, and weights that were changed. It is
found out anew for each request, so pages are missed, not served, when something is different, and hit again when it is
as it was.

Law: two names are equal only if weights, buffers and adapters are. A tensor is read again only if it seems to have
changed. Three things tell: torch's own count of changes in place, where its data lies, and a few of its numbers. The
numbers find what is done through ``tensor.data``, which torch does not count; there a change that leaves all of these
few alone stays unseen.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from asynccache import Adapter, ConfigError

SAMPLES = 8
"""The numbers of each tensor that are looked at."""

_log = logging.getLogger(__name__)


def plain(model: Any) -> Any:
    """Return transformers' own model: the one inside of what ``torch.compile`` or PEFT has made of it. The adapters of
    PEFT are in its layers, and ``generate`` of either wrapper calls its ``generate``.

    Raises:
        ConfigError: an active adapter does not compute from tokens alone.
    """
    while True:
        if "_orig_mod" in getattr(model, "_modules", ()):
            model = model._orig_mod
        elif hasattr(type(model), "get_base_model") and hasattr(model, "peft_config"):
            for name in model.active_adapters:
                _check_adapter(name, model.peft_config[name])
            model = model.get_base_model()
        else:
            return model


def _check_adapter(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise ConfigError(f"adapter {name!r}: {kind} puts tokens of its own before every prompt; call model.generate")
    if kind in ("XLORA", "POLY") or getattr(config, "alora_invocation_tokens", None):
        raise ConfigError(f"adapter {name!r}: how it is applied depends on the whole prompt, so the KV of a prefix is "
                          "another in each; call model.generate")  # fmt: skip


class Parts(NamedTuple):
    """The tensors of a model: those that it has without adapters, and those of each adapter. ``states``: how each layer
    that uses adapters does so; ``active``: the names of those that are used anywhere."""

    weights: list[torch.Tensor]
    adapters: dict[str, list[torch.Tensor]]
    states: list[tuple[Any, ...]]
    active: set[str]


def parts_of(model: Any) -> Parts:
    """
    Raises:
        ConfigError: a part of the model is in ``train()`` mode.
    """
    found = Parts([], {}, [], set())
    left: list[tuple[str, Any, list[torch.Tensor], bool]] = [("", model, found.weights, False)]
    while left:
        path, module, group, adapting = left.pop()
        own = module.__dict__
        names = getattr(type(module), "adapter_layer_names", ())  # where a layer of PEFT's keeps adapters, by name
        adapting = adapting or bool(names)
        if own["training"] and (not adapting or (isinstance(module, torch.nn.Dropout) and module.p)):
            who = f"{type(model).__name__} is in train() mode (its {type(module).__name__} is)"
            raise ConfigError(f"{who}, in which dropout makes other KV each time: call model.eval()")
        group += [tensor for tensor in own["_parameters"].values() if tensor is not None]
        if buffers := own["_buffers"]:
            passing = own["_non_persistent_buffers_set"]  # rotary embeddings change theirs in any call
            group += [tensor for name, tensor in buffers.items() if tensor is not None and name not in passing]
        if not names:
            children = own["_modules"].items()
            left += [(f"{path}.{name}", child, group, adapting) for name, child in children if child is not None]
            continue
        for name, child in own["_modules"].items():
            if name not in names or not hasattr(child, "items"):
                left.append((f"{path}.{name}", child, group, True))
                continue
            for adapter, each in child.items():
                mine = found.adapters.setdefault(adapter, [])
                if isinstance(each, torch.Tensor):
                    mine.append(each)
                else:
                    left.append((f"{path}.{name}.{adapter}", each, mine, True))
        if state := _state(module, found.active):
            found.states.append((path, *state))
    return found


def _state(layer: Any, active: set[str]) -> tuple[Any, ...]:
    """How a layer of PEFT's uses its adapters: names, plain settings such as the scaling, and what is merged into the
    weights. The names are added to ``active``."""
    own = layer.__dict__
    held = {adapter for name in layer.adapter_layer_names for adapter in own["_modules"].get(name, ())}
    used = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in held]
    active.update(used)
    scales = []
    for name in layer.other_param_names if used else ():
        values = own.get(name)
        if isinstance(values, dict):
            scales += [(name, who, values[who]) for who in used if isinstance(values.get(who), (int, float, str))]
    return (*used, *scales, *(("merged", name) for name in layer.merged_adapters))


def stamp_of(tensors: Sequence[torch.Tensor]) -> Stamp:
    """Return what tells that tensors have changed, without reading them."""
    counted: list[int] = []
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    with torch.inference_mode():
        for tensor in tensors:
            counted += (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
            if type(tensor) not in _USUAL or tensor.is_meta:
                continue
            if size := tensor.numel():
                count, step = min(SAMPLES, size), max(1, size // SAMPLES)
                if tensor.is_contiguous():
                    some = tensor.as_strided((count,), (step,))
                else:
                    some = tensor[torch.unravel_index(torch.arange(count, device=tensor.device) * step, tensor.shape)]
                samples.setdefault((tensor.dtype, tensor.device), []).append(some)
        taken = [torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in samples.values()]
    return counted, b"".join(taken)


_USUAL = (torch.Tensor, torch.nn.Parameter)

Stamp = tuple[list[int], bytes]
"""Counts of changes and addresses of tensors, and some of their numbers."""


class ModelIdentity:
    """The name of a model's weights, and the namespaces of its adapters and of later changes. May be used by several
    threads: two that find one change at once both read the weights, and find the same."""

    def __init__(self, model: Any, name: str | None = None) -> None:
        """``model``: as ``plain`` returns it, after its first run: some kinds of weights are rearranged then. ``name``
        names the weights as they are now; without it a digest of configuration, weights and buffers does, which reads
        them once.

        Raises:
            ConfigError: a part of the model is in ``train()`` mode, or a weight cannot be read.
        """
        self.model = model
        self._warned = False
        parts = parts_of(model)
        self.name = name or f"{type(model).__name__}-{self._weights_digest(parts)}"
        self._first = self.name
        self._place = model.dtype, model.device
        self._known: dict[str | None, tuple[Stamp, str]] = {None: (stamp_of(parts.weights), self._first)}

    def __repr__(self) -> str:
        return f"<ModelIdentity {self.name!r}>"

    def now(self) -> str:
        """Return the name of all that has changed since the beginning, and of the active adapters: 32 hexadecimal
        digits, or nothing if the weights are as they were and no adapter is active.

        Raises:
            ConfigError: a part of the model is in ``train()`` mode, or the model was moved or converted.
        """
        model = self.model
        parts = parts_of(model)
        if (model.dtype, model.device) != self._place:
            before, after = (f"{dtype} on {device}" for dtype, device in (self._place, (model.dtype, model.device)))
            raise ConfigError(f"{type(model).__name__} was {before} when its cache was opened and is {after} now: open "
                              "a new cache")  # fmt: skip
        weights = self._digest(None, parts)
        adapters = [(name, self._digest(name, parts)) for name in sorted(parts.active)]
        if weights == self._first and not parts.states:
            return ""
        return _short(json.dumps([weights, adapters, parts.states]).encode())

    @staticmethod
    def within(now: str, extra_key: str | bytes | None) -> str | bytes | None:
        """Return the key for ``extra_key`` while the model is ``now``."""
        given = extra_key.encode() if isinstance(extra_key, str) else extra_key
        if not now and not (given or b"").startswith(b"model "):  # nobody's own key is taken for one that is made here
            return extra_key
        made = f"model {now} {'' if given is None else given.hex() or '-'}"
        return Adapter(made, extra_key.lora_name, extra_key.lora_id) if isinstance(extra_key, Adapter) else made

    def _digest(self, adapter: str | None, parts: Parts) -> str:
        """The digest of the weights, or of those of an adapter. It is computed anew if they seem to have changed."""
        stamp = stamp_of(parts.weights if adapter is None else parts.adapters[adapter])
        before = self._known.get(adapter)
        if before is not None and before[0] == stamp:
            return before[1]
        if adapter is None:
            digest = f"{type(self.model).__name__}-{self._weights_digest(parts)}"
        else:
            own = frozenset(map(id, parts.adapters[adapter]))
            digest = _short(*_contents(self.model, own.__contains__))
        self._known[adapter] = stamp, digest
        if before is not None and before[1] != digest and not self._warned:
            self._warned = True
            what = "the model's weights" if adapter is None else f"the weights of the adapter {adapter!r}"
            _log.warning("asynccache: %s have changed, so what was cached with the old ones is not used any more", what)
        return digest

    def _weights_digest(self, parts: Parts) -> str:
        config = self.model.config.to_dict()
        config.pop("transformers_version", None)  # another version computes the same
        of_adapters = frozenset(id(tensor) for own in parts.adapters.values() for tensor in own)
        settings = json.dumps(config, sort_keys=True, default=str).encode()
        return _short(settings, *_contents(self.model, lambda tensor: tensor not in of_adapters))


def _contents(model: Any, chosen: Callable[[int], bool]) -> Iterator[bytes]:
    """Yield names, dtypes, shapes and digests of the model's tensors, buffers included: of those whose ``id`` is
    ``chosen``."""
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if not chosen(id(tensor)):
                continue
            try:
                kept = tensor.detach().cpu().contiguous()
                digest = xxhash.xxh3_128_digest(kept.reshape(-1).view(torch.uint8).numpy())
            except Exception as error:  # kinds of tensors raise whatever they like
                raise ConfigError(f"{name}: these weights cannot be read ({error}); give the model a name=") from error
            place = name.replace(".base_layer.", ".")  # where PEFT keeps the layer that it has wrapped
            yield f"{place} {kept.dtype} {tuple(kept.shape)} ".encode() + digest


def _short(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:32]
