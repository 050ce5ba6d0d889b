"""The identity of a model: weights and adapters, which decide the KV of given tokens. A cache must not serve KV that
was computed with others.

``ModelIdentity`` names them. The weights as they are at first are part of the model's name. Everything that may change
later gives a namespace: the active adapters, by their names, weights and settings, and weights or a configuration that
were changed. That is looked up anew for each request, so pages are missed, not served, when something is different, and
hit again when it is as it was. Weights that the caller has named are not read at first, so once they have changed they
cannot be recognized: what was cached before the change stays a miss.

Two names are equal only if weights, buffers, configuration and adapters are. To be quick, a tensor is read again only
if it seems to have changed. Three things tell: torch's own count of changes in place, where its data lies, and a few of
its numbers. The numbers catch what is done through ``tensor.data``, which torch does not count. What stays unseen is
such a change that leaves these few numbers alone, and any change of what is neither weight nor setting: attributes of
layers, hooks, and the frequencies of rotary embeddings that change theirs by themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from transformers import PreTrainedConfig

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
    """The tensors of a model: those that it has without adapters, and those of each adapter."""

    weights: list[torch.Tensor]
    adapters: dict[str, list[torch.Tensor]]
    states: list[tuple[Any, ...]]
    """For each layer that uses adapters, which ones and how."""
    active: set[str]
    """The names of the adapters that any layer uses."""


def parts_of(model: Any) -> Parts:
    """Return the tensors of ``model``. Raises ``ConfigError``: a part of it is in ``train()`` mode."""
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
            passing = own["_non_persistent_buffers_set"] if _follows_length(own) else ()
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
        if state := _state(module, found):
            found.states.append((path, *state))
    return found


def _follows_length(own: dict[str, Any]) -> bool:
    """Whether a module is a rotary embedding that changes its buffers in any call, as the length demands."""
    found = own.get("rope_type")
    kinds = found.values() if isinstance(found, dict) else (found,)
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def _state(layer: Any, found: Parts) -> tuple[Any, ...]:
    """How a layer of PEFT's uses its adapters: names, settings such as the scaling, and what is merged into the
    weights. The names are added to ``found.active``, and settings that are tensors to the tensors of their adapter."""
    own = layer.__dict__
    held = {adapter for name in layer.adapter_layer_names for adapter in own["_modules"].get(name, ())}
    used = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in held]
    found.active.update(used)
    scales: list[tuple[str, str, Any]] = []
    for name in layer.other_param_names if used else ():
        values = own.get(name)
        for who in used if isinstance(values, dict) else ():
            value = values.get(who)
            if isinstance(value, torch.Tensor):
                found.adapters.setdefault(who, []).append(value)
            elif value is not None:
                scales.append((name, who, _plain(value)))
    return (*used, *scales, *(("merged", name) for name in layer.merged_adapters))


def _plain(value: Any) -> Any:
    """Return a setting as JSON can have it. Of an object only the kind is known, since its ``repr`` is another in each
    process."""
    if isinstance(value, (int, float, str)) or value is None:
        return value
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in (value if isinstance(value, (list, tuple)) else sorted(value, key=repr))]
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else type(value).__qualname__


def settings_of(config: Any) -> dict[str, Any]:
    """Return all settings in a configuration, and in those within it, but for what transformers changes by itself while
    the model runs."""
    found = {}
    for name, value in sorted(dict(vars(config)).items()):
        if name in _PASSING:
            continue
        if name == "_attn_implementation_internal" and isinstance(value, str):
            value = value.removeprefix("paged|")  # set while there is a manager of continuous batching
        found[name] = settings_of(value) if isinstance(value, PreTrainedConfig) else _plain(value)
    return found


_PASSING = ("is_causal",)
"""Settings that transformers sets and takes back within each run, perhaps in another thread."""


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
        self._settings = settings_of(model.config)
        self.name = name or f"{type(model).__name__}-{self._weights_digest(parts)}"
        self._first = self.name
        self._place = model.dtype, model.device
        self._known: dict[str | None, tuple[Stamp, str]] = {None: (stamp_of(parts.weights), self._first)}

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
        settings = settings_of(model.config)
        edited = [] if settings == self._settings else [settings]
        if edited:
            self._warn("the model's configuration has changed")
        if weights == self._first and not parts.states and not edited:
            return ""
        return _short(json.dumps([weights, adapters, parts.states, *edited]).encode())

    @staticmethod
    def within(now: str, namespace: str | bytes | None) -> str | bytes | None:
        """Return the namespace in which ``namespace`` is cached while the model's identity is ``now``."""
        given = namespace.encode() if isinstance(namespace, str) else namespace
        if not now and not (given or b"").startswith(b"model "):  # nobody's own key is taken for one that is made here
            return namespace
        made = f"model {now} {'' if given is None else given.hex() or '-'}"
        return Adapter(made, namespace.lora_name, namespace.lora_id) if isinstance(namespace, Adapter) else made

    def _digest(self, adapter: str | None, parts: Parts) -> str:
        """The digest of the weights, or of those of an adapter. It is computed anew if they seem to have changed."""
        stamp = stamp_of(parts.weights if adapter is None else parts.adapters[adapter])
        before = self._known.get(adapter)
        if before is not None and before[0] == stamp:
            return before[1]
        if adapter is None:
            digest = f"{type(self.model).__name__}-{self._weights_digest(parts)}"
        else:
            own = {id(tensor): tensor for tensor in parts.adapters[adapter]}
            named = list(_contents(self.model, own.__contains__))
            registered = {id(one) for every in (self.model.parameters(), self.model.buffers()) for one in every}
            settings = [_content("", tensor) for key, tensor in own.items() if key not in registered]
            digest = _short(*named, *settings)
        self._known[adapter] = stamp, digest
        if before is not None and before[1] != digest:
            self._warn("the model's weights have changed" if adapter is None else
                       f"the weights of the adapter {adapter!r} have changed")
        return digest

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("asynccache: %s, so what was cached before is not used any more", what)

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
            if chosen(id(tensor)):
                yield _content(name.replace(".base_layer.", "."), tensor)  # where PEFT keeps the layer it has wrapped


def _content(name: str, tensor: torch.Tensor) -> bytes:
    try:
        kept = tensor.detach().cpu().contiguous()
        digest = xxhash.xxh3_128_digest(kept.reshape(-1).view(torch.uint8).numpy().data)
    except Exception as error:  # kinds of tensors raise whatever they like
        raise ConfigError(f"{name}: these weights cannot be read ({error}); give the model a name=") from error
    return f"{name} {kept.dtype} {tuple(kept.shape)} ".encode() + digest


def _short(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:32]
