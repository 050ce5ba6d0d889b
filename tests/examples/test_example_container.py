"""The image of the example server: the files that it copies exist, and the server takes the options that it is run
with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai_server

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "examples" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def test_what_it_copies_is_all_that_is_installed() -> None:
    copied = {word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / each).exists() for each in copied)
    packages = re.findall(r'packages = \[(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL)[0]
    assert {name.split("/")[0] for name in re.findall(r'"(.*?)"', packages)} <= copied
    assert {"README.md", "LICENSE", "pyproject.toml", "hatch_build.py"} <= copied, "what a build reads"


def test_what_it_runs_is_understood() -> None:
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in LINES if line.startswith("ENTRYPOINT "))
    assert entry[:2] == ["python", "examples/openai_server.py"]
    (shown,) = (line.partition("asynccache-server ")[2] for line in LINES if "docker run" in line)
    args = openai_server.arguments([*entry[2:], *shown.replace("'", "").split()])
    assert (args.host, args.port, args.storage) == ("0.0.0.0", 8000, "file:/var/kv?capacity=10GiB")
    assert f"EXPOSE {args.port}" in LINES
