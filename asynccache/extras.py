"""The packages that the optional parts of asynccache need, and the command that installs them.

The command names the packages themselves. ``pip install 'asynccache[events]'`` would look for asynccache, too, and is
no help in a clone that is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

BRINGS: Mapping[str, tuple[str, ...]] = {
    "cli": ("rich>=13.7", "argcomplete>=3.3"),
    "hf": ("transformers>=5.23",),
    "events": ("pyzmq>=26",),
    "metrics": ("prometheus-client>=0.20", "uvicorn>=0.34"),
    "redis": ("redis>=8",),
    "object": ("obstore>=0.6",),
    "mooncake": ("mooncake-transfer-engine-non-cuda>=0.3.13",),
    "cuda12": ("cupy-cuda12x>=14.0", "nvidia-cuda-nvrtc-cu12"),
    "cuda13": ("cupy-cuda13x>=14.0", "nvidia-cuda-nvrtc>=13,<14"),
}
"""The packages of the extras that errors tell how to install, by extra, as in ``pyproject.toml``."""


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """Return the command that installs what ``extra`` needs, in a clone or beside an installed asynccache."""
    return "pip install " + " ".join(f"'{package}'" for package in BRINGS[extra])


TORCH = ("pip install 'torch>=2.4' --index-url https://download.pytorch.org/whl/cpu (0.8 GB on the disk; without "
         "--index-url, CUDA's build, which is 5 GB)")
"""The command that installs torch. It is a dependency, but plans, stores, settings and events do without it."""


def without_torch(error: ModuleNotFoundError) -> str:
    """Return the message for an import that failed: the error's own, and how to install torch if that is missing."""
    return f"{error}; {TORCH}" if error.name == "torch" else str(error)
