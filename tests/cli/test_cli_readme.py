"""The commands and programs that README and the examples show work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asynccache.cli.options import RunSettings

pytestmark = pytest.mark.slow(5)

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


EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")} - {
    "openai_server.py", "fastapi_app.py", "router.py", "vllm_second_run.py", "tiny_llama.py",
}  # fmt: skip
"""But for two servers and a router, which do not end, one that needs vLLM (tests/vllm runs it there), and a model."""


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_run(name: str) -> None:
    assert "came from the cache" in run(ROOT / "examples" / name)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_an_example_that_needs_vllm_says_so_at_once() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(ROOT / "examples/vllm_second_run.py")],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch("this needs vLLM: pip install .*\n", done.stderr)


def test_the_help_of_a_run_names_every_store_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text().partition("## Stores")[2].partition("\n## ")[0]
    stores = {scheme for cell in re.findall(r"^\| ?(.*?) ?\|", table, re.MULTILINE)
              for scheme in re.findall(r"`(\w+:)[^`-]*`", cell)}  # fmt: skip
    assert {"file:", "rediss:", "az:"} <= stores
    text = RunSettings.fields("stress")["storage"].meaning
    assert not [scheme for scheme in stores if scheme not in text]
