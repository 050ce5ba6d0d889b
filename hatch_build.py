"""The compiled core: ``python hatch_build.py`` builds it in place, and hatchling builds it into a wheel.

mypyc turns the modules of ``asynccache.core``, and a few besides, into C as they stand, and the C compiler that Python
itself was made with turns that into extension modules; see ``asynccache.compiled`` for which these are and when they
run. Nothing is built as long as the source, mypyc and this file are the same. Otherwise mypyc writes all C files again,
and those that have changed are compiled.

With ASYNCCACHE_COMPILE=1 a wheel has the compiled core, and its tag says for which interpreter. Otherwise a wheel has
only the source, for every interpreter.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:                                    # make compiled needs no hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
CACHE = ROOT / "build" / "compiled"
"""The folder of the object files that a build leaves for the next one; each kind of interpreter has its own in it."""
SWITCH = "ASYNCCACHE_COMPILE"
OPEN_CLASSES = {"eviction.py": ("EvictionPolicy",)}
"""Classes that others may write subclasses of, in Python."""
FIXES = {"bytes_ops.c": ("slice_len = endn - startn;", "slice_len = endn > startn ? endn - startn : 0;")}
"""Corrections of mypyc's own C, by file: the text there, and the text that replaces it. Without this one, a slice of
bytes that ends before it begins raises SystemError; it must be empty."""
LIBRARY = "asynccache.core.all"
HEADERS = os.path.join("c", *LIBRARY.split(".")[:-1])
"""The folder into which mypyc puts the library's headers. Without it the C files do not find them."""
NEEDS = ("mypy[mypyc]>=1.18", "setuptools>=70")
FLAGS = ("-O2", "-g0", "-w")
GENERATE = """\
import json, sys
from mypyc.build import mypycify
made = mypycify(["--strict", "--no-incremental", *json.loads(sys.argv[1])], multi_file=True, target_dir=sys.argv[2],
                group_name=sys.argv[3], opt_level="2", debug_level="0")
print("\\n" + json.dumps([[one.name, one.sources, one.include_dirs] for one in made]))
"""


class CannotBuild(Exception):
    """The build failed; the message says why, in a sentence."""


class NothingToBuildWith(CannotBuild):
    """A compiler is missing, so nothing was tried: the failure says nothing of the core."""


def compiled() -> ModuleType:
    """Return the module ``asynccache.compiled`` of this folder, without importing asynccache."""
    spec = spec_from_file_location("asynccache_compiled", ROOT / "asynccache" / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules() -> list[str]:
    """Return the names of the modules that are compiled."""
    paths = (ROOT / "asynccache" / "core").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return sorted({*names.difference(compiled().PURE_MODULES), *compiled().ALSO})


def build() -> Path:
    """Build what is not built yet, and return the folder with the extension modules. The folder is complete, or as it
    was before. One process builds at a time.

    Raises:
        CannotBuild: there is no mypyc or no C compiler, or one of them refused.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)               # until the file is closed
        return _build()


def _build() -> Path:
    here, names = compiled(), modules()
    folder = Path(here.FOLDER)
    stated, built_by = f"{here.digest([*names, *here.BESIDE])}\n{' '.join(names)}\n", _builder()
    if _text(folder / here.SOURCE) == stated and _text(folder / "builder") == built_by:
        return folder
    folder.parent.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
    try:
        made = work / "made"
        made.mkdir()
        _compile(_generated(work, names), work, made, here.SUFFIX)
        (made / here.SOURCE).write_text(stated)
        (made / "builder").write_text(built_by)
        if folder.exists():
            folder.rename(work / "old")                # goes with the rest of ``work``
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _builder() -> str:
    """Return what a build depends on besides the core: the version of mypyc, and this file.

    Raises:
        NothingToBuildWith: mypyc, setuptools, the C compiler or Python's headers are missing.
    """
    try:
        import mypyc.build  # noqa: F401
        import setuptools  # type: ignore[import-untyped]  # noqa: F401
        from mypy.version import __version__ as version
    except ImportError as error:
        raise NothingToBuildWith(f"mypyc and setuptools are needed, and {error.name} is not installed: "
                                 f"pip install {shlex.join(NEEDS)}") from None
    compiler = _compiler()[0]
    if shutil.which(compiler) is None:
        raise NothingToBuildWith(f"there is no C compiler: {compiler} is not on the path; "
                                 "apt-get install gcc libc6-dev")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        raise NothingToBuildWith("Python's headers are not installed; apt-get install python3-dev")
    told = sha256(Path(__file__).read_bytes())
    return f"mypyc {version}, {told.hexdigest()}\n"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "").strip() or sysconfig.get_config_vars()["CC"])


def _generated(work: Path, names: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Have mypyc write the C files. Return the extension modules to make, each with its C files and folders of headers,
    relative to ``work``.

    mypyc sees what is compiled and what that imports, and nothing else of asynccache: that takes a tenth of the time.
    """
    package = work / "asynccache"
    package.mkdir()
    (package / "__init__.py").touch()
    here = compiled()
    for name in (*here.ALSO, *here.BENEATH):
        target = Path(here.source_of(name, str(package)))
        target.parent.mkdir(exist_ok=True)
        (target.parent / "__init__.py").touch()
        shutil.copy(here.source_of(name), target)
    shutil.copytree(ROOT / "asynccache" / "core", package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    for name, classes in OPEN_CLASSES.items():
        path = package / "core" / name
        path.write_text(_opened(path.read_text(), classes))
    paths = [os.path.relpath(here.source_of(name, str(package)), work) for name in names]
    done = subprocess.run([sys.executable, "-c", GENERATE, json.dumps(paths), "c", LIBRARY], cwd=work,
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "warning:" not in line]
        raise CannotBuild("mypyc refuses the core: " + (said[-1] if said else f"exit status {done.returncode}"))
    for name, (wrong, right) in FIXES.items():
        path = work / "c" / name
        path.write_text(path.read_text().replace(wrong, right))
    made: list[tuple[str, list[str], list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return made


def _opened(text: str, classes: Sequence[str]) -> str:
    """Return the source ``text`` with a mark at each of these classes. Every line stays where it was, since errors name
    lines."""
    start = "from __future__ import annotations\n\n"
    marked = text.replace(start, "from __future__ import annotations; from typing import TYPE_CHECKING\n"
                                 "if TYPE_CHECKING: from mypy_extensions import mypyc_attr\n", 1)  # fmt: skip
    for name in classes:
        before, mark = marked, "@mypyc_attr(allow_interpreted_subclasses=True)"
        marked = marked.replace(f"\n\nclass {name}:", f"\n{mark}\nclass {name}:", 1)
        assert marked != before, f"{name} is not where it was"
    assert marked.count("\n") == text.count("\n")
    return marked


def _compile(extensions: Sequence[tuple[str, list[str], list[str]]], work: Path, made: Path, suffix: str) -> None:
    """Make every extension module. C files are compiled at the same time, one for each CPU core."""
    headers = sha256()
    for path in sorted((work / "c").rglob("*.h")):
        headers.update(path.read_bytes())
    variables: dict[str, Any] = sysconfig.get_config_vars()
    command = [*_compiler(), *shlex.split(variables["CFLAGS"]), *shlex.split(variables["CCSHARED"]), *FLAGS,
               f"-I{sysconfig.get_path('include')}"]  # fmt: skip
    link = shlex.split(variables["LDSHARED"])
    kept = CACHE / str(variables["SOABI"])
    kept.mkdir(exist_ok=True)

    def compile_one(source: str, folders: Sequence[str]) -> Path:
        told = headers.copy()
        told.update("\0".join([*command, *folders]).encode() + (work / source).read_bytes())
        target = kept / f"{told.hexdigest()[:32]}.o"
        if not target.exists():
            new = kept / f"{target.stem}.{os.getpid()}.new"
            _run([*command, *(f"-I{folder}" for folder in folders), "-c", source, "-o", str(new)], work)
            new.rename(target)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        jobs = {
            (name, source): threads.submit(compile_one, source, [*folders, "c", os.path.dirname(source), HEADERS])
            for name, sources, folders in extensions
            for source in sorted(sources, key=lambda source: -(work / source).stat().st_size)
        }  # fmt: skip
        for name, sources, _ in extensions:
            objects = [str(jobs[name, source].result()) for source in sources]
            target = made / (name.removesuffix(".__init__") + suffix)
            _run([*link, *objects, "-o", str(target)], work)
    used = {str(job.result()) for job in jobs.values()}
    for path in kept.glob("*.o"):
        if str(path) not in used:
            path.unlink()


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:                           # the linker is named by Python, not by CC
        raise NothingToBuildWith(f"there is no linker: {command[0]}: {error.strerror}") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-300:].strip())
        raise CannotBuild(f"{command[0]} failed with status {done.returncode}: {said}")


class CompiledCore(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that hatchling calls when it builds a wheel."""

    PLUGIN_NAME = "custom"

    def wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(SWITCH, "0") not in ("", "0")

    def dependencies(self) -> list[str]:
        return list(NEEDS) if self.wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self.wanted() or version == "editable":
            return
        try:
            folder = build()
        except CannotBuild as error:
            self.app.abort(f"the core cannot be compiled: {error}. Without {SWITCH} the wheel has the pure one.")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(folder)] = str(folder.relative_to(ROOT))


def main() -> int:
    """Build in place, and return the exit status: 2 where there is nothing to build with, 1 where the build failed."""
    try:
        folder = build()
    except CannotBuild as error:
        print(f"the core was not compiled: {error}. The pure one works as before.", file=sys.stderr)
        return 2 if isinstance(error, NothingToBuildWith) else 1
    print(f"the compiled core is in {folder.relative_to(ROOT)}; ASYNCCACHE_PURE=1 runs the pure one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
