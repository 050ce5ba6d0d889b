"""The choice of the core that runs: the Python source of ``asynccache.core``, or extension modules compiled from it.

``make compiled`` and a wheel with a compiled core (``hatch_build.py``) put the extension modules into ``FOLDER``. There
is one such folder for each kind of interpreter, and each has a file with the digest of the source it was compiled from.

The compiled core runs only if it was made for this interpreter and from the very source that is installed here,
and ``ASYNCCACHE_PURE`` is not set. Otherwise the source runs. Compiled and pure modules of the core are never mixed,
except for ``PURE_MODULES``, which are never compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

PACKAGE = os.path.dirname(os.path.abspath(__file__))
SUFFIX = EXTENSION_SUFFIXES[0]
FOLDER = os.path.join(PACKAGE, "_compiled", SUFFIX.strip(".").rpartition(".")[0])
"""The folder of the extension modules for this interpreter. Each is a file named by the module's full name and
``SUFFIX``."""
PURE_MODULES = ("asynccache.core", "asynccache.core.keys", "asynccache.core.settings")
"""Modules of the core that are not compiled. The first is empty. ``keys`` has a subclass of str, which mypyc does not
support. ``settings`` has frozen values that are seldom used; compiled, they could be neither copied nor pickled."""
ALSO = ("asynccache.runtime.driver",)
"""Modules outside the core that are compiled with it. They are on the way of every request, and nothing in them
waits."""
BENEATH = ("asynccache.checks", "asynccache.errors", "asynccache.redaction")
"""Modules of asynccache that the compiled ones import and that are not compiled. mypyc reads the types in these
modules."""
BESIDE = (*PURE_MODULES, *BENEATH)
"""Modules that are not compiled and on whose types the compiled ones rely, so that the digest covers them."""
SOURCE = "source"
"""The file in ``FOLDER`` with the digest of the source (of the compiled modules and ``BESIDE``), followed by the names
of the compiled modules."""

CORE = "pure"
"""The core that runs: ``"compiled"`` or ``"pure"``."""
WHY = ""
"""Why the compiled core does not run, in a few words; "" if it does."""


def source_of(module: str, package: str = PACKAGE) -> str:
    """Return the path of the source file of a module of asynccache, given its full name."""
    path = os.path.join(package, *module.split(".")[1:])
    return os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py"


def digest(modules: Iterable[str], package: str = PACKAGE) -> str:
    """Return a digest of the source of these modules. It is the same for the same source, wherever that lies.

    Raises:
        OSError: a file cannot be read.
    """
    from hashlib import sha256  # importing it takes some ms, and it is not needed where nothing is compiled

    found = sha256()
    for module in sorted(modules):
        with open(source_of(module, package), "rb") as file:
            found.update(f"{module} {os.fstat(file.fileno()).st_size}\n".encode())
            found.update(file.read())
    return found.hexdigest()


class _Finder:
    """A finder for ``sys.meta_path`` that finds the compiled modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        file = os.path.join(FOLDER, name + SUFFIX)
        source = source_of(name)
        inside = [os.path.dirname(source)] if source.endswith("__init__.py") else None
        return spec_from_file_location(
            name, file, loader=ExtensionFileLoader(name, file), submodule_search_locations=inside
        )


def choose() -> None:
    """Decide which core runs, and set ``CORE`` and ``WHY``. If it is the compiled one, imports of its modules find the
    extension modules from now on. To be called before the first module of the core is imported."""
    global CORE, WHY
    CORE = "pure"
    if os.environ.get("ASYNCCACHE_PURE", "0") not in ("", "0"):
        WHY = "ASYNCCACHE_PURE is set"
        return
    try:
        with open(os.path.join(FOLDER, SOURCE)) as file:
            made_from, *modules = file.read().split()
    except (OSError, ValueError):
        WHY = "none is compiled for this interpreter"
        return
    try:
        there = {name.removesuffix(SUFFIX) for name in os.listdir(FOLDER)}
        same = digest([*modules, *BESIDE]) == made_from
    except OSError:
        there, same = set(), False
    library = next((name for name in there if name.endswith("__mypyc")), "")
    if not same or not library or not there.issuperset(modules):
        WHY = "what was compiled was made from another source: make compiled"
        return
    sys.meta_path.insert(0, _Finder([*modules, library]))
    CORE, WHY = "compiled", ""
