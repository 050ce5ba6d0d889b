"""Which core runs: the Python source of ``asynccache.core``, or what was compiled from it.

There is one source. ``make compiled`` and a wheel with a compiled core (``hatch_build.py``) put extension modules into
``FOLDER``, one folder for each kind of interpreter, beside the digest of the source that they were made from.

Law: what was compiled runs only if it was made from the very source that lies here, for this interpreter, and
``ASYNCCACHE_PURE`` is not set. Otherwise the source runs. All modules of the core are of the same kind.
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
"""Where the modules for this interpreter lie: each in a file of its full name and ``SUFFIX``."""
PURE_MODULES = ("asynccache.core", "asynccache.core.keys", "asynccache.core.settings")
"""Modules of the core that stay as they are: an empty one; one with a subclass of str, which mypyc has none of; frozen
values that are asked for little, and that could be neither copied nor pickled."""
BENEATH = ("asynccache.checks", "asynccache.errors", "asynccache.redaction")
"""What the core imports of the rest: mypyc looks at their types."""
BESIDE = (*PURE_MODULES, *BENEATH)
"""Modules that stay Python, and whose types what is compiled relies on."""
SOURCE = "source"
"""The file in ``FOLDER`` that has the digest of the source, with ``BESIDE``, and the names of what is compiled."""

CORE = "pure"
"""``"compiled"`` or ``"pure"``."""
WHY = ""
"""Why it is not the compiled one, in a few words; "" where it is."""


def source_of(module: str, package: str = PACKAGE) -> str:
    """The file of a module of asynccache."""
    path = os.path.join(package, *module.split(".")[1:])
    return os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py"


def digest(modules: Iterable[str], package: str = PACKAGE) -> str:
    """What the source of these modules is told by: equal for equal source, wherever it lies.

    Raises:
        OSError: a file cannot be read.
    """
    from hashlib import sha256  # takes some ms, and is not needed where nothing is compiled

    found = sha256()
    for module in sorted(modules):
        with open(source_of(module, package), "rb") as file:
            found.update(f"{module} {os.fstat(file.fileno()).st_size}\n".encode())
            found.update(file.read())
    return found.hexdigest()


class _Finder:
    """Finds the modules that are compiled; for ``sys.meta_path``."""

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
    """Have the modules of the core come from where they should. Called before the first of them is imported."""
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
