"""Which weights a model has: a digest of its files, for namespaces of stored pages.

KV that was computed with other weights is wrong, whatever the model is called. So a namespace of stored pages names
the weights by what their files contain, not by their folder's name.

The files are read whole, several at a time, once: digests are remembered in the user's cache folder, by each file's
identity and times, so that only a file that has changed is read again. A file of a Hugging Face cache that is a link to
a blob named by its SHA-256 is not read at all.

A model may be named as on the Hugging Face hub: then its folder is the snapshot in the local cache. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from asynccache import checks
from asynccache.errors import ConfigError

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
CONFIG = "config.json"
READERS = 4
CHUNK = 8 << 20

_SHA256 = re.compile("[0-9a-f]{64}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def weights_digest(
    model: str | os.PathLike[str], *, revision: str | None = None, cache: str | os.PathLike[str] | None = None
) -> str:
    """A digest of a model's weights and of its ``config.json``, as 32 hexadecimal digits. Blocks while it reads.

    Two models have the same digest if files of the same names have the same contents, wherever they lie. Adapters and
    quantization that an engine adds when it loads the weights are not part of it.

    Args:
        model: a folder with weights (``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or ``.gguf`` files), one such file,
            or the name of a model on the Hugging Face hub that is in the local cache already.
        revision: the branch, tag or commit of a model named as on the hub; its main branch if None or empty.
        cache: the folder of the local Hugging Face cache; the user's own (``HF_HUB_CACHE``) if None or empty.

    Raises:
        ConfigError: there are no such weights here, or they cannot be read.
    """
    name = checks.text("model", _path("model", model), empty=False)
    where = _model_path(name, revision, cache)
    try:
        files = [where] if where.is_file() else _files(where)
        if not any(file.suffix in WEIGHTS for file in files):
            raise ConfigError(f"model={name!r}: there are no weights ({', '.join(sorted(WEIGHTS))}) in {where}")
        digests = _digests(files)
    except OSError as error:
        raise ConfigError(f"model={name!r}: its weights cannot be read: {error}") from error
    whole = json.dumps([[file.name, digests[file]] for file in files])
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def _path(name: str, value: object) -> str:
    return checks.text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _model_path(name: str, revision: str | None, cache: str | os.PathLike[str] | None) -> Path:
    """Where the weights of ``name`` lie: that path itself if it exists, else a snapshot in the local cache."""
    revision = None if revision is None else checks.text("revision", revision)
    folder = None if cache is None else _path("cache", cache)
    here = Path(name)
    if os.path.exists(name) or not _HUB_NAME.fullmatch(name):
        return here
    try:
        from huggingface_hub import snapshot_download  # only where a model is named so; the engine that did so has it
    except ImportError:
        raise ConfigError(
            f"model={name!r} is no path, and to look for it in the Hugging Face cache needs huggingface_hub: install "
            f"it, or give the folder"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision or None, cache_dir=folder or None, local_files_only=True))
    except (OSError, ValueError) as error:  # whatever the library raises derives from one of them
        at = "" if not revision else f" at revision {revision!r}"
        raise ConfigError(f"model={name!r} is no path, and is not in the Hugging Face cache{at}: {error}") from error


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS or file.name == CONFIG)


def _digests(files: Iterable[Path]) -> dict[Path, str]:
    remembered = _Remembered()
    identities = {file: _identity(file) for file in files}
    digests = {file: _blob(file) or remembered.digests.get(identity) for file, identity in identities.items()}
    unknown = [file for file, digest in digests.items() if digest is None]
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(unknown, readers.map(_read, unknown), strict=True))
    # A file that was written while it was read is not remembered: its digest is of no file that ever was.
    remembered.add({identities[file]: digest for file, digest in found.items() if _identity(file) == identities[file]})
    return {file: digest or found[file] for file, digest in digests.items()}


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _blob(file: Path) -> str | None:
    """The SHA-256 of a file that lies in a Hugging Face cache, where large files are named so."""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def _read(file: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


class _Remembered:
    """Digests of files that were read before, on this machine. What cannot be read or written is not remembered."""

    def __init__(self) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = Path(home, "asynccache", "weights.json")
        self.digests: dict[str, str] = {}
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path.read_bytes())
            if isinstance(found, dict):
                self.digests = {key: value for key, value in found.items() if isinstance(value, str)}

    def add(self, found: dict[str, str]) -> None:
        if not found:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(self.digests | found, file)
            os.replace(file.name, self._path)
