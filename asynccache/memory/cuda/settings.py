"""The settings of a CUDA device that can be chosen by hand, in its name (``cuda:0?blocks=16``) or in ``open_device``.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from asynccache.errors import ConfigError
from asynccache.settings import Amount, Settings

KERNEL_LOADS_BELOW = 32 << 10
"""The default of ``CudaSettings.kernel_loads_below``, in bytes. The driver and a copy engine take between half and one
microsecond for each descriptor. In that time a bus of 50 GB/s moves 25 to 50 KB: shorter pieces leave the bus waiting
for descriptors, longer ones do not."""


class CudaSettings(Settings, frozen=True, kw_only=True):
    """The settings of one device."""

    kernel_loads_below: Amount = KERNEL_LOADS_BELOW
    """Pieces shorter than this, in bytes, are loaded by the kernel, all others by the copy engines; 0: the kernel loads
    none. It holds for copies within the device, too."""
    kernel_backups_below: Amount = 0
    """The same for backups. The kernel makes none unless it is told to: in another cache such kernels, which write to
    the host, made FlashAttention 3 beside them access illegal memory, and nobody knows why."""
    blocks: Annotated[int, Meta(ge=1, le=1024)] = 8
    """How many blocks, of 1,024 threads each, the kernel may take from the engine's own work."""


def settings_from(options: Mapping[str, str]) -> CudaSettings:
    """Return the settings in ``options``, the options of a device's name. All values are whole numbers.

    Raises:
        ConfigError: a value is no such number, or out of bounds; the message names the option.
    """
    for name, value in options.items():
        if not value.isdecimal():
            raise ConfigError(f"device option {name}={value!r} must be a number from 0 on")
    return CudaSettings(**{name: int(value) for name, value in options.items()})
