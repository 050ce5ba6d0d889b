"""``examples/vllm_second_run.py`` as a reader runs it: twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engine_kit import EXAMPLES, STARTS_WITHIN, installed

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(90),
]

LINE = re.compile(r"^(.+): +first token after +(\d+) ms, (\d+) of 4097 tokens cached$", re.MULTILINE)


def run(folder: Path) -> dict[str, tuple[int, int]]:
    """Milliseconds and cached tokens, by where vLLM had the prompt."""
    command = [sys.executable, str(EXAMPLES / "vllm_second_run.py"), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * STARTS_WITHIN, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "run this again" in done.stdout
    return {where: (int(seconds), int(cached)) for where, seconds, cached in LINE.findall(done.stdout)}


def test_the_second_run_finds_what_the_first_computed(tmp_path: Path) -> None:
    first, second = run(tmp_path / "example"), run(tmp_path / "example")
    emptied, nothing = "vLLM's memory emptied", "nothing in vLLM's memory"
    assert list(first) == list(second) == [nothing, "on the device", emptied]
    assert [cached for _, cached in first.values()] == [0, 4096, 4096]
    assert [cached for _, cached in second.values()] == [4096, 4096, 4096]
    assert second[nothing][0] < first[nothing][0], "it was not computed"
