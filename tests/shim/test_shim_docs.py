"""The example of docs/scheduler.md runs as it is, and prints what the page promises: the second request is a hit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow(3)
def test_the_example_runs(tmp_path: Path) -> None:
    source = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/scheduler.md").read_text(), re.M | re.S)
    assert source is not None
    program = tmp_path / "example.py"
    program.write_text(source[1])
    path = os.pathsep.join([f"{ROOT}", f"{ROOT / 'backends'}", f"{ROOT / 'scheduler_shim'}", *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-W", "error", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "[1000, 1001, 1002, 1003] Hits(device=0, host=0, storage=0) computed 1003",
        "[1000, 1001, 1002, 1003] Hits(device=992, host=0, storage=0) computed 1014",
    ]
