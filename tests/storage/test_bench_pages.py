"""The benchmark of ``Pages`` says what it measured."""

from __future__ import annotations

import pytest

from benchmarks.pages import main


def test_it_prints_what_both_ways_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--calls", "3", "--rounds", "2", "--pages", "8", "--page-bytes", "1KiB"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert "8 pages of 1024 bytes in a call" in title
    assert head.split() == ["stores", "Pages", "own"]
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["exists", "put", "get"]
    assert all(float(figure) > 0 for row in rows for figure in row[1:3])
