"""``asynccache verify-engine``: right servers pass, and wrong ones are found, each by the name of the tier.

The servers are the example server with real small models. What makes one wrong is what has made engines wrong: a layer
in another's place, a page in another's place, a state that is out of date, a byte, and KV of another adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import openai_serving.paths
import torch
from asynccache_shim import Batch
from openai_serving.models import FAMILIES
from openai_serving.scores import ScoredModel

from asynccache.memory.mover import Mover
from asynccache.storage import CheckedStore, Result
from tests.cli.engine_server import (
    DEVICE,
    FLUSHES,
    AdaptedModel,
    Adapting,
    Mixing,
    parts,
    serving,
    verdicts,
    verified,
)

torch.set_num_threads(1)

TIERS = ("new", "device", "turns", "host", "storage")
RIGHT = dict.fromkeys(TIERS, "right")


IN_CHECK = ("qwen3", "falcon_h1")


@pytest.mark.parametrize("family", [
    family if family in IN_CHECK else pytest.param(family, marks=pytest.mark.slow(6)) for family in FAMILIES
])  # fmt: skip
def test_a_right_server_passes(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(parts(family)) as url:
        status, report = verified(url, tmp_path, *FLUSHES)
    printed = capsys.readouterr().out
    assert verdicts(report) == RIGHT, printed
    assert status == 0
    assert report["cache_salt"]
    assert report["page_size"] == 16
    assert report["cold_runs_differ_by"] < 1e-3
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert printed.endswith("right: answers from every tier are those of the cold server\n")
    tiers = {tier["tier"]: tier for tier in report["tiers"]}
    assert tiers["device"]["prompts"] == tiers["device"]["prompts_hit"] == 6
    assert tiers["new"]["tokens_hit"] == 0
    for name in ("device", "host", "storage"):
        assert tiers[name]["hits_by_tier"][name] > tiers[name]["tokens_hit"] / 2


# servers that are wrong

Spoil = Callable[[npt.NDArray[np.uint8]], None]
"""Changes pages, ``[pages, layers, bytes]``, in place."""


def swap_layers(pages: npt.NDArray[np.uint8]) -> None:
    pages[:, [0, 1]] = pages[:, [1, 0]]


def shift_pages(pages: npt.NDArray[np.uint8]) -> None:
    """Each page is the one before it. (Pages that only change places change nothing: a key knows its position.)"""
    pages[1:] = pages[:-1].copy()


def flip_a_byte(pages: npt.NDArray[np.uint8]) -> None:
    pages[-1, 0, 3] ^= 0xFF  # of a float's sign and exponent


def load_wrongly(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, pool: str = "") -> None:
    """Each load from host memory to the device brings what ``spoil`` makes of the pages of the pools whose names begin
    with ``pool``."""
    load = Mover.load

    def wrong(self: Mover, moves: Sequence[Any], after: Sequence[Any] = ()) -> Any:
        kept = []
        for copy in self._copies(moves):
            if copy.host is not None and copy.host.spec.name.startswith(pool):
                kept.append((copy.host, copy.src, copy.host.array[copy.src]))
                pages = copy.host.array[copy.src]
                spoil(pages)
                copy.host.array[copy.src] = pages
        events = load(self, moves, after)
        while not events.done.done():
            time.sleep(0.001)
        for host, slots, pages in kept:
            host.array[slots] = pages
        return events

    monkeypatch.setattr(Mover, "load", wrong)


@pytest.mark.parametrize("spoil", [swap_layers, shift_pages, flip_a_byte])
def test_a_wrong_copy_from_host_memory_is_found(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_wrongly(monkeypatch, spoil)
    with serving(parts()) as url:
        status, report = verified(url, tmp_path, *FLUSHES[:2])
    printed = capsys.readouterr().out
    assert status == 1
    assert verdicts(report) == {"new": "right", "device": "right", "turns": "right", "host": "wrong"}, printed
    assert printed.endswith("wrong from: host\n")
    first = report["tiers"][-1]["first"]
    assert first["position"] >= first["prompt_tokens"] > first["cached_tokens"] > 0
    assert f"host: the first difference is at token {first['position']}, in page {first['page']}:" in printed


def test_the_page_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last page of a load has a wrong byte, so a prompt that ends before it is right."""
    load_wrongly(monkeypatch, flip_a_byte)
    with serving(parts()) as url:
        _, report = verified(url, tmp_path, "--flush-device", str(DEVICE), "--prompts", "1")
    first = report["tiers"][-1]["first"]
    assert first["kv_page"] == first["cached_tokens"] // 16 - 1


def test_a_page_in_anothers_place_on_the_device_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun, forward = set[int](), ScoredModel.forward

    def wrong(self: ScoredModel, batch: Batch) -> list[int]:
        chunks = []
        for chunk in batch.chunks:
            hit = chunk.start // 16 if chunk.request_id not in begun else 0
            begun.add(chunk.request_id)
            pages = chunk.pages.copy()
            pages[1:hit] = chunk.pages[: max(0, hit - 1)]
            chunks.append(chunk._replace(pages=pages))
        return forward(self, batch._replace(chunks=tuple(chunks)))

    monkeypatch.setattr(ScoredModel, "forward", wrong)
    with serving(parts()) as url:
        status, report = verified(url, tmp_path)
    assert status == 1
    assert verdicts(report) == {"new": "right", "device": "wrong", "turns": "wrong"}


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_a_state_that_is_out_of_date_is_found(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checkpoints are not taken, so their slots hold what they held before."""
    forward = ScoredModel.forward

    def wrong(self: ScoredModel, batch: Batch) -> list[int]:
        return forward(self, batch._replace(chunks=tuple(chunk._replace(checkpoint=None) for chunk in batch.chunks)))

    monkeypatch.setattr(ScoredModel, "forward", wrong)
    with serving(parts(family)) as url:
        status, report = verified(url, tmp_path)
    assert status == 1
    assert verdicts(report)["new"] == "right"
    assert verdicts(report)["device"] == "wrong"


def test_a_byte_that_a_store_gives_back_wrong_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store without checksums: the byte is wrong behind ours."""
    get = CheckedStore.get

    async def wrong(self: CheckedStore, keys: Sequence[Any], payloads: Sequence[memoryview]) -> list[Result]:
        results = await get(self, keys, payloads)
        for result, payload in zip(results, payloads, strict=True):
            if result is Result.HIT:
                flip_a_byte(np.frombuffer(payload, np.uint8).reshape(1, 1, -1))
        return results

    monkeypatch.setattr(CheckedStore, "get", wrong)
    with serving(parts()) as url:
        status, report = verified(url, tmp_path, *FLUSHES)
    assert status == 1
    assert verdicts(report) == RIGHT | {"storage": "wrong"}


def test_the_kv_of_another_adapter_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(openai_serving.paths, "ScoredModel", AdaptedModel)
    models = ("--model", "a", "--model", "b")
    with serving(parts(), Adapting) as url:
        status, report = verified(url, tmp_path, *models)
        assert status == 0, report
    with serving(parts(), Mixing) as url:
        status, report = verified(url, tmp_path, *models)
    assert status == 1
    assert verdicts(report)["new"] == "wrong"
    assert {report["tiers"][0]["first"]["model"]} <= {"a", "b"}
    assert any("another model or adapter" in note for note in report["notes"])
