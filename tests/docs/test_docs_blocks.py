"""Every block of Python on every page runs and prints what the page says; every command and every file of settings is
one that the programs understand."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import explain, main, plan, session, store
from tests.docs.docs_kit import ROOT, Block, all_blocks, commands

PYTHON = all_blocks("python")
SHELL = [(block.place, words) for block in all_blocks("", "console", "sh", "bash") for words in commands(block)]
TOML = all_blocks("toml")


def test_there_are_blocks() -> None:
    assert len(PYTHON) > 8
    assert len(SHELL) > 15
    assert TOML


@pytest.mark.parametrize("block", PYTHON, ids=[block.place for block in PYTHON])
def test_python_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if block.reason is not None:
        compile(block.code, block.place, "exec")
        pytest.skip(block.reason)
    monkeypatch.chdir(tmp_path)
    _keep_settings()
    exec(compile(block.code, block.place, "exec"), {"__name__": "docs_block"})
    if block.printed is not None:
        assert capsys.readouterr().out == block.printed


def _keep_settings() -> None:
    """The pages speak of one file of settings, which one of them shows."""
    Path("kv.toml").write_text(next(block.code for block in TOML if "model = " in block.code))


def _alternatives(words: list[str]) -> Iterator[list[str]]:
    """``bench tree|store`` is two commands."""
    for at, word in enumerate(words):
        if re.fullmatch(r"\w+(\|\w+)+", word):
            for choice in word.split("|"):
                yield from _alternatives([*words[:at], choice, *words[at + 1 :]])
            return
    yield words


@pytest.mark.parametrize(("place", "words"), SHELL, ids=[f"{place} {' '.join(words)[:50]}" for place, words in SHELL])
def test_commands_are_understood(
    place: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{place}: {done.stderr}"
        return
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    _run_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[stress]\nduration = 1\n")
    _keep_settings()
    for command in _alternatives(words[1:]):
        assert main.main([word for word in command if word != "..."]) == 0, f"{place}: {command}"


def _run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands go as far as having understood what they were told."""
    def understood(settings: Any) -> int:
        return 0

    for module in (session, store, explain, plan):
        monkeypatch.setattr(module, "execute", understood)
    for bench in main.BENCHES:
        monkeypatch.setattr(f"asynccache.cli.bench_{bench}.run", lambda options: {})


@pytest.mark.parametrize("block", TOML, ids=[block.place for block in TOML])
def test_toml_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.code)
