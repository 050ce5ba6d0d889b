"""A digest of a model's weights, for the namespaces of stored pages.

KV that was computed with other weights is wrong, whatever the model is called. So a namespace of stored pages names
the weights by what their files contain, not by their folder's name.

The files are read once, from the first byte to the last, several files at a time. Their digests are kept in the user's
cache folder under each file's identity, size and times, so only a file that has changed is read again. In a Hugging
Face cache large files are links to blobs whose names are their SHA-256; those are not read at all.

A model may be named as on the Hugging Face hub. Its folder is the snapshot in the local cache then; nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
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
CONFIGS = frozenset({"config.json", "adapter_config.json"})
READERS = 4
CHUNK = 8 << 20
WORTH_TELLING = 1 << 30

_log = logging.getLogger(__name__)

_SHA256 = re.compile("[0-9a-f]{64}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def weights_digest(
    model: str | os.PathLike[str], *, revision: str | None = None, cache: str | os.PathLike[str] | None = None
) -> str:
    """Return a digest of a model's weights and of the ``config.json`` and the ``adapter_config.json`` (which has the
    scaling of an adapter) in their folder, as 32 hexadecimal digits. It blocks while it reads.

    Two models have the same digest if they have files of the same names with the same contents, wherever these lie.
    What an engine adds when it loads the weights, such as adapters or quantization, is not in the digest.

    Args:
        model: a folder with weights (``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or ``.gguf`` files); one such file,
            and then no other file is read; or the name on the Hugging Face hub of a model that is in the local cache
            already.
        revision: the branch, tag or commit of a model that is named as on the hub; None or "" is its main branch.
        cache: the folder of the local Hugging Face cache; None or "" is the user's own (``HF_HUB_CACHE``).

    Raises:
        ConfigError: there are no such weights here, or they cannot be read.
    """
    name = checks.text("model", _path("model", model), empty=False)
    where = _model_path(name, revision, cache)
    try:
        files = [where]
        if not where.is_file():
            files = sorted(file for file in where.iterdir() if file.suffix in WEIGHTS or file.name in CONFIGS)
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
    """Return where the weights of ``name`` lie: that path itself if it exists, else a snapshot in the local cache."""
    revision = None if revision is None else checks.text("revision", revision)
    folder = None if cache is None else _path("cache", cache)
    here = Path(name)
    if os.path.exists(name) or not _HUB_NAME.fullmatch(name):
        return here
    try:
        from huggingface_hub import snapshot_download  # an optional package, needed for names of the hub only
    except ImportError:
        raise ConfigError(
            f"model={name!r} is no path, and to look for it in the Hugging Face cache needs huggingface_hub: install "
            f"it, or give the folder"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision or None, cache_dir=folder or None, local_files_only=True))
    except (OSError, ValueError) as error:  # all that the library raises derives from one of them
        at = "" if not revision else f" at revision {revision!r}"
        raise ConfigError(f"model={name!r} is no path, and is not in the Hugging Face cache{at}: {error}") from error


def _digests(files: Iterable[Path]) -> dict[Path, str]:
    """Return each file's digest. Those that were worked out before on this machine are in a file of the user's cache
    folder. If that cannot be read or written, nothing is remembered."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "asynccache", "weights.json")
    remembered: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads(path.read_bytes())
        if isinstance(kept, dict):
            remembered = {key: value for key, value in kept.items() if isinstance(value, str)}
    identities = {file: _identity(file) for file in files}
    digests = {file: _blob(file) or remembered.get(identity) for file, identity in identities.items()}
    unknown = [file for file, digest in digests.items() if digest is None]
    if (size := sum(file.stat().st_size for file in unknown)) >= WORTH_TELLING:
        _log.info("asynccache: %.1f GiB of weights are read for their digest, once on this machine", size / (1 << 30))
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(unknown, readers.map(_read, unknown), strict=True))
    # The digest of a file that was written while it was read is not kept: no file ever had these contents.
    fresh = {identities[file]: digest for file, digest in found.items() if _identity(file) == identities[file]}
    if fresh:
        with suppress(OSError):
            _write(path, json.dumps(remembered | fresh))
    return {file: digest or found[file] for file, digest in digests.items()}


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _blob(file: Path) -> str | None:
    """Return the SHA-256 of a file in a Hugging Face cache, where it is the name of every large file; None for other
    files."""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def _read(file: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        made = Path(file.name)
    try:
        made.write_text(text, "utf-8")
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
