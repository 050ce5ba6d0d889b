"""The examples on the pages about events and metrics work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache.runtime.lookups import Miss

pytestmark = pytest.mark.slow(2)

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "printed"), [("events.md", "Mirror(GPU 4, CPU 4, STORAGE 0)"), ("metrics.md", "match: 64 on the device")]
)
def test_the_example_runs(page: str, printed: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_every_reason_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text()
    table = re.findall(r"^\|`(\w+)`\|[^|]+\|[^|]*\|$", text, re.MULTILINE)
    assert [reason.name.lower() for reason in Miss] == [name for name in table if name.upper() in Miss.__members__]
