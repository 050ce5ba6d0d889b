"""What README and the examples show works as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(path: Path) -> str:
    done = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_embedding_example_does_what_its_comment_says(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code) == 1
    assert len([line for line in code[0].splitlines() if line.strip()]) <= 20
    script = tmp_path / "example.py"
    script.write_text(code[0])
    printed = run(script)
    said = re.search(r"asyncio\.run\(main\(\)\) +# (.*)", code[0])
    assert said is not None
    assert printed.strip() == said[1].strip()


EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")} - {"openai_server.py"}  # which does not end


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_run(name: str) -> None:
    assert "came from the cache" in run(ROOT / "examples" / name)
