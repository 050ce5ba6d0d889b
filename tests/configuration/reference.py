"""The reference of all settings as Markdown, made from their declarations.

``python -m tests.configuration.reference`` writes it into docs/configuration.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path as FilePath

import msgspec

from asynccache.config import COMPONENTS, CacheConfig, Sidecar, eviction_policies
from asynccache.configuration import CACHE, PREFIX, SIDECAR
from asynccache.settings import Field, Settings, fields_of

BEGIN = "<!-- written by: python -m tests.configuration.reference -->"
END = "<!-- to here -->"
PAGE = FilePath(__file__).parents[2] / "docs" / "configuration.md"
_TYPES = {"Int": "integer", "Float": "number", "Bool": "true or false", "Str": "text", "VarTuple": "integers"}


def reference() -> str:
    """Return the reference as Markdown, with a table for every table of a settings file."""
    return "\n".join(_lines()) + "\n"


def renewed(page: str) -> str:
    """Return ``page`` with the text between ``BEGIN`` and ``END`` replaced by the reference as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{rest.partition(END)[2]}"


def _lines() -> Iterator[str]:
    yield from _section("The cache", "At the top of the file.", "", CACHE)
    shown: dict[str, str] = {}
    for kind, cls in COMPONENTS.items():
        variable = f"COMPONENTS__{kind.upper()}"
        yield from _section(f"`[components.{kind}]`", _meaning(cls), variable, fields_of(cls), shown)
    yield from _section("`[sidecars.NAME]`", _meaning(Sidecar), "SIDECARS__NAME", SIDECAR, shown)
    meaning = fields_of(CacheConfig)["storage_options"].meaning
    yield from ("### `[storage_options]`", "", f"{meaning} `capacity` is set by",
                f"`{PREFIX}STORAGE_OPTIONS__CAPACITY`, and so on.")


def _meaning(cls: type[Settings]) -> str:
    """The first paragraph of the docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].replace("``", "`").split())


def _section(
    title: str, text: str, variable: str, fields: Mapping[str, Field], shown: dict[str, str] | None = None
) -> Iterator[str]:
    """``shown``: the rows of the sections before this one. A row that would be the same again is only named."""
    shown = {} if shown is None else shown
    rows = {name: f"|`{name}`|{_type(name, field)}|{_default(field)}|{field.meaning}|"
            for name, field in fields.items()}  # fmt: skip
    again = [f"`{name}`" for name, row in rows.items() if shown.get(name) == row]
    yield from (f"### {title}", "", text, "")
    if variable:
        yield from (f"Environment: `{PREFIX}{variable}__KEY`." + f" As above: {', '.join(again)}." * bool(again), "")
    yield from ("|setting|type|default||", "|---|---|---|---|")
    yield from (row for name, row in rows.items() if shown.get(name) != row)
    yield ""
    shown.update(rows)


def _type(setting: str, field: Field) -> str:
    kind, *others = field.kinds
    if isinstance(kind, msgspec.inspect.EnumType):
        return ", ".join(f"`{one.value}`" for one in kind.cls)
    if setting == "eviction":
        return ", ".join(f"`{one}`" for one in eviction_policies())
    name = _TYPES[type(kind).__name__.removesuffix("Type")]
    if others:
        return f"{name}, or a list of it"
    if name == "integer" and field.extra.get("room"):
        name = "integer, or a size"
    elif name == "integers" and isinstance(kind.item_type, msgspec.inspect.VarTupleType):
        name = "lists of integers"
    low, high, above = (getattr(kind, bound, None) for bound in ("ge", "le", "gt"))
    if low is not None and high is not None:
        return f"{name}, {low:g} to {high:g}"
    if low is not None:
        return f"{name}, {low:g} or more"
    return name if above is None else f"{name} above {above:g}"


def _default(field: Field) -> str:
    if field.required:
        return "must be given"
    value = field.default
    value = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
