"""``python -m benchmarks.ttft``, small: every way is measured in every round, and a hit in another tier than was
meant is no figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from asynccache.cli import output
from asynccache.errors import ConfigError
from benchmarks import ttft
from benchmarks.tables import bench
from benchmarks.ttft import Bench, add_arguments, run

SMALL = ["--prefix", "64", "--own", "4", "--repeats", "2", "--layers", "1", "--width", "64"]


def test_every_way_is_measured_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("QUIET_FOR", "EVERY"):               # every line of the progress is shown
        monkeypatch.setattr(output, pause, 0.0)
    report = tmp_path / "ttft.json"
    assert bench(ttft, [*SMALL, "--json", str(report)], prog="ttft") == 0
    figures = json.loads(report.read_text())
    assert list(figures["ttft_ms"]) == ["no cache", "miss", "L1", "L2", "L3"]
    assert all(len(times) == 2 and min(times) > 0 for times in figures["all_ms"].values())
    assert figures["prefix_bytes"] == 64 * 2 * 64 * 4
    shown = capsys.readouterr()
    assert "[10/10]" in shown.err
    assert "\nL3 " in shown.out
    assert max(map(len, (shown.out + shown.err).splitlines())) <= 80


def test_a_hit_in_another_tier_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(SMALL)

    async def nothing(*args: object) -> None:
        """The device keeps what it has."""

    monkeypatch.setattr(Bench, "_empty_device", nothing)
    with pytest.raises(RuntimeError, match=r"not the expected hit: Hits\(device=64, .*\), not \(0, 64, 0\)"):
        run(options, lambda line: None)


@pytest.mark.parametrize(
    "wrong", [("--prefix", "65"), ("--prefix", "0"), ("--own", "0"), ("--repeats", "0"), ("--width", "100")]
)  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        bench(ttft, [*SMALL, *wrong], prog="ttft")
    assert wrong[0] in f"{caught.value} {capsys.readouterr().err}"
