"""``make test-gpu`` on a machine that has torch and cupy and no package index: what is missing is a sentence, and no
test that needs the GPU skips silently."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
PYTHONPATH = os.pathsep.join(filter(None, sys.path))


def run_of(folder: Path) -> subprocess.CompletedProcess[str]:
    """``make test-gpu`` on this interpreter, with the wheels of ``folder``."""
    return done("make", "test-gpu", "VENV=", f"PYTHON={sys.executable}", f"WHEELS={folder}", f"GPU_SITE={folder}/site",
                PIP_NO_INDEX="1")  # fmt: skip


def done(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


@WITHOUT
@pytest.mark.slow(4)
@pytest.mark.parametrize(("required", "status", "says"), [
    ("", 0, "1 skipped"), ("required", 1, "ASYNCCACHE_GPU=required, and yet: needs a GPU: "),
])
def test_a_gpu_test_without_a_gpu_fails_where_the_gpu_is_required(required: str, status: int, says: str) -> None:
    ran = done(sys.executable, "-m", "pytest", "-q", "-p", "pytest_asyncio.plugin", "tests/cuda/test_cuda_gpu.py", "-k",
               "thousands", PYTHONPATH=PYTHONPATH, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", ASYNCCACHE_GPU=required)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert says in ran.stdout


def test_a_warning_of_cupys_import_does_not_make_the_gpu_tests_skip(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "import warnings\nwarnings.warn('numpy is newer than we know')\n__version__ = '14.2.0'\n"
        "class cuda:\n    class runtime:\n        driverGetVersion = getDeviceCount = runtimeGetVersion = int\n"
    )
    ran = done(sys.executable, "-W", "error", "-c", "from tests.cuda.gpu import MISSING; print(MISSING)",
               PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHONPATH}")  # fmt: skip
    assert ran.stdout == "there is no NVIDIA driver on this machine\n", ran.stderr


def test_without_wheels_the_run_says_what_brings_them(tmp_path: Path) -> None:
    ran = run_of(tmp_path)
    assert ran.returncode != 0
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"there are no wheels in {tmp_path}; " in ran.stderr
    assert f"make test-gpu-wheels PYTHON_VERSION={version} brings them" in ran.stderr


@WITHOUT
@pytest.mark.slow(6)
def test_the_run_unpacks_its_wheels_without_an_index_and_ends_where_doctor_sees_no_gpu(tmp_path: Path) -> None:
    info = "brought-1.dist-info"
    with zipfile.ZipFile(tmp_path / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"brought.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    ran = run_of(tmp_path)
    assert ran.returncode != 0
    assert (tmp_path / "site" / "brought.py").exists(), ran.stderr
    assert "No GPU can be used here: " in ran.stdout
    assert "test-gpu ends here: " in ran.stderr
    assert "-m pytest" not in ran.stdout


@pytest.mark.parametrize("goals", [["check"], [], ["test-gpu", "clean"]])
def test_nothing_but_test_gpu_runs_without_a_virtual_environment(goals: list[str]) -> None:
    ran = done("make", "-n", *goals, "VENV=")
    assert ran.returncode == 2
    assert "VENV= (no virtual environment) is for make test-gpu alone" in ran.stderr
