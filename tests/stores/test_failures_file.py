"""The stress tool on a folder: one that is full from the first seconds on, and one on which calls fail and lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import courses


@pytest.mark.slow(10)
def test_a_full_folder(tmp_path: Path) -> None:
    courses.file_full(tmp_path)


@pytest.mark.slow(9)
def test_calls_that_fail_and_lie(tmp_path: Path) -> None:
    courses.file_faulty(tmp_path)
