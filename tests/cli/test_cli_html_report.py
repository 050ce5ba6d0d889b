"""The page of a run: well-formed, complete in itself, true to the JSON, drawn by a real browser where there is one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asynccache.cli.main import main
from asynccache.cli.output import milliseconds
from asynccache.cli.page import WIDTH, Axis, Figure, page, svg
from tests.cli.trace_kit import ALL, Ran, blocks_trace
from tests.stores.server import CannotStart, NowhereRequired, path_of

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUESTIONS = ["hits", "first-token", "filling", "lag"]


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One short real run that evicts: its JSON and its page."""
    folder = tmp_path_factory.mktemp("report")
    files = folder / "run.json", folder / "run.html"
    assert main(["stress", *ALL, "--requests", "120", "--rate", "0", "--concurrency", "8", "--device-tokens", "12288",
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
    assert cells(root, "lag")["max"] == [milliseconds(report[one]["max"]) for one in ("loop_lag_ms", "run_queue_ms")]


def test_a_run_under_p2c_has_what_it_learned(tmp_path: Path, ran: Ran) -> None:
    """A replay has the trace's clock, however fast the machine is."""
    trace = blocks_trace(tmp_path / "t.jsonl", ((i * 1000, [0, 1 + i % 5, 10 + i % 30, 100 + i]) for i in range(250)))
    report = ran(f"replay {trace} --concurrency 1 --page-size 512 --device-tokens 24576 --host-tokens none "
                 "--storage none --components full --eviction p2c")
    assert report["learned"]["policy"] == "p2c"
    assert report["learned"]["lessons"] == report["learned"]["requests"] // 100 >= 2


def test_the_samples_end_where_the_counters_do(stress: tuple[dict[str, Any], str]) -> None:
    report = stress[0]
    series = report["series"]
    lengths = {len(column) for name, column in series.items() if name != "moved_bytes"}
    assert lengths == {len(column) for column in series["moved_bytes"].values()}
    assert series["tokens"][-1] == report["tokens"]["total"]
    assert series["device"][-1] == report["tokens"]["hit"]["device"]
    assert series["t_s"] == sorted(series["t_s"])


def test_what_would_end_an_element_is_escaped(stress: tuple[dict[str, Any], str]) -> None:
    bad = "</script><b>&amp;"
    report = {**stress[0], "problems": [bad], "ok": False}
    root = parsed(page(report))
    assert json.loads(next(root.iter(f"{HTML}script")).text or "")["problems"] == [bad]
    assert bad in "".join(root.itertext())


def test_a_run_without_anything_makes_a_page(stress: tuple[dict[str, Any], str]) -> None:
    empty: dict[str, list[float]] = {"with": [], "without": []}
    series: dict[str, Any] = {**{column: [] for column in stress[0]["series"]}, "moved_bytes": {}}
    report = {**stress[0], "ttft_percentiles_ms": empty, "series": series}
    assert "not enough data to draw" in page(report)


def test_a_run_that_is_too_short_for_lines_has_bars_and_says_so(stress: tuple[dict[str, Any], str]) -> None:
    short = {name: column[:2] for name, column in stress[0]["series"].items() if name != "moved_bytes"}
    root = parsed(page({**stress[0], "series": short | {"moved_bytes": {}}}))
    assert [s.get("id") for s in root.iter(f"{HTML}section")] == [*QUESTIONS, "settings"]
    lengths = [float(bar.get("width", "0")) for bar in root.iter(f"{SVG}rect")]
    assert len(lengths) == 4                           # three tiers, and what was computed
    assert sum(lengths) == pytest.approx(WIDTH - 68, abs=1)
    assert "".join(root.itertext()).count("too short to draw") == 2


def test_settings_that_were_given_come_first_and_in_words(stress: tuple[dict[str, Any], str]) -> None:
    rows = list(cells(parsed(stress[1]), "settings").items())[1:]
    names = [name for name, _ in rows]
    given = ("requests", "rate", "concurrency", "device_tokens", "host_tokens", "storage", "eviction", "components")
    assert {*names[: len(given) + 1]} == {*given, "end_hints"}
    told = dict(rows)
    assert (told["components"], told["device_tokens"]) == (["full, swa, mamba"], ["12,288"])
    assert (told["verify"], told["mamba_bytes"]) == (["yes"], ["64.0 KiB"])


def drawing(x: Axis, y: Axis, *points: tuple[float, float]) -> str:
    return svg(Figure("plot", "", "", x, y, [("", "l1", points)], (), (), ""))


def test_scales_and_ticks() -> None:
    drawn = drawing(Axis("x", 0, 10, str), Axis("y", 0, 1, str), (0, 1), (10, 2))
    assert 'points="52,14 464,14"' in drawn
    assert Axis("", 0, 1, str).ticks(6) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Axis("", 1, 1e6, str, log=True).ticks(9) == [1, 10, 100, 1e3, 1e4, 1e5, 1e6]
    assert Axis("", 1, 100, str, log=True).share(10) == pytest.approx(0.5)


def test_labels_stay_inside_the_drawing() -> None:
    drawn = drawing(Axis("", 1, 10, lambda v: f"{v:g} milliseconds", log=True), Axis("", 0, 1, str))
    below = re.findall(r'<text class="tick" x="([\d.]+)"[^>]*text-anchor="middle">([^<]*)<', drawn)
    assert len(below) > 1
    for x, words in below:
        assert len(words) * 3.3 - 0.5 <= float(x) <= WIDTH + 0.5 - len(words) * 3.3, words


# a real browser


@pytest.fixture
def browser() -> str:
    """Where it is. Without one a person's tests go on, and those of CI do not."""
    missing = CannotStart if os.environ.get("CI") else NowhereRequired
    return path_of(*BROWSERS, install="apt-get install chromium", missing=missing)


PAPER = 718             # pixels between the margins of a sheet of A4


def test_the_style_for_paper_is_light_and_breaks_no_figure(stress: tuple[dict[str, Any], str]) -> None:
    rules = stress[1].partition("@media print")[2].partition("</style>")[0]
    assert "@media screen and (prefers-color-scheme: dark)" in stress[1], "paper is light"
    assert "section { break-inside: avoid" in rules
    assert "print-color-adjust: exact" in rules


LOOK = """<script>const shown = e => getComputedStyle(document.querySelector(e));
  const cut = [...document.querySelectorAll("main, .table, figure")]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.className + ":" + e.parentElement.textContent.slice(0, 40))
  .join("|") + (document.documentElement.scrollWidth > innerWidth ? "page" : "");
  document.documentElement.setAttribute("data-seen", cut + ";" + shown("body").backgroundColor + ";" +
  shown("body").color + ";" + shown("polyline").stroke)</script></body>"""
LIGHT = ";rgb(252, 252, 251);rgb(28, 29, 32);rgb(0, 103, 172)"
DARK = ";rgb(21, 22, 26);rgb(236, 236, 240);rgb(98, 180, 240)"


@pytest.mark.slow(3)
@pytest.mark.parametrize(("width", "media", "seen"), [
    (1280, "screen", LIGHT), (390, "dark", DARK), (PAPER, "all", LIGHT),
])  # fmt: skip
def test_a_browser_shows_all_of_it_in_light_and_dark_and_prints_it_on_a_few_sheets(
    width: int, media: str, seen: str, browser: str, stress: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    """Nothing is cut off, but for a table on a telephone. On paper: two figures a sheet, in light colours whatever the
    screen is, none broken across sheets."""
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(stress[1].replace("@media print", "@media all" if media == "all" else "@media print")
                    .replace("</body>", LOOK))  # fmt: skip
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={width},900", "--hide-scrollbars",
               f"--blink-settings=preferredColorScheme={int(media != 'dark')}"]  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=90)
    found = re.search('data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-500:]
    assert found[1].endswith(seen)
    assert width < 500 or found[1] == seen
    if media == "all":
        file.write_text(stress[1])
        command += ["--no-pdf-header-footer", "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={paper}"]
        subprocess.run([*command, file.as_uri()], capture_output=True, timeout=90, check=False)
        assert 2 <= len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) <= 5
