"""Reads the options of a run from a file (``--config``) and from the environment, and the cache that a file describes.

A file may have the sections ``[stress]`` and ``[replay]``. Beside them it either describes a cache, as
``asynccache.load_config`` reads it, and the run uses that cache. Or it has options at its top, which hold for both
commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from asynccache.config import CacheConfig, Full, Mamba, SlidingWindow
from asynccache.configuration import File, describes_cache, nearest, read_config
from asynccache.errors import ConfigError

SECTIONS = ("stress", "replay")
TABLES = (*SECTIONS, "components", "sidecars", "storage_options")
SHARED = ("page_size", "storage", "write_policy", "prefetch_policy", "eviction", "device")
DESCRIBED = ("components", "window", "bytes_per_token", "layers", "mamba_bytes", "sidecars", "device_tokens",
             "host_tokens", "swa_ratio")

Parse = Callable[[str, object, str], Any]


class Told(NamedTuple):
    """What a file or the environment says: the values of options by field, and a sentence for each wrong option."""

    values: dict[str, Any]
    problems: list[str]


def from_file(file: File, command: str, names: Mapping[str, str], parse: Parse) -> Told:
    """The options of ``command`` in ``file``. ``names``: the field of each option by its name. ``parse(field, value,
    where)`` returns the parsed value or raises a ConfigError that begins with ``where``."""
    told = Told({}, [])
    own = file.table.get(command, {})
    if not isinstance(own, dict):
        return Told({}, [f"{file.origin((command,))}: {command} must be a table"])
    _take(told, ((key, value, file.origin((key,))) for key, value in _at_the_top(file)), command, names, parse)
    _take(told, ((key, value, file.origin((command, key))) for key, value in own.items()), command, names, parse)
    return told


def _at_the_top(file: File) -> Iterator[tuple[str, object]]:
    if not describes_cache(file.table):
        yield from ((key, value) for key, value in file.table.items() if key not in SECTIONS)


def from_environment(env: Mapping[str, str], command: str, names: Mapping[str, str], parse: Parse) -> Told:
    """The options of ``command`` in the environment: ``ASYNCCACHE_STRESS__DURATION=5`` is ``--duration 5``."""
    told, prefix = Told({}, []), f"ASYNCCACHE_{command.upper()}__"
    found = ((name.removeprefix(prefix).lower(), text, f"environment variable {name}")
             for name, text in env.items() if name.startswith(prefix))
    _take(told, ((key, _switch(text), where) for key, text, where in found), command, names, parse)
    return told


def _switch(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


def _take(
    told: Told, given: Iterator[tuple[str, object, str]], command: str, names: Mapping[str, str], parse: Parse
) -> None:
    for key, value, origin in given:
        field = names.get(key.replace("_", "-"))
        if field is None:
            told.problems.append(f"{origin}: {_unknown(command, key, value, names)}")
            continue
        try:
            told.values[field] = parse(field, value, f"{origin}: {key}")
        except ConfigError as error:
            told.problems.append(str(error))


def _unknown(command: str, key: str, value: object, names: Mapping[str, str]) -> str:
    """The sentence about a name that ``command`` does not know. Tables are compared with tables and options with
    options; a setting of a cache is named as such."""
    if isinstance(value, Mapping):
        hint = nearest(key, TABLES)
        return f"there is no table [{key}]; {hint or 'there are ' + ', '.join(f'[{name}]' for name in TABLES)}"
    if key in {field.name for field in fields(CacheConfig)}:
        return f"{key!r} is a setting of a cache, but this file describes no cache: it does not name a model"
    hint = nearest(key.replace("_", "-"), names)
    return f"{command} has no setting {key!r}" + (f"; {hint}" if hint else "")


def cache_of(file: File, env: Mapping[str, str], told: Mapping[str, Any]) -> CacheConfig | None:
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
    names = {Full: "full", SlidingWindow: "swa", Mamba: "mamba"}
    found["components"] = tuple(names[type(component)] for component in config.components)
    for component in config.components:
        if isinstance(component, Full):
            found |= {name: getattr(component, name)
                      for name in ("bytes_per_token", "layers", "device_tokens", "host_tokens")}
        elif isinstance(component, SlidingWindow):
            found["window"] = component.window
        else:
            found["mamba_bytes"] = component.state_bytes
    return found
