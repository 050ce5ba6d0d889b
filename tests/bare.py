"""A bare machine: ``python -m tests.bare`` runs ``PARTS``, the tests that start programs, as on a machine that has only
Python, make and what every Linux has, whatever is installed here. ``.ci/run`` begins with it. Options are pytest's.

PATH leads to a folder of links to ``PROGRAMS``, and the loader finds ``LIBRARIES`` of no bytes before any others. So
both are missing in every process that a test starts, too, and nobody has to be root. What lies beside the interpreter,
such as ``moto_server``, came with Python's packages, and stays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.stores.mooncake_server import LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (
    "make", "sh", "bash", "sed", "grep", "find",
    "setsid", "mount", "umount", "getconf",            # of util-linux, and of the C library
    "basename", "cat", "chmod", "cp", "cut", "date", "dirname", "env", "expr", "false", "head", "id", "kill", "ln",
    "ls", "mkdir", "mktemp", "mv", "nice", "nproc", "rm", "rmdir", "seq", "sleep", "sort", "tail", "tee", "timeout",
    "touch", "tr", "true", "uname", "uniq", "wc",
)  # fmt: skip
PARTS = (
    "tests/stores", "tests/vllm", "tests/sglang", "tests/docs/test_docs_blocks.py::test_commands_run",
    "tests/metrics/test_metrics_dashboard.py", "tests/cli/test_cli_html_report.py",
    "tests/cli/test_cli_engine_doctor.py", "tests/examples/test_example_host.py",
    "tests/cuda/test_cuda_kernel_on_cpu.py", "tests/packaging/test_release.py", "tests/packaging/test_compiled.py",
    "tests/engine/test_engine_loads.py::test_processes_that_serve_at_the_same_time_share_one_store",
)  # fmt: skip
LEFT_OUT = (
    "test_required.py", "test_faults.py::test_nothing_goes_wrong_while_a_store_fails",
    "test_faults.py::test_a_fault_costs_calls_and_nothing_else",
)  # fmt: skip
"""Of ``tests/stores``: the file that does the same, and tests that take long and need no program but Python."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a bare machine, on which no store is required. What it needs is put into ``folder``."""
    programs, libraries = folder / "programs", folder / "libraries"
    programs.mkdir()
    libraries.mkdir()
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            (programs / name).symlink_to(path)
    for name in LIBRARIES:
        (libraries / name).touch()
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ASYNCCACHE_STORES", "CC")}
    found = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {**kept, "PATH": str(programs), "LD_LIBRARY_PATH": found}


def command(parts: Sequence[str], options: Sequence[str]) -> list[str]:
    """What runs the tests of ``parts``."""
    left_out = [f"--deselect=tests/stores/{name}" for name in LEFT_OUT]
    return [sys.executable, "-m", "pytest", "-q", "-m", "not soak", *left_out, *options, *parts]


def main() -> int:
    """The status of pytest."""
    with tempfile.TemporaryDirectory(prefix="asynccache-bare-") as folder:
        words = command(PARTS, sys.argv[1:])
        return subprocess.run(words, cwd=ROOT, env=environment(Path(folder)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
