"""The reference of all settings as Markdown, made from the same rows by which files are read.

``python -m tests.configuration.reference`` writes it into docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath

from asynccache.configuration.building import variable
from asynccache.configuration.settings import REQUIRED, Path, Setting

from asynccache.config import Sidecar
from asynccache.configuration import settings

BEGIN = "<!-- written by: python -m tests.configuration.reference -->"
END = "<!-- to here -->"
PAGE = FilePath(__file__).parents[2] / "docs" / "configuration.md"
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", tuple: "integers"}


def reference() -> str:
    """Return the reference as Markdown, with a table for every table of a settings file."""
    return "\n".join(_lines()) + "\n"


def renewed(page: str) -> str:
    """Return ``page`` with the text between ``BEGIN`` and ``END`` replaced by the reference as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{rest.partition(END)[2]}"


def _lines() -> Iterator[str]:
    yield from _section("The cache", "At the top of the file.", (), settings.CACHE)
    for kind, rows in settings.COMPONENTS.items():
        meaning = settings.meaning(settings.COMPONENT_CLASSES[kind])
        yield from _section(f"`[components.{kind}]`", meaning, ("components", kind), rows)
    yield from _section("`[sidecars.NAME]`", settings.meaning(Sidecar), ("sidecars", "NAME"), settings.SIDECAR)
    yield from ("### `[storage_options]`", "", f"{settings.OPTION.text} `capacity` is set by",
                f"`{variable(('storage_options', 'capacity'))}`, and so on.")


def _section(title: str, text: str, path: Path, rows: Mapping[str, Setting]) -> Iterator[str]:
    yield from (f"### {title}", "", text, "")
    if path:
        yield from (f"Environment: `{variable((*path, 'KEY'))}`.", "")
    yield from ("| setting | type | default | |", "|---|---|---|---|")
    for row in rows.values():
        yield f"| `{row.name}` | {_type(row)} | {_default(row)} | {row.text} |"
    yield ""


def _type(row: Setting) -> str:
    name = ", ".join(f"`{choice}`" for choice in row.choices()) or _TYPES[row.kind]
    if row.several:
        return f"{name}, or a list of it"
    low, high, above = row.bounds
    if low is not None and high is not None:
        return f"{name}, {low:g} to {high:g}"
    if low is not None:
        return f"{name}, {low:g} or more"
    return name if above is None else f"{name} above {above:g}"


def _default(row: Setting) -> str:
    if row.default is REQUIRED:
        return "must be given"
    value = list(row.default) if isinstance(row.default, tuple) else row.default
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
