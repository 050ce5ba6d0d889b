"""A JSON Schema (draft 2020-12) of settings files, for editors and for programs that write such files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asynccache.config import Sidecar
from asynccache.configuration import settings
from asynccache.configuration.settings import REQUIRED, Setting

Schema = dict[str, Any]

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def schema() -> Schema:
    """Return the schema of settings files."""
    own = _object(settings.CACHE)
    own["properties"] |= {
        "components": {
            "type": "object", "additionalProperties": False, "required": ["full"],
            "properties": {kind: {"description": settings.meaning(settings.COMPONENT_CLASSES[kind]), **_object(rows)}
                           for kind, rows in settings.COMPONENTS.items()},
        },
        "sidecars": {
            "type": "object", "description": settings.meaning(Sidecar), "propertyNames": {"pattern": r"^[\w.-]+$"},
            "additionalProperties": _object(settings.SIDECAR),
        },
        "storage_options": {
            "type": "object", "description": settings.OPTION.text, "additionalProperties": {"type": "string"},
        },
    }
    own["required"] = [*own["required"], "components"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "asynccache", **own}


def _object(rows: Mapping[str, Setting]) -> Schema:
    """Return the schema of a table with these settings. Each key may be written with underscores or with dashes."""
    properties = {name: _one(row) for name, row in rows.items()}
    dashed = {name.replace("_", "-"): one for name, one in properties.items()}
    required = [name for name, row in rows.items() if row.default is REQUIRED]
    choices = [{"anyOf": [{"required": [name]}, {"required": [name.replace("_", "-")]}]}
               for name in required if "_" in name]
    found: Schema = {
        "type": "object", "properties": {**dashed, **properties}, "additionalProperties": False,
        "required": [name for name in required if "_" not in name],
    }
    return {**found, "allOf": choices} if choices else found


def _one(row: Setting) -> Schema:
    found: Schema = {"description": row.text, "type": _TYPES.get(row.kind, "string")}
    if row.kind is tuple:
        found |= {"type": "array", "items": {"type": "integer"}}
    if row.several:
        found |= {"type": [found["type"], "array"], "items": {"type": found["type"]}, "minItems": 1}
    if choices := row.choices():
        found["enum"] = [*choices, *(["none"] if row.optional else [])]
    if row.default is not REQUIRED and row.default is not None:
        found["default"] = list(row.default) if isinstance(row.default, tuple) else row.default
    minimum, maximum, above = row.bounds
    bounds = {"minimum": minimum, "maximum": maximum, "exclusiveMinimum": above}
    return {**found, **{name: bound for name, bound in bounds.items() if bound is not None}}
