"""Every block on every page is executed: Python prints what the page says, commands run in a real shell and end well,
files of settings are loaded. A block that is not executed has a reason on the page, and is listed in ``EXCEPTIONS``.

A block of nothing but calls of ``asynccache``, which need no shell, runs in this process: most of the time of a short
command is the import of torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast
from unittest.mock import patch

import pytest

from asynccache import load_config
from asynccache.cli.main import main
from asynccache.cli.options import RunSettings
from asynccache.core.policies import POLICIES
from asynccache.storage import StorageBackend
from asynccache.testing.backend_suite import BackendSuite, OpenBackend
from tests.docs import docs_programs
from tests.docs.docs_kit import PAGES, ROOT, Block, all_blocks, files, shell
from tests.processes import PATHS, run
from tests.stores.redis_server import RedisServer
from tests.stores.server import free_port, path_of

PYTHON = [block for block in all_blocks("python") if block.reason is None]
SHELL = [block for block in all_blocks("console", "sh") if block.reason is None]
SETTINGS = all_blocks("toml")
READ = {"python", "console", "sh", "toml", "text", "json", "yaml", ""}

# How many blocks of each page have a reason there why they are not run.
EXCEPTIONS = {
    "README.md": 3, "docs/components.md": 1, "docs/cuda.md": 2, "docs/engines/sglang.md": 2,
    "docs/engines/transformers.md": 2, "docs/engines/vllm.md": 2, "docs/performance.md": 2,
    "docs/stores/object.md": 2, "docs/verify.md": 2,
}  # fmt: skip
# Blocks that are drawings, not code.
DRAWINGS = {"docs/design.md": 2}
PATIENCE = 120.0
LONG = re.compile(r"\b(stress|replay|bench|benchmarks|make|plan|openai_server|for _ in range)\b")


def test_nothing_is_passed_over() -> None:
    found = all_blocks()
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert len(found) * 2 == fences, "a fence that docs_kit does not understand"
    assert {block.language for block in found} <= READ
    without = [block.page for block in found if not block.language]
    assert {page: without.count(page) for page in without} == DRAWINGS
    printed = {block.printed for block in found if block.printed is not None}
    assert not [block.place for block in found if block.language == "text" and block.code not in printed]
    assert Counter(block.page for block in found if block.reason) == EXCEPTIONS


@pytest.mark.parametrize("block", PYTHON, ids=[block.place for block in PYTHON])
def test_python_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)                  # as for a program in that folder
    write_files(block.page)
    with patch.dict(POLICIES):                             # what a block adds is gone afterwards
        exec(compile(block.code, block.place, "exec", dont_inherit=True), {"__name__": "docs_block"})
    for name in files(block.page):
        if name.endswith(".py"):
            sys.modules.pop(Path(name).stem, None)
    if block.printed is not None:
        assert capsys.readouterr().out == block.printed


def write_files(page: str) -> None:
    """The files that the pages show, in the working folder."""
    for name, text in files(page).items():
        Path(name).write_text(text, encoding="utf-8")


@pytest.mark.slow(5)
def test_the_example_of_the_readme_is_short_warns_of_nothing_and_prints_what_its_comment_says(tmp_path: Path) -> None:
    (code,) = (block.code for block in PYTHON if block.page == "README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "example.py").write_text(code)
    (said,) = re.findall(r"asyncio\.run\(main\(\)\) +# (.*)", code)
    done = run("-W", "error", tmp_path / "example.py")
    assert (done.returncode, done.stdout.strip()) == (0, said.strip()), done.stderr


EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")} - {
    "openai_server.py", "fastapi_app.py", "router.py", "vllm_second_run.py", "tiny_llama.py",
}  # fmt: skip
"""But for two servers and a router, which do not end, one that needs vLLM (tests/vllm runs it there), and a model."""


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_run(name: str) -> None:
    done = run("-W", "error", ROOT / "examples" / name)
    assert (done.returncode, "came from the cache" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_an_example_that_needs_vllm_says_so_at_once() -> None:
    done = run("-W", "error", ROOT / "examples/vllm_second_run.py")
    assert done.returncode == 1
    assert re.fullmatch("this needs vLLM: pip install .*\n", done.stderr)


def test_the_help_of_a_run_names_every_store_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text().partition("## Stores")[2].partition("\n## ")[0]
    stores = {scheme for cell in re.findall(r"^\| ?(.*?) ?\|", table, re.MULTILINE)
              for scheme in re.findall(r"`(\w+:)[^`-]*`", cell)}  # fmt: skip
    assert {"file:", "rediss:", "az:"} <= stores
    text = RunSettings.fields("stress")["storage"].meaning
    assert not [scheme for scheme in stores if scheme not in text]


# shell


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that a run filled."""
    folder = tmp_path_factory.mktemp("store")
    assert main(["stress", "--quiet", "--requests", "8", "--storage", f"file:{folder}/kv?capacity=64MiB"]) == 0
    return folder / "kv"


@pytest.fixture
def place(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages speak of: settings, traces, a store; and their programs."""
    monkeypatch.chdir(tmp_path)
    Path("kv").symlink_to(store)
    Path("trace.jsonl").write_text(_trace())
    Path("examples").symlink_to(ROOT / "examples")
    Path(".venv/bin").mkdir(parents=True)
    Path(".venv/bin/activate").write_text("")              # as `make demo` left it
    Path("bin").mkdir()
    for name in ("asynccache", "python", "make"):
        program = Path("bin", name)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{docs_programs.__file__}" {name} "$@"\n')
        program.chmod(0o755)
    return tmp_path


def _trace() -> str:
    """The beginning of a recorded trace, where there is one; else one in the same format."""
    recorded = Path(os.environ.get("ASYNCCACHE_TRACE", ""))
    if recorded.is_file():
        with recorded.open(encoding="utf-8") as lines:
            return "".join(line for line, _ in zip(lines, range(80), strict=False))
    made = ({"timestamp": i * 100, "input_length": 1200, "output_length": 16, "hash_ids": [0, i % 9 + 1, i + 10]}
            for i in range(80))
    return "".join(json.dumps(line) + "\n" for line in made)


def here(script: str) -> str:
    """The same commands on folders and ports that are this test's own."""
    script = re.sub(r"/var/tmp/|/var/|/run/|/tmp/", f"{os.getcwd()}/", script)
    return re.sub(r"\b9090\b", str(free_port()), script)


_END = "\nfor job in $(jobs -p); do kill -INT $job; wait $job || [ $? = 130 ]; done\n"


def _marks(block: Block) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow(1 + block.code.count("asynccache "))] if LONG.search(block.code) else []


PLAIN = re.compile(r"asynccache [^|&;<>$`\\\\*?~{}]*")


def _calls(block: Block) -> list[list[str]]:
    """The arguments of each command of a block that has only calls of ``asynccache``; else none."""
    lines = [line.partition(" #")[0] for line in shell(block)[0].splitlines() if line.strip()]
    return [shlex.split(line)[1:] for line in lines] if all(map(PLAIN.fullmatch, lines)) else []


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place, marks=_marks(b)) for b in SHELL if _calls(b)])
def test_calls_of_the_command_run(
    block: Block, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(block.page)
    _, shown = shell(block)
    statuses = [main(docs_programs.sooner([here(one) for one in call])) for call in _calls(block)]
    _check(statuses[-1], capfd.readouterr(), shown)
    assert not any(statuses[:-1])


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place, marks=_marks(b)) for b in SHELL if not _calls(b)])
def test_commands_run(block: Block, place: Path) -> None:
    """``bash`` runs the block; whatever it left in the background is interrupted, and must end as the manual says."""
    if "redis-server" in block.code:
        RedisServer.installed()
    bash = path_of("bash", install="apt-get install bash")
    write_files(block.page)
    script, shown = shell(block)
    said = place / "said"
    environment = os.environ | PATHS | {"PATH": f"{place}/bin:{os.environ['PATH']}"}
    with said.open("w") as output:
        status = run_alone([bash, "-euo", "pipefail", "-c", here(script) + _END], output, environment)
    _check(status, said.read_text(encoding="utf-8"), shown)


def _check(status: int, said: object, shown: tuple[str, ...]) -> None:
    """``said``: all that the commands printed, as text or as what pytest captured."""
    text = said if isinstance(said, str) else "".join(cast("tuple[str, str]", said))
    assert status == _expected(shown), text
    assert "Traceback" not in text
    pattern = "\n".join(".*" if line.strip() == "..." else re.escape(line) for line in shown)
    assert re.search(pattern, text, re.DOTALL), text


def run_alone(command: list[str], output: IO[str], environment: dict[str, str]) -> int:
    """The status of ``command``, of which nothing is left afterwards."""
    with subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True) as process:
        try:
            return process.wait(timeout=PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _expected(shown: tuple[str, ...]) -> int:
    """A page that shows what is refused shows a command that ends with status 1."""
    return int(bool(shown) and shown[0].startswith("asynccache: "))


# settings and other files


@pytest.mark.parametrize("block", SETTINGS, ids=[block.place for block in SETTINGS])
def test_files_can_be_used(block: Block, tmp_path: Path) -> None:
    """All of a file: the cache that it describes, or the plug-in that it names."""
    assert block.title, "say what file it is: ```toml title=\"kv.toml\""
    table = tomllib.loads(block.code)
    if block.title == "pyproject.toml":
        assert list(table["project"]["entry-points"]) == ["asynccache.backends"]
        return
    file = tmp_path / block.title
    file.write_text(block.code, encoding="utf-8")
    if block.title == "wrong.toml":
        assert main(["config", "check", str(file)]) == 1
        return
    assert load_config(file, env={}).model == table["model"]


@pytest.mark.parametrize("block", all_blocks("json", "yaml"), ids=lambda block: block.place)
def test_json_and_yaml_can_be_read(block: Block) -> None:
    assert json.loads(block.code) if block.language == "json" else pytest.importorskip("yaml").safe_load(block.code)


class TestTheBackendOfThePage(BackendSuite):
    """The backend that docs/stores.md shows as complete passes the suite that it names."""

    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        (code,) = (block.code for block in all_blocks("python") if "class DictBackend" in block.code)
        names: dict[str, Any] = {}
        exec(compile(code, "docs/stores.md", "exec"), names)

        async def open_shown() -> StorageBackend:
            shown: StorageBackend = names["DictBackend"]()
            return shown

        return open_shown


EXTRA = re.compile(r"(?:asynccache|\.)\[([\w,]+)\]")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_extra_that_is_named_is_there() -> None:
    sources = [path for folder in ("asynccache", "backends", "scheduler_shim", "examples")
               for path in (ROOT / folder).rglob("*.py")]
    named = {(path, extra) for path in (*PAGES, *sources) for found in EXTRA.findall(path.read_text(encoding="utf-8"))
             for extra in found.split(",")}
    assert len(named) > 8
    assert not [where for where in named if where[1] not in PROJECT["optional-dependencies"]]


def test_what_the_extras_name_can_be_installed() -> None:
    """It is: the gate runs with all of them, but for those that need a GPU."""
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for requirement in requirements:
            name, least = re.match(r"([\w-]+)(?:\[[\w,]+\])?(?:>=([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
            if name == "asynccache" or extra.startswith("cuda"):
                continue
            try:
                installed = version(name)
            except PackageNotFoundError:
                pytest.skip(f"{name} is not installed here: make test installs all of the extra dev")
            if least:
                assert _numbers(installed) >= _numbers(least), requirement


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]
