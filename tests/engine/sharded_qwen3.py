"""Qwen3 by hand, over ranks: heads and the MLP's width over tp, layers over pp; KV in the pages of each rank's worker.

The weights are those of a model of transformers, cut up here; the sums over tp and the activations between stages go
through groups of the model's own. Every rank returns the tokens that the last stage has chosen; what counts is what
rank 0 returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from asynccache_shim import NO_TOKEN, Batch, Chunk
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from asynccache.worker import RankPlace, Topology

Weights = Mapping[str, torch.Tensor]


class Shape(NamedTuple):
    """Of the whole model."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    width: int = 64
    hidden: int = 32
    theta: float = 10_000.0
    epsilon: float = 1e-6

    def stage(self, topology: Topology, place: RankPlace) -> range:
        """The layers of a pipeline stage."""
        count = self.layers // topology.pp
        return range(place.pp * count, (place.pp + 1) * count)

    def token_bytes(self, topology: Topology) -> int:
        """KV of a token on one rank."""
        return self.layers // topology.pp * 2 * (self.kv_heads // topology.tp) * self.head_dim * 4


class Layer:
    """One rank's part of a layer."""

    def __init__(self, weights: Weights, number: int, shape: Shape, tp: int, of: int) -> None:
        own = {name.removeprefix(f"model.layers.{number}."): value for name, value in weights.items()
               if name.startswith(f"model.layers.{number}.")}  # fmt: skip

        def rows(name: str) -> torch.Tensor:
            return own[f"{name}.weight"].chunk(of, 0)[tp]

        def columns(name: str) -> torch.Tensor:
            return own[f"{name}.weight"].chunk(of, 1)[tp]

        self.q, self.k, self.v = (rows(f"self_attn.{name}_proj") for name in "qkv")
        self.gate, self.up = rows("mlp.gate_proj"), rows("mlp.up_proj")
        self.o, self.down = columns("self_attn.o_proj"), columns("mlp.down_proj")
        self.q_norm, self.k_norm = own["self_attn.q_norm.weight"], own["self_attn.k_norm.weight"]
        self.before, self.after = own["input_layernorm.weight"], own["post_attention_layernorm.weight"]


class ShardedQwen3:
    """A ``Model`` of one rank. ``pools``: of its worker; ``tp_group``: None for one rank. The default group is all."""

    def __init__(
        self, weights: Weights, shape: Shape, topology: Topology, rank: int, pools: Mapping[str, Any], page_size: int,
        tp_group: Any,
    ) -> None:  # fmt: skip
        place = topology.place(rank)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.computed = 0
        self._shape = shape
        self._topology = topology
        self._rank = rank
        self._first, self._last = place.pp == 0, place.pp == topology.pp - 1
        self._above = None if self._first else topology.rank(place._replace(pp=place.pp - 1))
        self._below = None if self._last else topology.rank(place._replace(pp=place.pp + 1))
        self._tp_group = tp_group
        self._page = page_size
        self._kv = [_tokens(pools["full"].layer(i), page_size, shape.kv_heads // topology.tp, shape.head_dim)
                    for i in range(shape.layers // topology.pp)]  # fmt: skip
        self._layers = [Layer(weights, i, shape, place.tp, topology.tp) for i in shape.stage(topology, place)]
        self._weights = weights

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[int]:
        """All chunks packed into one row of tokens."""
        ids = torch.from_numpy(np.concatenate([w.tokens[w.start : w.stop] for w in batch.chunks]).astype(np.int64))
        self.computed += len(ids)
        turn = self._turns(batch.chunks)
        x = embedding(ids, self._weights["model.embed_tokens.weight"]) if self._first else self._received(len(ids))
        for layer, kv in zip(self._layers, self._kv, strict=True):
            x = x + self._summed(self._attention(layer, kv, self._norm(x, layer.before), turn, batch.chunks))
            y = self._norm(x, layer.after)
            x = x + self._summed(linear(silu(linear(y, layer.gate)) * linear(y, layer.up), layer.down))
        if self._below is not None:
            dist.send(x.contiguous(), self._below)
        return self._chosen(batch.chunks, x)

    def _attention(
        self, layer: Layer, kv: torch.Tensor, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
        chunks: Sequence[Chunk],
    ) -> torch.Tensor:  # fmt: skip
        size = self._shape.head_dim
        q, k, v = (linear(x, part).view(len(x), -1, size) for part in (layer.q, layer.k, layer.v))
        q, k = _turned(self._norm(q, layer.q_norm), turn), _turned(self._norm(k, layer.k_norm), turn)
        out, at = [], 0
        for chunk in chunks:
            end = at + chunk.stop - chunk.start
            slots = self._slots(chunk)
            kv[slots[chunk.start :], 0], kv[slots[chunk.start :], 1] = k[at:end], v[at:end]
            out.append(self._attend(q[at:end], kv[slots], chunk.start))
            at = end
        return linear(torch.cat(out), layer.o)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, start: int) -> torch.Tensor:
        """Each token sees those before it and itself."""
        groups = self._shape.heads // self._shape.kv_heads
        keys, values = (kv[:, i].repeat_interleave(groups, 1).transpose(0, 1) for i in (0, 1))
        seen = torch.arange(len(kv)) <= torch.arange(start, len(kv)).unsqueeze(1)
        out = scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
        return out.transpose(0, 1).flatten(1)

    def _slots(self, chunk: Chunk) -> torch.Tensor:
        at = np.arange(chunk.stop)
        return torch.from_numpy(chunk.pages[at // self._page].astype(np.int64) * self._page + at % self._page)

    def _turns(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions."""
        at = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).float()
        steps = torch.arange(0, self._shape.head_dim, 2).float() / self._shape.head_dim
        angles = torch.outer(at, self._shape.theta**-steps).repeat(1, 2).unsqueeze(1)
        return angles.cos(), angles.sin()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._shape.epsilon) * weight

    # between ranks

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        if self._tp_group is not None:
            dist.all_reduce(x, group=self._tp_group)
        return x

    def _received(self, count: int) -> torch.Tensor:
        x = torch.empty(count, self._shape.hidden)
        dist.recv(x, self._above)
        return x

    def _chosen(self, chunks: Sequence[Chunk], x: torch.Tensor) -> list[int]:
        """By the first rank of the last stage, for all."""
        chosen = torch.full((len(chunks),), NO_TOKEN)
        teller = self._topology.rank(RankPlace(0, 0, self._topology.pp - 1))
        if self._rank == teller:
            ends = torch.tensor([chunk.stop - chunk.start for chunk in chunks]).cumsum(0) - 1
            logits = linear(self._norm(x[ends], self._weights["model.norm.weight"]), self._weights["lm_head.weight"])
            for i, chunk in enumerate(chunks):
                if chunk.sample:
                    chosen[i] = logits[i].argmax()
                    self.logits[chunk.request_id, chunk.stop] = logits[i]
        if self._topology.ranks > 1:
            dist.broadcast(chosen, teller)
        return [int(token) for token in chosen]


def _tokens(layer: torch.Tensor, page_size: int, heads: int, size: int) -> torch.Tensor:
    """A pool's layer as ``[token slots, keys and values, heads, size]``."""
    pages = layer[:, : page_size * 2 * heads * size * 4]
    return pages.view(torch.float32).view(len(layer) * page_size, 2, heads, size)


def _turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turn
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
