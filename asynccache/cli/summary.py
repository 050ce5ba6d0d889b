"""The summary of a run as text, on one screen of 80 columns: the verdict, where hits came from, and what it cost.

It is made from the report alone, so it says nothing that the JSON does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asynccache.cli.report import Report
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.text import ARROWS, BUSY, TIER_NAMES, bar, milliseconds, number, percent, size

_FETCHES = ("load_back", "prefetch")
_FEW_HITS = 0.2
"""The hit ratio below which the summary says that there was little to save."""
_QUEUED = 0.9
"""The requests served per second, as a share of those that arrive, below which the summary says that they queue."""
_COLUMNS = 80
_GREEN, _RED, _BOLD, _DIM, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def summary(report: Report, *, color: bool = False) -> str:
    """The whole text, with ANSI colours if ``color``."""
    lines = [*_verdict(report), "", *_hits(report), "", *_first_token(report), "", *_moved(report), "",
             *_rest(report)]
    if "ranks" in report:
        lines += ["", *_ranks(report)]
    text = "\n".join(lines)
    return text if color else _without_color(text)


def _without_color(text: str) -> str:
    for code in (_GREEN, _RED, _BOLD, _DIM, _PLAIN):
        text = text.replace(code, "")
    return text


def verified(report: Mapping[str, Any]) -> str:
    """The number of pages that were compared with what they must hold, as text."""
    return f"{number(report['verify']['pages'])} pages verified" if report["settings"]["verify"] else "no page verified"


def _verdict(report: Report) -> Iterator[str]:
    elapsed = report["elapsed_s"]
    rate = report["served"] / elapsed if elapsed else 0.0
    word = f"{_GREEN}OK{_PLAIN}" if report["ok"] else f"{_RED}NOT OK{_PLAIN}"
    early = ", interrupted" if report["interrupted"] else ""
    yield (f"{_BOLD}{report['command']}{_PLAIN} {word}{early}: {number(report['served'])} requests in {elapsed:.1f} s "
           f"({rate:.1f}/s), {verified(report)}")
    for problem in report["problems"]:
        yield f"  {_RED}✗{_PLAIN} {problem}"


def _hits(report: Report) -> Iterator[str]:
    total, hit = report["tokens"]["total"], report["tokens"]["hit"]
    yield _title(f"Hits: {percent(sum(hit.values()), total)} of {number(total)} prompt tokens")
    computed = total - sum(hit.values())
    for name, tokens in (*((name, hit[key]) for key, name in TIER_NAMES.items()), ("computed", computed)):
        share = tokens / total if total else 0.0
        yield f"  {name:<11}{percent(tokens, total):>8}{number(tokens):>15}  {bar(share, 40)}".rstrip()
    if "per_hit" in report:
        moved = report["per_hit"]
        yield (f"  For each token that hits: {moved['written_to_host']:.2f} written to the host, "
               f"{moved['loaded_from_host']:.2f} loaded from it")
    if "blocks" in report:
        blocks = report["blocks"]
        yield (f"  {number(blocks['hit'])} of {number(blocks['total'])} blocks of {BLOCK_TOKENS} tokens; the trace "
               f"implies {number(blocks['shared'])}: {percent(blocks['shared'] * BLOCK_TOKENS, total)}")


def _first_token(report: Report) -> Iterator[str]:
    rate = report["settings"]["prefill_tokens_per_s"]
    yield _title(f"Time to first token: wait for pages + prefill at {number(rate)} tokens/s (modelled)")
    yield f"  {_DIM}{'':<16}{'mean':>10}{'p50':>10}{'p99':>10}{'max':>10}{_PLAIN}"
    with_cache, without = report["ttft_mean_ms"], report["ttft_without_cache_mean_ms"]
    times = f"   {without / with_cache:.1f} times sooner" if without > with_cache > 0 else ""
    yield _times("with cache", report["ttft_ms"], with_cache) + times
    yield _times("without cache", report["ttft_without_cache_ms"], without)
    yield _times("wait for pages", report["wait_ms"], report["wait_mean_ms"])
    slowdown = report["prefill_slowdown"]
    if slowdown >= BUSY:
        yield f"  This machine is busy: 1 s of the engine's CPU time took {slowdown:.1f} s. Prefill is"
        yield "  modelled as that much slower, with the cache and without it."
    if with_cache > without:
        yield from _why(report)


def _why(report: Report) -> Iterator[str]:
    """The reasons why the first token came later with the cache than it would have come without it."""
    total, hit = report["tokens"]["total"], sum(report["tokens"]["hit"].values())
    saved = report["ttft_without_cache_mean_ms"] - report["ttft_mean_ms"] + report["wait_mean_ms"]
    yield f"  It came later with the cache: hits saved {milliseconds(saved)} of computing on average,"
    yield f"  but requests waited {milliseconds(report['wait_mean_ms'])}."
    arrived, served = report["settings"].get("rate", 0.0), report["served"] / (report["elapsed_s"] or 1.0)
    if served < _QUEUED * arrived:
        yield f"  Requests queued: {arrived:g} arrived per second, and {served:.1f} were served."
    if hit < _FEW_HITS * total:
        yield f"  Only {percent(hit, total)} of the prompt tokens were hits, so there was little to save."
    ran = {name: stage["latency_ms"] for name, stage in report["stages"].items() if name in _FETCHES and stage["ops"]}
    if ran:
        slowest = max(ran, key=lambda name: ran[name]["p50"])
        yield (f"  The slowest way of pages to the device: {slowest}, p50 {milliseconds(ran[slowest]['p50'])}, "
               f"p99 {milliseconds(ran[slowest]['p99'])}.")


def _times(name: str, spread: dict[str, float], mean: float) -> str:
    cells = "".join(f"{milliseconds(v):>10}" for v in (mean, spread["p50"], spread["p99"], spread["max"]))
    return f"  {name:<16}{cells}"


def _moved(report: Report) -> Iterator[str]:
    yield _title("Moved")
    yield (f"  {_DIM}{'':<21}{'ops':>10}{'tokens':>12}{'bytes':>10}{'rate':>11}{'p50':>7}{'p99':>7}"
           f"{_PLAIN}").rstrip()
    elapsed = report["elapsed_s"] or 1.0
    for name, stage in report["stages"].items():
        yield _stage(name, stage, elapsed)
        if stage["errors"]:
            yield f"  {'':<21}{_RED}{number(stage['errors'])} errors{_PLAIN}"


def _stage(name: str, stage: dict[str, Any], elapsed: float) -> str:
    latency = stage["latency_ms"]
    return (f"  {name:<15}{ARROWS.get(name, ''):<6}{number(stage['ops']):>10}{number(stage['tokens']):>12}"
            f"{size(stage['bytes']):>10}{size(stage['bytes'] / elapsed) + '/s':>11}"
            + "".join(f"{_short(latency[q]) if stage['ops'] else '-':>7}" for q in ("p50", "p99")))


def _short(value: float) -> str:
    return milliseconds(value).replace(" ", "")


def _rest(report: Report) -> Iterator[str]:
    lag, leaks = report["loop_lag_ms"], report["leaks"]
    yield _row("requests", f"{number(report['requests'])} arrived · {number(report['cancelled'])} cancelled · "
               f"{number(report['failed'])} failed")
    yield _row("", f"{number(report['entered_again'])} taken up again after a failed load")
    evicted = " · ".join(f"{name} {number(pages)}" for name, pages in report["evicted"].items())
    yield _row("evicted", f"{evicted or 'nothing'} · lost for good {number(report['lost_pages'])}")
    yield _row("left behind", "nothing" if not any(leaks.values()) else
               ", ".join(f"{number(count)} {name.replace('_', ' ')}" for name, count in leaks.items() if count))
    yield _row("loop lag", f"p50 {milliseconds(lag['p50'])} · p99 {milliseconds(lag['p99'])} · "
               f"p99.9 {milliseconds(lag['p999'])} · max {milliseconds(lag['max'])}")
    yield _row("", f"waiting for a core: p99.9 {milliseconds(report['run_queue_ms']['p999'])}")
    name = "processes" if "ranks" in report else "process"
    yield _row(name, f"{report['cpu_s']:.1f} s of CPU · {size(report['rss_bytes'])} of memory at most")


def _ranks(report: Report) -> Iterator[str]:
    """One line for each rank, for runs of several ranks."""
    shape = report["topology"]
    yield _title(f"Ranks: tp {shape['tp']} · cp {shape['cp']} · pp {shape['pp']}")
    yield f"  {_DIM}{'':<20}{'pages verified':>15}{'wrong':>7}{'batches':>11}{'lag p99':>11}{'CPU':>8}{_PLAIN}"
    for rank in report["ranks"]:
        name = f"rank {rank['rank']} ({rank['tp']} {rank['cp']} {rank['pp']})"
        if "verify" not in rank:
            yield f"  {name:<20}{_RED}{rank['lost'] or 'ended without a report'}{_PLAIN}"[:_COLUMNS]
            continue
        verify, lag = rank["verify"], rank["loop_lag_ms"]["p99"]
        yield (f"  {name:<20}{number(verify['pages']):>15}{number(verify['mismatches']):>7}"
               f"{number(rank['batches']):>11}{milliseconds(lag):>11}{rank['cpu_s']:>6.1f} s")


def _row(name: str, text: str) -> str:
    return f"{_BOLD}{name:<12}{_PLAIN} {text}"


def _title(text: str) -> str:
    return f"{_BOLD}{text}{_PLAIN}"
