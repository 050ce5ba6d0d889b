"""A command answers with a sentence and never with a traceback, whatever it is given: files, addresses, numbers, disks
and pipes that cannot be used. The effects of a closed pipe or a full disk on a process are tried with processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache.cli.main import main

FILES = ("junk", "folder", "nowhere", "zeros", "brackets")
URLS = ("http://[::1", "http://exa mple", "http://127.0.0.1:99999", "ftp://x", ":::", "", "http://127.0.0.1:1",
        "http://\x07")
STORES = ("nope:", ":::", "file:", "file:junk", "file:/proc/x", "memory:?capacity=-3", "memory:?nope=1",
          "file:x?capacity=1")
CASES = [
    *(["replay", file] for file in FILES),
    *(["plan", file] for file in FILES),
    *(["stress", "--requests", "1", "--config", file] for file in FILES),
    *(["config", action, file] for action in ("check", "show") for file in FILES),
    *(["explain", url, "--tokens", "1"] for url in URLS),
    *(["explain", "http://127.0.0.1:1", "--tokens", text] for text in ("", "x", "1.5", "@folder", "@junk", "@")),
    *(["store", action, url] for action in ("stat", "verify") for url in STORES),
    *(["stress", "--requests", "1", option, "folder"] for option in ("--json", "--report")),
    ["stress", "--requests", "1", "--serve", "70000"], ["stress", "--requests", "0"], ["stress", "--seed", "x"],
    ["bench", "nothing"],
    ["bench", "store", "--bytes", "x"], ["bench", "ttft", "--prefix", "7"],
    ["plan", "junk", "--host-gib", "x"], ["nothing"], ["stress", "--nothing"], ["config", "nothing"],
    ["stress", ""], ["replay", ""], ["stress", "--config", ""], ["store", "stat", ""], ["plan", "", "--json", ""],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files that are not what they should be."""
    made = tmp_path_factory.mktemp("files")
    (made / "junk").write_bytes(bytes(range(256)))
    (made / "zeros").write_bytes(bytes(10_000))
    (made / "brackets").write_text("[" * 100_000)
    (made / "folder").mkdir()
    return made


def asynccache(arguments: list[str], folder: Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccache", *arguments]
    if shell:
        command = ["bash", "-c", shell, "bash", *command]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}     # as users have it
    return subprocess.run(command, cwd=folder, env=buffered, capture_output=True, text=True, timeout=180, check=False)


def said(everything: str) -> str:
    for word in ("Traceback", "bug in asynccache", "Exception ignored", "Error:"):
        assert word not in everything, everything[-2000:]
    return everything


@pytest.mark.parametrize("arguments", CASES, ids=lambda arguments: " ".join(arguments)[:60])
def test_a_sentence_is_the_answer(
    arguments: list[str], folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    try:
        status: object = main(arguments)
    except SystemExit as end:                          # of the parser
        status = end.code
    out, err = capfd.readouterr()
    words = said(err + out)
    assert status in (1, 2), words
    assert words.startswith("asynccache"), words
    assert max(map(len, words.splitlines())) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["replay", "junk"], ["explain", "http://127.0.0.1:1", "--tokens", "1"]])
def test_a_process_says_the_same(arguments: list[str], folder: Path) -> None:
    done = asynccache(arguments, folder)
    assert done.returncode in (1, 2)
    assert said(done.stderr + done.stdout).startswith("asynccache: ")


RUN = ["stress", "--requests", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "shell", "statuses"), [
    (["config", "schema"], '"$@" | head -c 5; exit ${PIPESTATUS[0]}', {0, 1}),
    (RUN, '"$@" | head -c 5; exit ${PIPESTATUS[0]}', {0, 1}),
    ([*RUN, "--json", "-"], '"$@" | head -c 5; exit ${PIPESTATUS[0]}', {0, 1}),
    (RUN, '"$@" >&-', {0}), (RUN, '"$@" 2>&-', {0}), (["config", "schema"], '"$@" >&-', {0}),
    (["config", "schema"], '"$@" > /dev/full', {2}), ([*RUN, "--quiet", "--json", "-"], '"$@" > /dev/full', {2}),
    ([*RUN, "--quiet", "--json", "/dev/full"], '"$@"', {2}), ([*RUN, "--quiet", "--report", "/dev/full"], '"$@"', {2}),
])  # fmt: skip
def test_nobody_listens_or_the_disk_is_full(
    arguments: list[str], shell: str, statuses: set[int], folder: Path
) -> None:
    done = asynccache(arguments, folder, shell)
    said(done.stderr + done.stdout)
    assert done.returncode in statuses, done.stderr
