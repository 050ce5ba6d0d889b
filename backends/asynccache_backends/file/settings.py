"""The options in a file store's URL. Pure functions.

    file:PATH?capacity=10GiB&direct=auto|on|off&segment=64MiB&mode=0700

``capacity`` is how much the segments may take on the disk. ``direct`` is about O_DIRECT: ``auto`` uses it if the folder
allows it, for pages whose length and buffers are aligned to 4 KiB. ``segment`` is the size of a segment file. ``mode``
has the permissions of the folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, structs

from asynccache.errors import ConfigError
from asynccache.settings import Settings
from asynccache.storage import ParsedUrl, Size, StoreLayout
from asynccache_backends.file.files import PRIVATE
from asynccache_backends.file.segments import BLOCK_BYTES, group_bytes

LEAST_SEGMENT = 4 << 20
USUAL_SEGMENT = 128 << 20
FEWEST_SEGMENTS = 32
MOST_SEGMENTS = 128

_MODE = re.compile(r"0?7[0-7]{2}")


def _permissions(name: str, text: str) -> int:
    if _MODE.fullmatch(text) is None:
        wanted = "who may use the folder, in octal as chmod has it and 7 for the owner, as in mode=0750"
        raise ConfigError(f"{name}={text!r}: expected {wanted}")
    return int(text, 8)


class FileSettings(Settings, frozen=True):
    """The settings of a file store. Sizes are in bytes.

    ``mode``: permissions of the folder and, without the bits for execution, of its files; 0: those that the folder has.
    ``used``: whether pages may be stored. If not, the store is only looked at, and must exist.
    """

    folder: Path
    used: bool
    capacity: Size = 10 << 30
    segment: Size = 0
    direct: Literal["auto", "on", "off"] = "auto"
    mode: Annotated[int, Meta(extra={"parse": _permissions})] = 0


def settings_of(url: ParsedUrl, layout: StoreLayout) -> FileSettings:
    """Return the settings in ``url``. If the layout has no pools, the store is only looked at.

    Raises:
        ConfigError: an option is unknown or unusable, no folder is named, or the capacity does not hold three segments
            of at least one page each.
    """
    if not url.path or "\0" in url.path:
        raise ConfigError(f"storage={str(url)!r} names no folder")
    found = url.settings(FileSettings, folder=Path(url.path), used=layout.largest > 0)
    capacity, segment = found.capacity, found.segment
    least = group_bytes(layout.largest or 1, 1) + BLOCK_BYTES  # a page, and the footer
    if "segment" not in url.options:
        segment = max(least, usual_segment(capacity))
    if segment % BLOCK_BYTES or segment < least:
        raise ConfigError(f"storage option segment={segment} must be a multiple of {BLOCK_BYTES}, at least {least}")
    if capacity < 3 * segment:
        raise ConfigError(f"storage option capacity={capacity} is less than three segments of {segment} bytes")
    mode = found.mode or (PRIVATE if found.used else 0)
    return structs.replace(found, segment=segment, mode=mode)


def usual_segment(capacity: int) -> int:
    """Return the size of a segment for this capacity. Small segments are better, since a segment is allocated and
    reclaimed as a whole; but there must not be too many, since each takes two file descriptors."""
    wanted = max(min(capacity // FEWEST_SEGMENTS, USUAL_SEGMENT), capacity // MOST_SEGMENTS)
    return max(wanted, min(LEAST_SEGMENT, capacity // 4)) // BLOCK_BYTES * BLOCK_BYTES
