"""``asynccache bench ttft``, small: every way is measured as often as asked, and each is what it says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asynccache_hf import BatchRequest, ContinuousBatching

from asynccache.cli import bench_together, output
from asynccache.cli.bench_together import RequestLoad
from asynccache.cli.bench_ttft import Bench, add_arguments, make_model, run
from asynccache.cli.main import main

SMALL = [
    "bench", "ttft", "--prefix", "64", "--own", "4", "--repeats", "2", "--layers", "1", "--width", "64",
    "--requests", "3", "--prompt", "40", "--new", "3",
]  # fmt: skip
TOGETHER = [
    "transformers alone, cold", "ContinuousBatching, cold",
    "transformers alone, 80 % cached", "ContinuousBatching, 80 % cached",
]  # fmt: skip


def test_every_way_is_measured_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("QUIET_FOR", "EVERY"):               # every line of the progress is shown
        monkeypatch.setattr(output, pause, 0.0)
    report = tmp_path / "ttft.json"
    assert main([*SMALL, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert list(figures["ttft_ms"]) == ["no cache", "miss", "L1", "L2", "L3"]
    assert all(len(times) == 2 and min(times) > 0 for times in figures["all_ms"].values())
    assert figures["prefix_bytes"] == 64 * 2 * 64 * 4
    batches = figures["together"]
    sizes = {"requests": 3, "prompt_tokens": 40, "cached_tokens": 32, "new_tokens": 3}
    assert {name: batches[name] for name in sizes} == sizes
    for what in ("first_tokens_ms", "tokens_per_cpu_second"):
        assert list(batches[what]) == TOGETHER
        assert all(len(each) == 2 and min(each) > 0 for each in batches[f"all_{what}"].values())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[18/18]" in shown.err
    assert "\nL3 " in shown.err
    assert shown.err.count("\nContinuousBatching, ") == 2
    assert "psutil" not in shown.err
    assert max(map(len, shown.err.splitlines())) <= 80


@pytest.mark.parametrize(("broken", "said"), [
    (lambda batching, prompts, given: batching([[*prompts[0][:-1], 1], *prompts[1:]], **given), "different tokens"),
    (lambda batching, prompts, given: batching(prompts, **given, extra_key=str(prompts)), "not the expected hit: 0"),
], ids=["other tokens", "no hit"])  # fmt: skip
def test_ways_that_make_different_tokens_or_hit_nothing_are_no_figure(
    broken: Callable[..., list[BatchRequest]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ContinuousBatching.generate_batch

    def generate_batch(self: ContinuousBatching, prompts: list[list[int]], **given: Any) -> list[BatchRequest]:
        return broken(partial(usual, self), prompts, given)

    monkeypatch.setattr(ContinuousBatching, "generate_batch", generate_batch)
    with pytest.raises(RuntimeError, match=said):
        bench_together.measure(make_model(1, 64, 128), RequestLoad(2, 40, 8), 1, lambda way, seconds: None)


def test_a_hit_in_another_tier_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(SMALL[2:])

    async def nothing(*args: object) -> None:
        """The device keeps what it has."""

    monkeypatch.setattr(Bench, "_empty_device", nothing)
    with pytest.raises(RuntimeError, match=r"not the expected hit: Hits\(device=64, .*\), not \(0, 64, 0\)"):
        run(options, lambda line: None)


@pytest.mark.parametrize(
    "wrong", [("--prefix", "65"), ("--prefix", "0"), ("--own", "0"), ("--repeats", "0"), ("--width", "100"),
              ("--requests", "0"), ("--prompt", "31"), ("--new", "0")]
)  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
