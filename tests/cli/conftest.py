"""Runs of the command in this process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Does a run, of whose words ``FOLDER`` stands for the test's folder; its report. If its status is 0, as it is
    unless another is given, the run was right in every respect."""
    def done(words: str | Sequence[str], *more: str, status: int = 0) -> dict[str, Any]:
        file = tmp_path / "report.json"
        given = shlex.split(words.replace("FOLDER", str(tmp_path))) if isinstance(words, str) else words
        assert main([*given, *more, "--quiet", "--json", str(file)]) == status
        report: dict[str, Any] = json.loads(file.read_text())
        right = (report["ok"], report["problems"], report["failed"], report["verify"]["mismatches"])
        assert status or (right, set(report["leaks"].values())) == ((True, [], 0, 0), {0}), report["problems"]
        return report

    return done
