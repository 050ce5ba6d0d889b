"""A release as others take it: sdist and wheel are built, installed into a clean environment, and used from there.

Nothing is fetched: the wheel is installed without its dependencies, which are then lent from the environment that the
tests run in. That one has asynccache too, but behind the clean one on the path, and not as an installation.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import asynccache
from tests.processes import ROOT, Done, program
from tests.stores.server import NowhereRequired, path_of
from tests.workers import made_once

PACKAGES = (
    "asynccache", "asynccache_backends", "asynccache_shim", "asynccache_hf", "asynccache_vllm", "asynccache_sglang",
)  # fmt: skip
CORE = {"torch", "numpy", "msgspec", "aiofiles", "xxhash", "uvloop"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


NOTHING: Mapping[str, str] = {}
class Built(NamedTuple):
    sdist: Path
    wheel: Path


class Clean(NamedTuple):
    """A virtual environment with the wheel. ``bare`` has nothing else but msgspec, which settings need; ``lent`` has
    its dependencies as well."""

    bare: Path
    lent: Path


def run(
    *command: object, cwd: Path, check: bool = True, environment: Mapping[str, str] = NOTHING
) -> Done:
    """Run it to its end, on the core that it chooses by itself. ``environment``: what that has besides."""
    done = program(*command, cwd=cwd, env={"ASYNCCACHE_PURE": "", **environment}, timeout=500)
    assert done.returncode == 0 or not check, done.stderr[-2000:] + done.stdout[-2000:]
    return done


def build(source: Path, target: str, folder: Path, environment: Mapping[str, str] = NOTHING) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source, environment=environment)
    (made,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


def build_both(folder: Path) -> None:
    """The sdist, and the wheel that is built from what the sdist has."""
    sdist = build(ROOT, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    build(source, "wheel", folder)


def install_both(wheel: Path, place: Path) -> None:
    for name in Clean._fields:
        folder = place / name / "venv"
        venv.create(folder, with_pip=False)
        pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    bare, lent = (next((place / name / "venv").glob("lib/python*/site-packages")) for name in Clean._fields)
    (bare / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    (lent / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The archives, built once for all workers of a run."""
    pytest.importorskip("hatchling")
    folder = made_once(tmp_path_factory, "built", build_both)
    return Built(*folder.glob("*.tar.gz"), *folder.glob("*.whl"))


@pytest.fixture(scope="session")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The environments, made once for all workers of a run."""
    place = made_once(tmp_path_factory, "clean", lambda folder: install_both(built.wheel, folder))
    return Clean(*(place / name / "venv" for name in Clean._fields))


@pytest.fixture(scope="session")
def compiled_clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The same with the compiled core, which is built only if none lies in place."""
    for tool in ("hatchling", "mypyc", "setuptools"):
        pytest.importorskip(tool)
    path_of("cc", "gcc", install="apt-get install gcc libc6-dev", missing=NowhereRequired)
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise NowhereRequired("Python's headers are not installed: apt-get install python3-dev")
    place = made_once(tmp_path_factory, "compiled", lambda folder: install_both(
        build(ROOT, "wheel", folder / "wheel", {"ASYNCCACHE_COMPILE": "1"}), folder))  # fmt: skip
    return Clean(*(place / name / "venv" for name in Clean._fields))


def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def test_versions_and_changelog_agree() -> None:
    assert PROJECT["version"] == asynccache.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.search(rf"\b{re.escape(PROJECT['version'])}\b", headings[0])


def tracked() -> set[str]:
    """The files that git has here: none, if this is no clone."""
    git = path_of("git", install="apt-get install git", missing=NowhereRequired)
    names = run(git, "ls-files", cwd=ROOT, check=False).stdout.split()
    return {name for name in names if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_sdist_has_what_builds_tests_and_explains_it(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert names >= tracked() | {"pyproject.toml", "README.md", "tests/packaging/test_release.py"}
    assert not [name for name in names if "__pycache__" in name or name.startswith((".git/", ".venv/", "build/"))]
    with tarfile.open(built.sdist) as archive:
        packed = archive.extractfile(f"{archive.getnames()[0].split('/')[0]}/LICENSE")
        assert packed is not None
        assert packed.read() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_the_wheel_has_every_module_and_mark_of_types_and_nothing_else(built: Built) -> None:
    names = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    sources = {re.sub(r"^(backends|scheduler_shim)/", "", path) for path in tracked()}
    assert names >= {path for path in sources if path.split("/")[0] in PACKAGES}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert names >= {f"{package}/py.typed" for package in PACKAGES}
    archive = zipfile.ZipFile(built.wheel)
    (licence,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_what_installing_it_pulls_is_little(built: Built) -> None:
    found = metadata(built.wheel)
    requires = [text for text in found.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {re.split(r"[<>=!;\s]", text)[0] for text in requires} == CORE
    (uvloop,) = (text for text in requires if text.startswith("uvloop"))
    assert "sys_platform != 'win32'" in uvloop.replace('"', "'")
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Version"] == asynccache.__version__
    assert found["Requires-Python"] == PROJECT["requires-python"]


@pytest.mark.slow
def test_without_its_dependencies_it_can_be_asked(clean: Clean, tmp_path: Path) -> None:
    """Help, versions and configuration need nothing but Python and msgspec."""
    tool = clean.bare / "bin" / "asynccache"
    assert run(tool, "--version", cwd=tmp_path).stdout == f"asynccache {asynccache.__version__}, pure core\n"
    assert "usage: asynccache" in run(tool, "--help", cwd=tmp_path).stdout
    (tmp_path / "kv.toml").write_text('model = "m"\n[components.full]\nbytes_per_token = 64\ndevice_tokens = 160\n')
    assert "can be used" in run(tool, "config", "check", "kv.toml", cwd=tmp_path).stdout
    where = run(clean.bare / "bin" / "python", "-c", "import asynccache; print(asynccache.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(clean.bare))


@pytest.mark.slow
def test_entry_points_work_from_the_wheel(clean: Clean) -> None:
    folder = clean.lent.parent
    code = ("import asynccache_backends, asynccache_shim, asynccache.cli.session as s; print(s.__file__)\n"
            "from asynccache.storage import backend_class\n"
            "import sys\nfor name in ('file', 'memory'):\n"
            "    print(sys.modules[backend_class(name).__module__].__file__)")
    files = run(clean.lent / "bin" / "python", "-c", code, cwd=folder).stdout.split()
    assert len(files) == 3
    assert all(file.startswith(str(clean.lent)) for file in files)


def stressed(tool: Path, folder: Path) -> dict[str, Any]:
    """The report of a run on a file store, which was right."""
    done = run(tool, "stress", "--requests", "10", "--rate", "0", "--quiet", "--json", "-",
               "--storage", f"file:{folder}/kv?capacity=256MiB", cwd=folder)  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["ok"], report["served"]) == (True, 10)
    return report


@pytest.mark.slow
def test_a_run_on_a_file_store_from_the_wheel_verifies_every_page(clean: Clean, tmp_path: Path) -> None:
    tool = clean.lent / "bin" / "asynccache"
    assert stressed(tool, tmp_path)["verify"]["pages"] > 0
    stat = run(tool, "store", "stat", f"file:{tmp_path}/kv", "--json", "-", cwd=tmp_path)
    assert json.loads(stat.stdout)["pages"] > 0


@pytest.mark.slow(60)
def test_the_compiled_wheel_is_for_this_interpreter_and_runs_what_it_has(compiled_clean: Clean, tmp_path: Path) -> None:
    tool = compiled_clean.lent / "bin" / "asynccache"
    (wheel,) = (compiled_clean.bare.parents[1] / "wheel").glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"asynccache-[\d.]+-{version}-{version}-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"asynccache/core/world.py", "asynccache/compiled.py"} <= set(names)
    said = f"asynccache {asynccache.__version__}, {{}} core\n".format
    assert run(tool, "--version", cwd=tmp_path).stdout == said("compiled")
    assert run(tool, "--version", cwd=tmp_path, environment={"ASYNCCACHE_PURE": "1"}).stdout == said("pure")
    assert run(compiled_clean.bare / "bin" / "asynccache", "--version", cwd=tmp_path).stdout == said("compiled")
    assert stressed(tool, tmp_path)["core"] == "compiled"


def run_tests(clean: Clean, folder: Path, *tests: str) -> str:
    """Run tests of the core on what is installed: with no source of ours but theirs on the path."""
    for name in ("tests", "benchmarks"):  # tests of the core share shapes of trees with benchmarks
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return run(clean.lent / "bin" / "python", "-m", "pytest", "-q", "--core", "compiled", *tests, cwd=folder).stdout


@pytest.mark.slow(10)
def test_what_a_compiler_could_change_holds_in_the_wheel(compiled_clean: Clean, tmp_path: Path) -> None:
    assert " passed" in run_tests(compiled_clean, tmp_path, "tests/core/test_core_compiled.py")


@pytest.mark.soak
def test_the_tests_of_the_core_pass_in_the_wheel(compiled_clean: Clean, tmp_path: Path) -> None:
    assert " passed" in run_tests(compiled_clean, tmp_path, "tests/core")


TYPED = """\
from asynccache import AsyncCache, CacheConfig, Full, load_config
from asynccache_backends.memory import MemoryBackend

config: CacheConfig = load_config("kv.toml", page_size=32)

async def serve(cache: AsyncCache) -> int:
    async with cache.lease([1, 2, 3], new_tokens=4) as lease:
        reveal_type(lease.cached)
        return lease.cached
"""


@pytest.mark.slow
def test_type_checkers_see_through_the_names_that_are_loaded_late(clean: Clean, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    check = (sys.executable, "-m", "mypy", "--strict", "--python-executable", clean.bare / "bin" / "python",
             "--config-file=", "--cache-dir", tmp_path / "mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    said = run(*check, "typed.py", cwd=tmp_path)
    assert 'Revealed type is "int"' in said.stdout.replace("builtins.", "")
    (tmp_path / "wrong.py").write_text(TYPED.replace("config: CacheConfig", "config: int"))
    said = run(*check, "wrong.py", cwd=tmp_path, check=False)
    assert 'has type "CacheConfig", variable has type "int"' in said.stdout.replace("asynccache.config.", "")
