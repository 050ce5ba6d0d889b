"""Reads the options of a run from a file (``--config``) and from the environment, and the cache that a file describes.

A file may have the sections ``[stress]`` and ``[replay]``. Beside them it either describes a cache, as
``asynccache.load_config`` reads it, and the run uses that cache. Or it has options at its top, which hold for both
commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from asynccache.config import CacheConfig, Full, SlidingWindow
from asynccache.configuration import SettingsFile, describes_cache, nearest, read_config
from asynccache.configuration.settings import CACHE
from asynccache.configuration.settings import TABLES as CACHE_TABLES
from asynccache.errors import ConfigError

SECTIONS = ("stress", "replay")
TABLES = (*SECTIONS, *CACHE_TABLES)
SHARED = ("page_size", "storage", "write_policy", "prefetch_policy", "eviction", "device")
"""The options that a described cache has as settings of the same names."""
DESCRIBED = ("components", "window", "bytes_per_token", "layers", "mamba_bytes", "sidecars", "device_tokens",
             "host_tokens", "swa_ratio")

Parse = Callable[[str, object, str], Any]


class Said(NamedTuple):
    """One option in a file or in the environment: its parsed value, the value as it was written, and where."""

    value: Any
    written: Any
    origin: str


class Told(NamedTuple):
    """What a file and the environment say: the options by field, and a sentence for each wrong one."""

    values: dict[str, Said]
    problems: list[str]


def told(
    command: str, file: SettingsFile | None, env: Mapping[str, str], names: Mapping[str, str], parse: Parse
) -> Told:
    """Return the options of ``command`` in ``file`` and in the environment, which wins: there
    ``ASYNCCACHE_STRESS__DURATION=5`` is ``--duration 5``.

    ``names``: the field of each option by its name. ``parse(field, value, where)`` returns the parsed value or raises a
    ConfigError that begins with ``where``.
    """
    found = Told({}, [])
    for key, written, origin in _written(command, file, env):
        field = names.get(key.replace("_", "-"))
        try:
            if field is None:
                raise ConfigError(f"{origin}: {_unknown(command, key, written, names)}")
            found.values[field] = Said(parse(field, written, f"{origin}: {key}"), written, origin)
        except ConfigError as error:
            found.problems.append(str(error))
    return found


def _written(command: str, file: SettingsFile | None, env: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield the key, the value and the place of each option; of those with the same key the last one wins."""
    if file is not None:
        own = file.table.get(command, {})
        if not isinstance(own, dict):
            raise ConfigError(f"{file.origin((command,))}: {command} must be a table")
        if not describes_cache(file.table):
            yield from ((key, value, file.origin((key,))) for key, value in file.table.items() if key not in SECTIONS)
        yield from ((key, value, file.origin((command, key))) for key, value in own.items())
    prefix = f"ASYNCCACHE_{command.upper()}__"
    for name, text in env.items():
        if name.startswith(prefix):
            switch = {"true": True, "false": False}.get(text.lower(), text)
            yield name.removeprefix(prefix).lower(), switch, f"environment variable {name}"


def _unknown(command: str, key: str, value: object, names: Mapping[str, str]) -> str:
    """The sentence about a name that ``command`` does not know. Tables are compared with tables and options with
    options; a setting of a cache is named as such."""
    if isinstance(value, Mapping):
        hint = nearest(key, TABLES)
        return f"there is no table [{key}]; {hint or 'there are ' + ', '.join(f'[{name}]' for name in TABLES)}"
    if key in CACHE:
        return f"{key!r} is a setting of a cache, but this file describes no cache: it does not name a model"
    hint = nearest(key.replace("_", "-"), names)
    return f"{command} has no setting {key!r}" + (f"; {hint}" if hint else "")


def cache_of(file: SettingsFile, env: Mapping[str, str], told: Mapping[str, Any]) -> CacheConfig | None:
    """The cache that ``file`` describes; None if it describes none. ``told``: the run's options, which win over the
    file where a cache has the same setting.

    Raises:
        ConfigError: the cache cannot be used, or ``told`` has an option that only the file may decide.
    """
    if not describes_cache(file.table):
        return None
    for field in DESCRIBED:
        if field in told:
            raise ConfigError(f"--{field.replace('_', '-')}={told[field]}: {file.name} describes the components; "
                              "change them there or by environment variables")
    loaded = read_config(file, env=env, **{field: told[field] for field in SHARED if field in told})
    if loaded.config is None:
        raise ConfigError("\n".join(map(str, loaded.problems)))
    return loaded.config


def options_of(config: CacheConfig) -> dict[str, Any]:
    """The values that the run's options would have for the cache ``config``, as far as options can describe it."""
    found: dict[str, Any] = {field: getattr(config, field) for field in SHARED}
    found["components"] = tuple(component.pool for component in config.components)
    for component in config.components:
        if isinstance(component, Full):
            found |= {name: getattr(component, name)
                      for name in ("bytes_per_token", "layers", "device_tokens", "host_tokens")}
        elif isinstance(component, SlidingWindow):
            found["window"] = component.window
        else:
            found["mamba_bytes"] = component.state_bytes
    return found
