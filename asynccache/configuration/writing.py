"""Effective settings as a TOML file that says where each value came from. Secrets are not written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from asynccache.configuration.building import Effective
from asynccache.redaction import shown


def as_toml(values: Iterable[Effective]) -> str:
    """Return the text of the file. It has one line for each setting, with its origin behind it. A setting that is None
    is a comment, since TOML has no such value."""
    lines: list[str] = []
    table: tuple[str, ...] = ()
    for path, value, origin in values:
        if path[:-1] != table:
            table = path[:-1]
            lines += ["", f"[{'.'.join(map(_key, table))}]"]
        written = f"{_key(path[-1])} = {_value(shown(path[-1], value))}"
        lines.append(f"# {_key(path[-1])}: none" if value is None else f"{written:<48} # {origin}")
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else repr(value)
