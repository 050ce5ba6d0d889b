"""The next token: which settings of transformers' generation configurations are done here, and the draw from logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from asynccache_shim.model import Sampling

from asynccache import ConfigError, checks

COLDEST, HOTTEST = 1e-5, 1e5
"""The bounds of temperatures. Far above the lower one the likeliest token is already certain."""

Refusals = Mapping[str, tuple[Any, str]]
"""Settings of a generation configuration: the value that changes nothing (so does None), and why others are refused."""

SPECULATION = "speculation takes tokens back, and pages keep them"
TOGETHER = "requests that are computed together have no such"

NO_PAGES: Refusals = {
    "num_beams": (1, "beams take over each other's KV, and the pages of a request hold one sequence"),
    "prompt_lookup_num_tokens": (None, SPECULATION),
    "use_mtp": (False, SPECULATION),
    "assistant_early_exit": (None, SPECULATION),
    "token_healing": (False, "it takes the last tokens of the prompt back"),
}
"""What cannot be done on pages."""

NOT_TOGETHER: Refusals = {
    **NO_PAGES,
    "num_return_sequences": (1, "ask for the prompt as often as you want answers"),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "stop_strings", "sequence_bias", "bad_words_ids",
                     "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
                     "watermarking_config", "exponential_decay_length_penalty"), (None, TOGETHER)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1.0, TOGETHER)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens",
                     "remove_invalid_values"), (0, TOGETHER)),
}  # fmt: skip
"""What is not done for requests that are computed together."""

NOT_DRAWN: Refusals = {
    **dict.fromkeys(("min_p", "top_h"), (None, TOGETHER)), "typical_p": (1.0, TOGETHER),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0.0, TOGETHER)),
}  # fmt: skip
"""Ways to sample that are not done for requests that are computed together."""


def refuse(settings: Any, refusals: Refusals, where: str = "") -> None:
    """Check that a generation configuration asks for nothing that is not done here.

    Raises:
        ConfigError: the generation configuration ``settings`` has one of ``refusals``. The message names it, with
            ``where`` before its name.
    """
    for name, (usual, why) in refusals.items():
        value = getattr(settings, name, None)
        if value is not None and value != usual:
            raise ConfigError(f"{where}{name}={checks.shown(value)}: {why}")


def sampling_of(settings: Any) -> Sampling:
    """How a generation configuration has tokens drawn.

    Raises:
        ConfigError: it asks for something that is not done here; the message names it.
    """
    where = "generation_config."
    refuse(settings, NOT_TOGETHER, where)
    if not settings.do_sample:
        return Sampling()
    refuse(settings, NOT_DRAWN, where)
    given = {name: getattr(settings, name, None) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in given.items() if value is not None and (name, value) != ("top_k", 0)}
    return sampled(Sampling(temperature=1.0), given, where)


def sampled(sampling: Sampling, options: Mapping[str, Any], where: str = "") -> Sampling:
    """Return ``sampling`` with ``options``, by name. ``where``: what stands before their names in a message.

    Raises:
        ConfigError: there is no such option, or its value is unusable.
    """
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name == "temperature":
            made[name] = checks.number(where + name, value, COLDEST, HOTTEST)
        elif name == "top_p":
            made[name] = checks.number(where + name, value, 0, 1)
        elif name == "top_k":
            made[name] = checks.integer(where + name, value, 1)
        elif name == "seed":
            made[name] = checks.integer(where + name, value)
        else:
            raise ConfigError(f"{where}{name}: a request has no such option; it has temperature, top_k, top_p and seed")
    return sampling._replace(**made)


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Draw a token from each row of ``logits``, ``[requests, vocabulary]``, for the position of the same number. With a
    seed the draw depends on logits, seed and position alone, so a request that is interrupted and computed again draws
    the same token. As in transformers, tokens that are as likely as the last of ``top_k`` are among these. A row with
    NaN or +inf gives what ``argmax`` gives, and does not disturb the others."""
    tokens: list[int] = logits.argmax(-1).tolist()
    rows = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not rows:
        return tokens
    asked = [samplings[i] for i in rows]
    wanted = logits[rows].double().cpu()
    heat = torch.tensor([[max(each.temperature, COLDEST)] for each in asked], dtype=torch.double)
    chances = torch.softmax((wanted - wanted.amax(-1, keepdim=True)) / heat, -1)
    chances, order = chances.sort(descending=True, stable=True)
    most = torch.tensor([[min(each.top_k or chances.shape[1], chances.shape[1])] for each in asked])
    chances.masked_fill_(chances < chances.gather(1, most - 1), 0)  # who is as likely as the last one stays, too
    share = torch.tensor([[each.top_p] for each in asked], dtype=torch.double) * chances.sum(-1, keepdim=True)
    chances[:, 1:].masked_fill_((chances.cumsum(-1) - chances >= share)[:, 1:], 0)  # the likeliest one is always left
    ends = chances.cumsum(-1)
    points = torch.stack([torch.rand(1, dtype=torch.double, generator=_generator(each, positions[i]))
                          for i, each in zip(rows, asked, strict=True)])  # fmt: skip
    places = torch.searchsorted(ends, points * ends[:, -1:], right=True)
    places = torch.minimum(places, (chances > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)  # -1: they are no numbers
    for i, token in zip(rows, order.gather(1, places)[:, 0].tolist(), strict=True):
        tokens[i] = token
    return tokens


def _generator(sampling: Sampling, position: int) -> torch.Generator | None:
    if sampling.seed is None:
        return None
    mixed = (sampling.seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) % (1 << 63)
    return torch.Generator().manual_seed(mixed)
