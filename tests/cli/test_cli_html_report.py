"""The page of a run: well-formed, complete in itself, true to the JSON, drawn by a real browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asynccache.cli import bench_tree
from asynccache.cli.main import main
from asynccache.cli.reports import page, run, svg
from asynccache.cli.reports.svg import Axis, DotRow, Drawing, Mark, Series
from asynccache.cli.text import milliseconds
from tests.docs import docs_programs
from tests.workers import made_once

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), "")
QUESTIONS = ["hits", "capacity", "first-token", "filling", "bandwidth", "lag"]


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One short real run that evicts: its JSON and its page."""
    folder = tmp_path_factory.mktemp("report")
    files = folder / "run.json", folder / "run.html"
    assert main(["stress", "--requests", "120", "--rate", "0", "--concurrency", "8", "--device-tokens", "12288",
                 "--host-tokens", "16384", "--storage", "memory:?capacity=64MiB", "--quiet", "--eviction", "lru",
                 "--json", str(files[0]), "--report", str(files[1])]) == 0
    return json.loads(files[0].read_text()), files[1].read_text()


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def cells(root: ElementTree.Element, name: str) -> dict[str, list[str]]:
    """The table of a figure: the first cell of each row, and the others."""
    section = next(s for s in root.iter(f"{HTML}section") if s.get("id") == name)
    rows = [["".join(cell.itertext()) for cell in row] for row in section.iter(f"{HTML}tr")]
    return {first: rest for first, *rest in rows}


def test_it_is_well_formed_and_needs_nothing_else(stress: tuple[dict[str, Any], str]) -> None:
    root = parsed(stress[1])
    assert [element.tag for element in root.iter(f"{HTML}script")] == [f"{HTML}script"]
    for element in root.iter():
        assert element.tag not in {HTML + name for name in ("link", "img", "iframe", "object", "embed")}
        assert not {"src", "href", "srcset"} & set(element.attrib)
        assert not any(name.startswith("on") for name in element.attrib)
    assert not re.search(r"url\(|@import", stress[1])
    assert set(re.findall(r"https?://[^\s\"'<]+", stress[1])) == {
        "http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}


def test_it_answers_all_questions_of_a_run(stress: tuple[dict[str, Any], str]) -> None:
    assert "learned" not in stress[0], "lru learns nothing"
    root = parsed(stress[1])
    assert [s.get("id") for s in root.iter(f"{HTML}section")] == [*QUESTIONS, "settings"]
    names = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(names) == len(set(names))
    for drawing in root.iter(f"{SVG}svg"):
        title = drawing[0]
        assert title.tag == f"{SVG}title"
        assert title.get("id") == drawing.get("aria-labelledby")
        assert (title.text or "").count("?") == 1
    for section in root.iter(f"{HTML}section"):
        assert len(list(section.iter(f"{HTML}table"))) == 1
        assert len(list(section.iter(f"{HTML}caption"))) == 1


def test_its_figures_are_those_of_the_json(stress: tuple[dict[str, Any], str]) -> None:
    report, text = stress
    root = parsed(text)
    data = next(root.iter(f"{HTML}script")).text or ""
    assert json.loads(data) == report
    hit = report["tokens"]["hit"]
    assert [row[1] for row in list(cells(root, "hits").values())[1:4]] == [f"{hit[k]:,}" for k in hit]
    tiers = list(cells(root, "capacity").values())[1:4]
    best = {row["units"]: f"{100 * row['optimum']:.1f} %" for row in report["capacity"]["compared"]}
    assert [(row[0], *row[-2:]) for row in tiers] == [
        (f"{100 * t['hit_ratio']:.1f} %", best.get(t["units"], ""), f"{100 * t['measured']:.1f} %")
        for t in report["capacity"]["tiers"]]  # fmt: skip
    assert cells(root, "lag")["max"] == [milliseconds(report[one]["max"]) for one in ("loop_lag_ms", "run_queue_ms")]


def test_a_policy_that_is_not_lru_has_a_line_of_its_own(stress: tuple[dict[str, Any], str]) -> None:
    found = {**stress[0]["capacity"], "eviction": "p2c"}
    figure = run.capacity({**stress[0], "capacity": found})
    assert figure is not None
    assert figure.table.head == ("pages", "LRU", "p2c", "best", "measured")
    assert all(len(row) == 5 for row in figure.table.rows)
    assert [name for name, _ in figure.colours][:3] == ["p2c, in use", "LRU of this size", "best of this size"]
    assert all(row["lru"] <= row["optimum"] <= found["points"][-1]["hit_ratio"] for row in found["compared"])


def curve(name: str, blocks: float, again: float, worth: float) -> dict[str, Any]:
    reached = [blocks / 2**k for k in range(8)]
    return {"name": name, "used": [blocks / 4] * 8, "reached": reached,
            "again": [again * k / 8 for k in range(8)], "worth": [worth / (k + 1) for k in range(8)]}


LEARNED = {
    "policy": "p2c", "requests": 1234, "lessons": 12, "ghosts": 7, "watched": 9, "leads": True, "returned_blocks": 88.4,
    "edges_s": [0.0, 0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 2048.0],
    "curves": [curve("used once", 4000, 0.4, 0.001), curve("used twice", 2000, 0.8, 0.01),
               curve("never seen", 0, 0, 1)],
}  # fmt: skip


def test_what_a_policy_has_learned_is_drawn_by_kind(stress: tuple[dict[str, Any], str]) -> None:
    root = parsed(page({**stress[0], "learned": LEARNED}))
    assert [s.get("id") for s in root.iter(f"{HTML}section")] == [*QUESTIONS, "again", "settings"]
    found = cells(root, "again")
    assert found["kind"] == ["blocks", "10 s", "1 min", "10 min"]
    assert list(found) == ["kind", "used once", "used twice"]
    assert found["used twice"] == ["2,000", "30.8 %", "42.9 %", ""], "as far as thirty blocks have come"
    section = next(s for s in root.iter(f"{HTML}section") if s.get("id") == "again")
    lines = [(line.get("class"), len(line.get("points", "").split())) for line in section.iter(f"{SVG}polyline")]
    assert lines == [("line k1", 7), ("line k2", 6)]
    words = "".join(root.itertext())
    assert "Most often, pages that were used twice: 60.0 % of them within 8.53 min." in words
    assert "88 blocks came back after they had been evicted" in words


def test_a_policy_that_has_seen_too_little_has_no_figure(stress: tuple[dict[str, Any], str]) -> None:
    nothing = {**LEARNED, "curves": [curve("never seen", 0, 0, 1)]}
    assert [figure.name for figure in run.figures({**stress[0], "learned": nothing})] == QUESTIONS


def test_a_run_under_p2c_has_its_curves(tmp_path: Path) -> None:
    files = tmp_path / "run.json", tmp_path / "run.html"
    trace = tmp_path / "trace.jsonl"                   # a replay has the trace's clock, however fast the machine is
    asks = ({"timestamp": i * 1000, "input_length": 2048, "output_length": 1,
             "hash_ids": [0, 1 + i % 5, 10 + i % 30, 100 + i]} for i in range(250))  # fmt: skip
    trace.write_text("".join(json.dumps(ask) + "\n" for ask in asks))
    assert main(["replay", str(trace), "--concurrency", "1", "--page-size", "512", "--device-tokens", "24576",
                 "--host-tokens", "none", "--storage", "none", "--components", "full", "--eviction", "p2c",
                 "--quiet", "--json", str(files[0]), "--report", str(files[1])]) == 0
    report = json.loads(files[0].read_text())
    assert report["learned"]["policy"] == "p2c"
    assert report["learned"]["lessons"] == report["learned"]["requests"] // 100 >= 2
    root = parsed(files[1].read_text())
    names = [s.get("id") for s in root.iter(f"{HTML}section")]
    assert names[-2:] == ["again", "settings"]
    blocks = {c["name"]: f"{round(c['reached'][0]):,}" for c in report["learned"]["curves"]}
    for name, row in list(cells(root, "again").items())[1:]:
        assert row[0] == blocks[name]


def test_a_cache_that_finds_all_there_is_lies_on_the_curve(tmp_path: Path) -> None:
    """Measured and curve have one definition, also where prompts end inside a page."""
    out = tmp_path / "run.json"
    rows = [{"timestamp": 0, "input_length": 2 * 512 + 300, "output_length": 1, "hash_ids": [1, 2, 3 + i]}
            for i in range(4)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(tmp_path / "trace.jsonl"), "--concurrency", "1", "--host-tokens", "none", "--quiet",
                 "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    tier = report["capacity"]["tiers"][0]
    assert tier["measured"] == tier["hit_ratio"] == round(report["hit_ratio"], 5) == round(6 * 512 / (4 * 1324), 5)
    assert report["hit_ratio_is"] == report["capacity"]["hit_ratio_is"]


def test_the_samples_end_where_the_counters_do(stress: tuple[dict[str, Any], str]) -> None:
    report = stress[0]
    series = report["series"]
    lengths = {len(column) for name, column in series.items() if name != "moved_bytes"}
    assert lengths == {len(column) for column in series["moved_bytes"].values()}
    assert series["tokens"][-1] == report["tokens"]["total"]
    assert series["device"][-1] == report["tokens"]["hit"]["device"]
    assert series["t_s"] == sorted(series["t_s"])
    assert report["memcpy_bytes_per_s"] > 1e7
    assert report["capacity"]["tiers"][0]["units"] == 12288 // 16


def test_what_would_end_an_element_is_escaped(stress: tuple[dict[str, Any], str]) -> None:
    bad = "</script><b>&amp;"
    report = {**stress[0], "problems": [bad], "ok": False}
    root = parsed(page(report))
    assert json.loads(next(root.iter(f"{HTML}script")).text or "")["problems"] == [bad]
    assert bad in "".join(root.itertext())


def test_a_run_without_anything_makes_a_page(stress: tuple[dict[str, Any], str]) -> None:
    empty: dict[str, list[float]] = {"with": [], "without": []}
    report = {**stress[0], "ttft_percentiles_ms": empty, "capacity": {},
              "series": {**{k: [] for k in stress[0]["series"]}, "moved_bytes": {}}}
    assert "not enough data to draw" in page(report)


def test_rises_are_between_samples_and_add_up() -> None:
    times, counts = [float(i) for i in range(11)], [i * i for i in range(11)]
    found = run.bins(times, [counts], 4)
    assert [end for end, _ in found] == [3.0, 6.0, 9.0, 10.0]
    assert sum(rise[0] for _, rise in found) == 100


def test_scales_and_ticks() -> None:
    drawn = Drawing(Axis("x", 0, 10, str), Axis("y", 0, 1, str))
    assert (drawn.at_x(0), drawn.at_x(10)) == (52, 464)
    assert drawn.at_y(2) == drawn.at_y(1) == 14
    assert Axis("", 0, 1, str).ticks(6) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis("", 1, 1e6, str, log=True).ticks(9) == [1, 10, 100, 1e3, 1e4, 1e5, 1e6]
    assert Axis("", 1, 100, str, log=True).share(10) == pytest.approx(0.5)


def test_names_of_marks_do_not_lie_on_each_other() -> None:
    drawn = svg.lines(Axis("x", 0, 10, str), Axis("y", 0, 1, str), [Series("", "l1", [(0, 0), (10, 1)])],
                      [Mark("first", 5.0), Mark("second", 5.1)])
    places = re.findall(r'class="name" x="([\d.]+)" y="([\d.]+)"', "".join(drawn.parts))
    assert len({y for _, y in places}) == 2


def test_labels_stay_inside_the_drawing() -> None:
    across = Axis("", 1, 10, lambda v: f"{v:g} milliseconds", at=(1.0, 10.0))
    drawn = svg.rows(across, [DotRow("row", [("l1", 3.0)])])
    for x, words in re.findall(r'<text class="tick" x="([\d.]+)"[^>]*>([^<]*)<', "".join(drawn.parts)):
        assert len(words) * 3.3 - 0.5 <= float(x) <= svg.WIDTH + 0.5 - len(words) * 3.3, words


def bench_reports() -> dict[str, dict[str, Any]]:
    cpu = {"mean": 4.0, "p50": 3.0, "p99": 9.0, "max": 20.0}
    operations = {name: {"cpu": cpu, "goal_us": goal, "what": f"a {name}"} for name, goal in (("match", 5), ("pin", 3))}
    rates = {"pages_per_s": 10, "gb_per_s": 1.5, "cpu_us_per_page": 20.0, "p50_ms": 1.0, "p99_ms": 2.0, "p999_ms": 3.0}
    call = {"core_us": 4.4, "await_us": 8.8, "adds_us": 4.4, "goal_us": 5.0}
    return {
        "tree": {"shapes": {"full p16": operations},
                 "memory": {"full": {"bytes_per_node": 1000, "goal": 1024}}},
        "store": {"sizes": [{"page_bytes": 65536, "pages": 9, "pages_per_call": 3,
                             "raw": {"memcpy": rates, "checksum": rates}, "direct": {
            "raw": {"put": rates}, "on": {"put": rates, "get_shuffled": rates}, "ratio": {"on": {"put": 0.9}},
            "without_raw": None, "mismatches": 0}}],
                  "settings": {"url": "file:/x", "concurrency": 2, "rounds": 3}},
        "runtime": {"overhead": {"uvloop": {"match": call}}},
        "ttft": {"ttft_ms": {"no cache": 900.0, "L1": 40.0}, "all_ms": {"no cache": [890.0, 910.0], "L1": [40.0]},
                 "prefix_tokens": 4096, "own_tokens": 32, "parameters": 50_000_000, "torch_threads": 2,
                 "together": {
                     "requests": 8, "prompt_tokens": 128, "cached_tokens": 112, "new_tokens": 24,
                     "first_tokens_ms": {"alone": 900.0, "ours": 890.0},
                     "tokens_per_cpu_second": {"alone": 75.0, "ours": 76.0},
                     "all_tokens_per_cpu_second": {"alone": [74.0, 76.0], "ours": [76.0]}}},
    }  # fmt: skip


@pytest.mark.parametrize(("bench", "plots"), [("tree", 2), ("store", 1), ("runtime", 1), ("ttft", 2)])
def test_benchmarks_have_pages(bench: str, plots: int) -> None:
    report = {"bench": bench, **bench_reports()[bench]}
    root = parsed(page(report, import_module(f"asynccache.cli.bench_{bench}").charts(report)))
    assert len(list(root.iter(f"{SVG}svg"))) == plots
    assert len(list(root.iter(f"{SVG}circle"))) >= plots


def test_a_report_that_cannot_be_written_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--requests", "1", "--report", "/nowhere/x.html"]) == 2
    assert "--report=/nowhere/x.html: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["stress", "--requests", "1", "--quiet"], ["bench", "tree"]])
def test_a_page_is_not_written_to_standard_output(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = {"bench": "tree", **bench_reports()["tree"]}
    monkeypatch.setattr("asynccache.cli.bench_tree.run", lambda options, tell: figures)
    assert main([*command, "--report", "-"]) == 2
    assert "--report=-: the page goes to a file only" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# a real browser


def pixels(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of an 8-bit PNG without interlacing."""
    data = path.read_bytes()
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    depth = {2: 3, 6: 4}[colour]
    at, body = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        body += data[at + 8:at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    raw, stride, rows = zlib.decompress(body), width * depth, list[bytes]()
    before = bytearray(stride)
    for y in range(height):
        line = bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        _unfilter(raw[y * (stride + 1)], line, before, depth)
        rows.append(bytes(line))
        before = line
    return width, height, [b"".join(row[i:i + 3] for i in range(0, stride, depth)) for row in rows]


def _unfilter(kind: int, line: bytearray, up: bytearray, depth: int) -> None:
    for i in range(len(line)):
        a, b = (line[i - depth] if i >= depth else 0), up[i]
        c = up[i - depth] if i >= depth else 0
        if kind == 4:
            p = a + b - c
            guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        else:
            guess = (0, a, b, (a + b) // 2)[kind]
        line[i] = (line[i] + guess) & 255


def screenshot(file: Path, width: int, *, dark: bool) -> set[bytes]:
    """The colours that a browser shows."""
    shot = file.with_suffix(".png")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={file.parent / 'profile'}", f"--window-size={width},900", f"--screenshot={shot}",
               f"--blink-settings=preferredColorScheme={0 if dark else 1}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert shot.is_file(), f"the browser takes no screenshot here: {done.stderr[-200:]}"
    _, _, rows = pixels(shot)
    return {row[i:i + 3] for row in rows for i in range(0, len(row), 3)}


@pytest.fixture
def browser() -> str:
    """Where it is. Without one a person's tests go on, and those of CI do not."""
    if not BROWSER:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium or chrome is installed")
    return BROWSER


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_draws_it_in_light_and_dark(
    width: int, dark: bool, stress: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(stress[1])
    seen = screenshot(file, width, dark=dark)
    paper, ink, line = ("15161a", "ececf0", "62b4f0") if dark else ("fcfcfb", "1c1d20", "0067ac")
    for colour in (paper, ink, line):
        assert bytes.fromhex(colour) in seen, colour


BENCHES = {
    "tree": ["--shapes", "0"],
    "store": ["--page-sizes", "64KiB", "--bytes", "2MiB", "--repeat", "1"],
    "runtime": ["--calls", "100"],
    "ttft": ["--prefix", "256", "--layers", "2", "--width", "64", "--repeats", "1", "--requests", "2",
             "--prompt", "64", "--new", "4"],
}
PAPER = 718             # pixels between the margins of a sheet of A4


def measure(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, few in docs_programs.FEW.items():
            patch.setattr(bench_tree, name, few)
        for name, options in BENCHES.items():
            file, figures = folder / f"{name}.html", folder / f"{name}.json"
            assert main(["bench", name, *options, "--report", str(file), "--json", str(figures)]) == 0
            data = next(parsed(file.read_text()).iter(f"{HTML}script")).text or ""
            assert json.loads(data) == json.loads(figures.read_text())


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of real, small benchmarks, by name; measured once for all workers of a run."""
    folder = made_once(tmp_path_factory, "benches", measure)
    return {name: (folder / f"{name}.html").read_text() for name in BENCHES}


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES)
def test_a_real_benchmark_has_a_page(bench: str, measured: dict[str, str]) -> None:
    root = parsed(measured[bench])
    assert list(root.iter(f"{SVG}svg"))
    assert all((section.find(f"{HTML}h2")) is not None for section in root.iter(f"{HTML}section"))
    words = "".join(root.itertext())
    assert "nan" not in words.split()
    assert "None" not in words.split()


LOOK = """<script>document.documentElement.setAttribute("data-cut",
  [...document.querySelectorAll("main, .table, figure")]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className + ":" + e.parentElement.textContent.slice(0, 40))
  .join("|") + (document.documentElement.scrollWidth > innerWidth ? "page" : ""));</script></body>"""


def cut_off(text: str, width: int, file: Path) -> str:
    """What a browser cannot show whole when its window is so wide."""
    file.write_text(text.replace("</body>", LOOK))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={file.parent / 'profile'}",
               f"--window-size={width},900", "--hide-scrollbars", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    found = re.search('data-cut="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-500:]
    return found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("name", ["stress", *BENCHES])
def test_nothing_is_cut_off_on_a_screen_or_on_paper(
    name: str, stress: tuple[dict[str, Any], str], measured: dict[str, str], tmp_path: Path
) -> None:
    text = stress[1] if name == "stress" else measured[name]
    assert cut_off(text, 1280, tmp_path / "wide.html") == ""
    printed = text.replace("@media print", "@media all")
    assert printed != text
    assert cut_off(printed, PAPER, tmp_path / "paper.html") == ""


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
def test_it_prints_on_a_few_sheets(stress: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    """Two figures a sheet, in light colours whatever the screen is, none broken across sheets."""
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(stress[1])
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--no-pdf-header-footer", "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={paper}",
               file.as_uri()]
    subprocess.run(command, capture_output=True, timeout=90, check=False)
    sheets = len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))
    assert 3 <= sheets <= 7


def test_the_style_for_paper_is_light_and_breaks_no_figure(stress: tuple[dict[str, Any], str]) -> None:
    rules = stress[1].partition("@media print")[2].partition("</style>")[0]
    assert "@media screen and (prefers-color-scheme: dark)" in stress[1], "paper is light"
    assert "section { break-inside: avoid" in rules
    assert "print-color-adjust: exact" in rules
