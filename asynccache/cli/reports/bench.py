"""The figures of the benchmarks that have a page: tree, store, runtime and ttft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asynccache.cli.reports import svg
from asynccache.cli.reports.figures import Figure, Report, Table, dot_height, plot
from asynccache.cli.text import milliseconds, size


def figures(report: Report) -> list[Figure]:
    """The figures that the report has data for; none for other benchmarks."""
    makers = {"tree": tree, "store": store, "runtime": runtime, "ttft": ttft}
    make = makers.get(report.get("bench", ""))
    return [] if make is None else list(make(report))


def _micros(value: float) -> str:
    return f"{value:g} µs"


def _dots(rows: Sequence[svg.Row], label: str, axis: svg.Axis) -> Any:
    def draw(width: int) -> svg.Frame:
        frame = svg.Frame(width, dot_height(width, len(rows)), axis._replace(label=label), svg.Axis("", 0, 1, str),
                          left=min(330, 24 + int(6.6 * max(len(r.name) for r in rows))) if width > 500 else 14)
        svg.rows(frame, rows)
        return frame
    return draw


def _log_axis(rows: Sequence[svg.Row], show: Any) -> svg.Axis:
    values = [value for row in rows for _, value in row.dots if value > 0]
    return svg.Axis("", min(values) / 1.5, max(values) * 1.5, show, log=True)


def tree(report: Report) -> Iterator[Figure]:
    """The time of each operation beside its goal, for each shape of tree; and how it grows with the tree."""
    for i, (shape, operations) in enumerate(report["shapes"].items()):
        rows = [svg.Row(name, [("limit", op["goal_us"]), ("l2", op["cpu"]["p99"]), ("l1", op["cpu"]["mean"])])
                for name, op in operations.items()]
        missed = [name for name, op in operations.items() if op["cpu"]["mean"] > op["goal_us"]]
        yield Figure(f"tree-{i}", f"What does a call of the core cost? ({shape})",
                     "Every mean is within its goal." if not missed else f"Above their goals: {', '.join(missed)}.",
                     _dots(rows, "CPU time", _log_axis(rows, _micros)),
                     [("mean", "l1"), ("99th percentile", "l2"), ("goal", "limit")],
                     Table(("operation", "mean µs", "p99 µs", "goal µs"), [
                         (name, f"{op['cpu']['mean']:g}", f"{op['cpu']['p99']:g}", f"{op['goal_us']:g}")
                         for name, op in operations.items()]),
                     "; ".join(f"{name}: {op['what']}" for name, op in operations.items()))
    for kind, sizes in report["growth"].items():
        if len(sizes) > 1:
            yield _growth(kind, sizes)


def _growth(kind: str, sizes: Sequence[Mapping[str, Any]]) -> Figure:
    kinds = {"match": "l1", "pin": "l3", "insert": "l2", "evict": "plain"}
    plots = [svg.Series(name, colour, [(row["nodes"], row[name]["cpu"]["mean"]) for row in sizes])
             for name, colour in kinds.items()]
    top = max(y for p in plots for _, y in p.points)

    nodes = svg.Axis("nodes in the tree", sizes[0]["nodes"], sizes[-1]["nodes"], lambda v: f"{v:g}", log=True)
    draw = plot(nodes, svg.Axis("", 0, top * 1.1, _micros), lambda frame: svg.lines(frame, plots), left=64)
    first, last = sizes[0], sizes[-1]
    factor = max(last[n]["cpu"]["mean"] / (first[n]["cpu"]["mean"] or 1) for n in kinds)
    return Figure(f"growth-{kind}", f"Does the cost grow with the tree? ({kind})",
                  f"From {first['nodes']:,} to {last['nodes']:,} nodes no operation costs more than {factor:.1f} times "
                  "as much.", draw, list(kinds.items()),
                  Table(("nodes", *kinds), [(f"{r['nodes']:,}", *(f"{r[n]['cpu']['mean']:g}" for n in kinds))
                                            for r in sizes]), "Mean CPU time in µs.")


def store(report: Report) -> Iterator[Figure]:
    """The bandwidth beside that of the raw client, for each page size and mode."""
    for i, figures in enumerate(report["sizes"]):
        for mode, found in figures.items():
            if isinstance(found, dict) and "ratio" in found:
                pages = f"pages of {size(figures['page_bytes'])}" + ("" if mode == "store" else f", {mode}")
                yield _store(f"store-{i}-{mode}", pages, found)


def _store(name: str, pages: str, found: Mapping[str, Any]) -> Figure:
    colours = {"raw": "limit", "off": "l2", "on": "l1"}
    operations = [op for op in ("put", "get", "get_shuffled") if any(op in found.get(kind, {}) for kind in colours)]
    rows = [svg.Row(op.replace("_", ", "), [(colour, found[kind][op]["gb_per_s"]) for kind, colour in colours.items()
                                            if op in found.get(kind, {})]) for op in operations]
    ratios = [f"{op} {ratio:.2f} with checksums {kind}" for kind, one in found["ratio"].items()
              for op, ratio in one.items()]
    answer = f"Divided by the raw client's rate: {'; '.join(ratios)}." if ratios \
        else "There is no raw client to compare with."
    cells = [(op.replace("_", ", "), kind, found[kind][op]) for op in operations for kind in colours
             if op in found.get(kind, {})]
    return Figure(name, f"How fast is the store with {pages}?", answer,
                  _dots(rows, "GB/s", _log_axis(rows, lambda v: f"{v:g}")),
                  [("raw client", "limit"), ("checksums off", "l2"), ("checksums on", "l1")],
                  Table(("", "checksums", "GB/s", "CPU µs/page", "p50 ms", "p99 ms", "p99.9 ms"), [
                      (op, kind, f"{one['gb_per_s']:.3f}", f"{one['cpu_us_per_page']:g}",
                       *(f"{one[f'{q}_ms']:g}" for q in ("p50", "p99", "p999"))) for op, kind, one in cells]),
                  "Medians of the rounds, which take turns; the raw client moves the same batches to the same server "
                  "and checks nothing. Percentiles are of calls.")


def runtime(report: Report) -> Iterator[Figure]:
    """What an await adds to a call of the core; and how late the loop is under stress."""
    found = [(f"{loop} {name}", row) for loop, calls in report["overhead"].items() for name, row in calls.items()]
    rows = [svg.Row(name, [("limit", row["goal_us"]), ("l1", row["adds_us"])]) for name, row in found]
    missed = [name for name, row in found if row["adds_us"] > row["goal_us"]]
    yield Figure("overhead", "What does an await add to a call of the core?",
                 "Within the goals." if not missed else f"Above their goals: {', '.join(missed)}.",
                 _dots(rows, "CPU time added", _log_axis(rows, _micros)), [("added", "l1"), ("goal", "limit")],
                 Table(("call", "core µs", "adds µs", "goal µs"), [
                     (n, f"{r['core_us']:g}", f"{r['adds_us']:g}", f"{r['goal_us']:g}") for n, r in found]))
    lags = [(loop, row) for loop, row in report["stress"].items() if row["loop_lag_ms"]]
    if lags:
        yield _lag(lags)


def _lag(lags: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    rows = [svg.Row(f"{loop} {name}", [("l2", row["run_queue_ms"][name]), ("l1", row["loop_lag_ms"][name])])
            for loop, row in lags for name in ("p99", "p999", "max")]
    return Figure("lag", "How late is the loop under stress?", "; ".join(
        f"{loop}: 99 % of ticks at most {milliseconds(row['loop_lag_ms']['p99'])} late" for loop, row in lags) + ".",
        _dots(rows, "late by", _log_axis(rows, lambda v: f"{v:g} ms")),
        [("lag of the loop", "l1"), ("wait for a core", "l2")],
        Table(("", "lag", "wait for a core"), [
            (row.name, milliseconds(row.dots[1][1]), milliseconds(row.dots[0][1])) for row in rows]),
        "If the thread waited for a core for as long as it was late, the machine was busy and did not run the loop.")


def ttft(report: Report) -> Iterator[Figure]:
    """The time to first token of a real model, for each tier that may have the prefix."""
    rows = [svg.Row(way, [*(("l2", ms) for ms in report["all_ms"][way]), ("l1", median)])
            for way, median in report["ttft_ms"].items()]
    yield Figure("ttft", "How much sooner does the first token come, by tier?", "; ".join(
        f"{way}: {milliseconds(median)}" for way, median in report["ttft_ms"].items()) + ".",
        _dots(rows, "time to first token", _log_axis(rows, lambda v: f"{v:g} ms")),
        [("median", "l1"), ("each round", "l2")],
        Table(("the prefix is in", "median", "best", "worst"), [
            (way, *(milliseconds(v) for v in (median, min(report["all_ms"][way]), max(report["all_ms"][way]))))
            for way, median in report["ttft_ms"].items()]),
        f"{report['prefix_tokens']:,} shared tokens and {report['own_tokens']} more, a model of "
        f"{report['parameters'] / 1e6:.0f} million parameters, {report['torch_threads']} threads.")
    yield _together(report["together"])


def _together(report: Report) -> Figure:
    """How many new tokens a second of CPU time makes when many requests run at once."""
    speeds, first = report["tokens_per_cpu_second"], report["first_tokens_ms"]
    rows = [svg.Row(way, [*(("l2", value) for value in report["all_tokens_per_cpu_second"][way]), ("l1", median)])
            for way, median in speeds.items()]
    return Figure("together", "How many new tokens does a second of CPU make, of many requests at once?", "; ".join(
        f"{way}: {median:g}" for way, median in speeds.items()) + ".",
        _dots(rows, "new tokens per CPU second", _log_axis(rows, lambda v: f"{v:g}")),
        [("median", "l1"), ("each round", "l2")],
        Table(("continuous batching", "until all have a token", "new tokens per CPU second"), [
            (way, milliseconds(first[way]), f"{median:g}") for way, median in speeds.items()]),
        f"{report['requests']} requests of {report['prompt_tokens']:,} tokens and {report['new_tokens']} new ones; "
        f"where some are cached, {report['cached_tokens']:,} of each prompt.")
