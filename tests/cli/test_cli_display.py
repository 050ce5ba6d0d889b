"""The display: it fits 80 columns, works without a terminal, and says what went wrong."""

from __future__ import annotations

import asyncio
import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from asynccache.cli import output
from asynccache.cli.display import Screen, counts, line, panel, show, summary
from asynccache.cli.options import RunSettings
from asynccache.cli.report import Tally
from asynccache.cli.session import execute
from asynccache.errors import ConfigError
from asynccache.runtime.lookups import LookupStats

TALLY = Tally(
    served=1_234_567, cancelled=123_456, tokens=3_000_000, device=1_000_000, host=500_000, storage=250_000,
    verified=123_456_789,
)
LOOKUPS = LookupStats(1_234_567, 2_900_000, {"device": 1_750_000}, {}, {}, 900_000)


def now(tally: Tally = TALLY, *, verify: bool = True) -> Screen:
    """A screen with the longest rows that a run may have."""
    tiers = (("L1", "█████████▉  100 %"), ("L2", "█████        50 %"))
    rates = (("L1→L2", "117.3 MiB/s"), ("L2→L1", "1144.4 MiB/s"), ("L2→L3", "0.0 MiB/s"), ("L3→L2", "83.9 MiB/s"))
    return Screen(
        "replay a-rather-long-name-of-a-recorded-conversation-trace.jsonl · full,swa,mamba · pages of 512",
        "1234 of 3600 s", 0.345,
        (*counts(tally, verify, 512, 1000.0, LOOKUPS), *tiers, *rates, ("lag", "p99 0.31 ms · max 123 ms"),
         ("memory", "12.0 GiB")),
        "interrupted: finishing what runs; press Ctrl-C again to cancel it",
    )  # fmt: skip


NOW = now()


def drawn(now: Screen, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(panel(now, width))
    return out.getvalue().rstrip("\n").split("\n")


def test_the_panel_fits_80_columns_and_shows_every_row() -> None:
    lines = drawn(NOW, 80)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 15, lines
    assert "1,234,567 served · 512 running" in lines[2]
    assert "1235/s · 123,456 cancelled" in lines[3]
    assert "58.3 % of tokens, ≤ 66.7 %" in lines[4]
    assert "all right" in lines[5]
    assert "1144.4 MiB/s" in lines[9]
    assert "83.9 MiB/s" in lines[11]
    assert lines[13].split() == ["memory", "12.0", "GiB"]


def test_the_panel_survives_a_narrow_terminal_and_no_progress() -> None:
    lines = drawn(now(replace(TALLY, mismatches=3))._replace(progress=None, note=""), 40)
    assert max(map(len, lines)) <= 40
    assert "…" not in "".join(lines[1:])
    for part in ("1,234,567 served · 512 running", "L1        █", "L2→L1     1144.4 MiB/s", "3 WRONG", "max 123 ms"):
        assert part in "\n".join(lines)


@pytest.mark.parametrize("width", [20, 39, 40, 60, 71, 72, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(NOW, width)
    assert max(map(len, lines)) <= width
    bar = next(row for row in lines if "█" in row)
    assert bar.rstrip().count("█") == int(0.345 * min(width, 80))


def test_a_line_tells_the_same() -> None:
    shown = line(NOW)
    for part in ("1,234,567 served", "512 running", "58.3 %", "all right", "34 %"):
        assert part in shown


def test_a_run_that_verifies_nothing_does_not_say_that_all_is_right() -> None:
    shown = now(Tally(), verify=False)
    for text_ in (line(shown), "\n".join(drawn(shown, 80))):
        assert "nothing is verified" in text_
        assert "right" not in text_


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_rich_only_a_quiet_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"pip install 'rich>=13\.7' 'argcomplete>=3\.3', or use --quiet"):
        execute(RunSettings(command="stress", requests=1))
    assert execute(RunSettings(command="stress", requests=1, quiet=True)) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("terminal", [True, False])
async def test_a_display_draws_until_it_is_cancelled(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    taken = asyncio.Event()
    count = 0

    def take() -> Screen:
        nonlocal count
        count += 1
        if count == 3:
            taken.set()
        return NOW

    task = asyncio.create_task(show(Console(file=out), take, every=0.0))
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "1,234,567 served" in out.getvalue()


def told(report: dict[str, Any], out: io.StringIO | None = None) -> str:
    """The summary, without the blanks at the ends of its lines."""
    out = out or io.StringIO()
    summary(report, out)
    return "\n".join(row.rstrip() for row in out.getvalue().rstrip().split("\n"))


SETTINGS = {
    "prefill_tokens_per_s": 8000.0, "verify": True, "device_tokens": 123_456_789, "host_tokens": 1_234_567_890,
    "page_size": 512, "bytes_per_token": 131_072, "storage": ["memory:", "file:/var/kv?capacity=10GiB"],
}  # fmt: skip


def report(**changes: Any) -> dict[str, Any]:
    stage = {"ops": 1_234_567, "pages": 123_456_789, "tokens": 123_456_789, "bytes": 9 << 40, "errors": 0,
             "latency_ms": {"p50": 1.25, "p99": 1234.0, "max": 5000.0}}
    spread = {"p50": 12.0, "p99": 1500.0, "p999": 2000.0, "max": 31_000.0}
    return {
        "command": "replay", "ok": True, "interrupted": False, "problems": [],
        "requests": 1_234_567, "served": 1_200_000, "cancelled": 34_000, "failed": 0, "entered_again": 567,
        "tokens": {"total": 144_793_823, "hit": {"device": 44_793_823, "host": 9_000_000, "storage": 1_000_000}},
        "verify": {"pages": 123_456_789, "mismatches": 0}, "ttft_mean_ms": 50.0, "ttft_without_cache_mean_ms": 150.0,
        "prefill_slowdown": 1.0,
        "line_without_cache_mean_ms": 10.0, "line_without_cache_ms": spread,
        "wait_mean_ms": 1.0, "wait_ms": spread, "ttft_ms": spread, "ttft_without_cache_ms": spread,
        "loop_lag_ms": spread, "run_queue_ms": spread, "elapsed_s": 1234.5, "cpu_s": 2345.6, "rss_bytes": 12 << 30,
        "leaks": {"device_pages": 0, "host_pages": 0, "pins": 0, "tasks": 0}, "lost_pages": 0, "ceiling": 0.412,
        "evicted": {"device": 12_345_678, "host": 1_234_567},
        "stages": dict.fromkeys(("backup_host", "load_back", "backup_storage", "prefetch"), stage),
        "settings": SETTINGS,
        "blocks": {"total": 276_491, "hit": 105_592, "shared": 105_592}, "block_size": 512, "format": "Qwen-Bailian",
        **changes,
    }


def test_the_summary_fits_80_columns_and_leads_with_the_verdict() -> None:
    lines = told(report()).split("\n")
    assert max(map(len, lines)) <= 80, [row for row in lines if len(row) > 80]
    assert lines[0].startswith("replay OK: 1,200,000 requests in")
    assert any("105,592 of 276,491 blocks" in row for row in lines)
    assert any("trace implies 105,592: 37.3 %" in row for row in lines)
    assert any("more than about 41.2 % of them" in row for row in lines)
    assert any("3.0 times sooner" in row for row in lines)
    assert any(row.startswith("left behind  nothing") for row in lines)


def test_the_summary_says_that_a_busy_machine_makes_prefill_slow() -> None:
    assert "busy" not in told(report())
    shown = told(report(prefill_slowdown=2.34))
    assert "1 s of the engine's CPU time took 2.3 s" in shown
    assert max(map(len, shown.split("\n"))) <= 80


def test_the_summary_of_a_cache_that_costs_more_than_it_spares_says_why() -> None:
    assert "came later" not in told(report())
    stages = report()["stages"]
    slow = {**stages["prefetch"], "latency_ms": {"p50": 44.0, "p99": 9999.0, "max": 9999.0}}
    late = {"ttft_mean_ms": 1250.0, "ttft_without_cache_mean_ms": 1050.0, "wait_mean_ms": 1300.0,
            "stages": stages | {"prefetch": slow}}
    shown = told(report(**late))
    assert "hits saved 1.1 s of computing" in shown
    assert "requests waited 1.3 s, and 10.0 ms without it" in shown
    assert "prefetch, p50 44.0 ms, p99 10.0 s" in shown
    assert "little to spare" not in shown
    assert "queued" not in shown
    assert "Requests queued: 2000 arrived per second, and 972.1 were served" in told(
        report(**late, settings=SETTINGS | {"rate": 2000.0})
    )
    assert max(map(len, shown.split("\n"))) <= 80
    nothing = {"total": 1000, "hit": {"device": 100, "host": 0, "storage": 0}}
    idle = {name: {**stage, "ops": 0} for name, stage in stages.items()}
    shown = told(report(**late | {"tokens": nothing, "stages": idle}))
    assert "Only 10.0 % of the prompt tokens were hits" in shown
    assert "took longest" not in shown


def test_the_summary_of_a_run_that_was_interrupted_says_so_first() -> None:
    assert "interrupted" in told(report(interrupted=True)).split("\n")[0]
    assert "interrupted" not in told(report())


def test_the_summary_says_what_went_wrong() -> None:
    shown = told(report(ok=False, problems=["request 7: 2 of 9 pages are wrong"],
                           leaks={"device_pages": 3, "host_pages": 0, "pins": 1, "tasks": 0}))
    assert shown.startswith("replay NOT OK")
    assert "✗ request 7: 2 of 9 pages are wrong" in shown
    assert "left behind  3 device pages, 1 pins" in shown


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32m" in told(report(), Terminal())
    assert "\x1b" not in told(report())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in told(report(), Terminal())


def test_a_rank_that_was_lost_is_named_below_the_others() -> None:
    rank = {"rank": 0, "tp": 0, "cp": 0, "pp": 0, "verify": {"pages": 123_456_789, "mismatches": 0}, "batches": 12_345,
            "loop_lag_ms": {"p99": 1234.0}, "cpu_s": 1234.5}
    lost = {"rank": 1, "tp": 1, "cp": 0, "pp": 0, "lost": "was killed by signal 9"}
    shown = told(report(topology={"tp": 2, "cp": 1, "pp": 1}, ranks=[rank, lost]))
    assert shown.endswith("  rank 1 (1 0 0): was killed by signal 9")
    assert max(map(len, shown.split("\n"))) <= 80


def test_numbers_as_a_person_reads_them() -> None:
    assert [output.size(n) for n in (0, 999, 1536, 10 << 20, 3 << 40)] == [
        "0 B", "999 B", "1.5 KiB", "10.0 MiB", "3.0 TiB"]
    assert [output.milliseconds(v) for v in (0, 0.042, 1.24, 310.2, 2100)] == [
        "0 ms", "0.04 ms", "1.2 ms", "310 ms", "2.1 s"]
    assert output.percent(1, 0) == "0.0 %"
    assert (output.bar(0.5, 8), output.bar(0, 8), output.bar(2, 4), output.bar(0.3, 4)) == ("████", "", "████", "█▎")
