"""``asynccache doctor``: what it says of a machine, in 80 columns, whatever is missing."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from asynccache.cli import doctor
from asynccache.cli.main import main
from asynccache.extras import BRINGS, installed


def test_doctor_speaks_of_all_that_a_cache_has_to_do_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["torch"] == version("torch")
    assert report["core"] in ("pure", "compiled")
    assert report["extras"].keys() == BRINGS.keys()
    assert 0 < report["limits"]["available_bytes"] <= report["memory"]["bytes"]
    assert report["disk"]["folder"] == str(tmp_path)
    assert 0 < report["disk"]["free_bytes"] < report["disk"]["bytes"]
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    named = [line.split()[0] for line in said.splitlines() if line[:1].strip()]
    assert named[:6] == ["python", "core", "memory", "disk", "extras", "torch"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/no/such/folder", "\0", "/proc"])
def test_a_folder_that_cannot_hold_a_store_is_told_and_is_no_error(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--folder", folder]) == 0
    assert "cannot hold a store: " in capsys.readouterr().out


def test_no_line_is_longer_than_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deep = tmp_path / ("folder " * 8) / ("another " * 8)
    deep.mkdir(parents=True)
    report = doctor.examine("cuda:0", str(deep))
    for changed in (report, report | {"extras": dict.fromkeys(BRINGS, False)}, report | {"core_why": "because " * 30}):
        lines = list(doctor.told(changed))
        assert [line for line in lines if len(line) > 80 and not line.strip().startswith(str(tmp_path))] == []


def test_what_an_extra_needs_is_told_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = installed
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "pyzmq" else there(package))
    report = doctor.examine("cuda:0")
    assert not report["extras"]["events"]
    assert any(line.strip() == "events: pip install 'pyzmq>=26'" for line in doctor.told(report))


def test_huge_pages_are_told_where_there_are_any(tmp_path: Path) -> None:
    report = doctor.examine("cuda:0", str(tmp_path))
    assert report["memory"]["huge_bytes"] % (2 << 20) == 0
    report["memory"]["huge_bytes"] = 6 << 30
    assert "6.0 GiB of free huge pages, for asynccache serve" in " ".join(" ".join(doctor.told(report)).split())
