"""What may come in from outside: a value of the type that a parameter means, or a ``ConfigError`` that names both.

Each check takes the parameter's name and the value that somebody gave, and returns the value as Python's own type: an
engine's numpy or torch integer becomes an ``int``. Checks change nothing, so a caller who is refused may call again.
Public functions check all their parameters before they do anything else; below them nobody asks what a value is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, KeysView, Mapping
from dataclasses import fields
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from asynccache.errors import ConfigError
from asynccache.redaction import redacted

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)

MOST_SHOWN = 80
INT32_MAX = 2**31 - 1

_SCALAR = re.compile(r"(?:torch\.)?[ub]?(?P<kind>int|float|bool)\d*")


class Bounds(NamedTuple):
    """Where a number may lie: from ``minimum`` to ``maximum``, both allowed, and above ``above``, which is not."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def unmet(self, value: float) -> str:
        """What ``value`` must be and is not, as the end of a sentence; empty if it lies within the bounds."""
        low, high, above = self
        if low is not None and high is not None:
            return "" if low <= value <= high else f"must lie between {low} and {high}"
        if low is not None and not value >= low:
            return f"must be at least {low}"
        if high is not None and not value <= high:
            return f"must be at most {high}"
        return "" if above is None or value > above else f"must be above {above}"


ANY = Bounds()


def within(
    minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> dict[str, Bounds]:
    """The bounds of a dataclass's field, as its ``metadata``; ``settle_fields`` holds values against them."""
    return {"bounds": Bounds(minimum, maximum, above)}


def integer(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """``value`` as an ``int``: an integer of Python, numpy or torch, or anything else that ``operator.index`` takes.
    Neither floats nor truth values are integers, nor is an array that has dimensions.

    Raises:
        ConfigError: it is no integer, or below ``minimum``, or above ``maximum``.
    """
    found = value if type(value) is int else _index(name, value)
    if (minimum is not None and found < minimum) or (maximum is not None and found > maximum):
        raise _refused(name, value, Bounds(minimum, maximum).unmet(found))
    return found


def number(
    name: str, value: object, minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> float:
    """``value`` as a finite ``float``: a real number of Python, numpy or torch. Text and truth values are no numbers.

    Raises:
        ConfigError: it is no number, is NaN or infinite, or lies outside the bounds (``above`` itself is outside).
    """
    found = value if type(value) is float else _real(name, value)
    if not isfinite(found):
        raise _refused(name, value, "must be a finite number")
    low, high = minimum is None or found >= minimum, maximum is None or found <= maximum
    if low and high and (above is None or found > above):
        return found
    raise _refused(name, value, Bounds(minimum, maximum, above).unmet(found))


def flag(name: str, value: object) -> bool:
    """``value`` as a ``bool``: True or False, also numpy's or torch's.

    Raises:
        ConfigError: it is anything else; 0, 1, None and "no" are.
    """
    if value is True or value is False:
        return value
    if not is_flag(value):
        raise _refused(name, value, "must be True or False")
    return bool(value)


def is_flag(value: object) -> bool:
    """Whether ``value`` is a truth value, for parameters that take something else as well."""
    return isinstance(value, bool) or _kind(value) == "bool"


def text(name: str, value: object, *, empty: bool = True) -> str:
    """``value`` as it is: text that has UTF-8. ``empty``: whether it may have no characters.

    Raises:
        ConfigError: it is no such text.
    """
    if not isinstance(value, str):
        raise _refused(name, value, "must be text")
    if not (value or empty):
        raise _refused(name, value, "must not be empty")
    try:
        str.encode(value)
    except UnicodeEncodeError:
        raise _refused(name, value, "is no text that has UTF-8") from None
    return value if type(value) is str else str.__str__(value)


def integers(name: str, value: object) -> list[int]:
    """``value``, a list or tuple of integers, as a list of ``int``.

    Raises:
        ConfigError: it is no such row.
    """
    row = instance(name, value, (list, tuple))
    return list(row) if set(map(type, row)) <= {int} else [integer(name, one) for one in row]


def names(name: str, value: object) -> tuple[str, ...]:
    """``value``, a list, tuple, set or the keys of a mapping, all of them texts.

    Raises:
        ConfigError: it is no such collection.
    """
    kinds = (list, tuple, set, frozenset, Mapping, KeysView)
    return tuple(text(name, one) for one in instance(name, value, kinds))


def texts(name: str, value: object, *, numbers: bool = False) -> dict[str, str]:
    """A copy of ``value``, a mapping of texts to texts. What it holds is not shown: it may be a password. ``numbers``:
    a value may be a number, as in JSON, and becomes its text.

    Raises:
        ConfigError: it is no such mapping.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map names to texts, and is of type {type(value).__name__}")
    for key, one in value.items():
        text(f"{name}: a name", key)
        if not isinstance(one, str) and not (numbers and isinstance(one, (int, float)) and not isinstance(one, bool)):
            wanted = "text or a number" if numbers else "text"
            raise ConfigError(f"{name}: {key!r} must be {wanted}, and is of type {type(one).__name__}")
    return {key: str(one) for key, one in value.items()}


def member(name: str, value: object, enum: type[_E]) -> _E:
    """The member of ``enum`` that ``value``, itself a member or the text of one, names.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if isinstance(value, (str, enum)):
        for one in enum:
            if value is one or value == one.value:
                return one
    raise ConfigError(f"{name}: unknown value {shown(value)}; one of {', '.join(str(one.value) for one in enum)}")


def choice(name: str, value: object, choices: Collection[str]) -> str:
    """``value``, one of these texts.

    Raises:
        ConfigError: it is none of them; the message lists them.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise ConfigError(f"{name}: unknown value {shown(value)}; one of {', '.join(choices)}")


def namespace(name: str, value: object) -> str | bytes | None:
    """An ``extra_key``: text, bytes or None.

    Raises:
        ConfigError: it is anything else, or text that has no UTF-8.
    """
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _refused(name, value, "must be text, bytes or None")
    text(name, value)
    return value  # as it is: an ``Adapter`` is text that has a name beside it


def instance(name: str, value: object, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    """``value``, which is a ``kind``, or one of several.

    Raises:
        ConfigError: it is an object of another class.
    """
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    raise _refused(name, value, f"must be of type {' or '.join(one.__name__ for one in kinds)}")


def provider(name: str, value: object, protocol: type[_T]) -> _T:
    """``value``, an object with every method of ``protocol``.

    Raises:
        ConfigError: it is none; the message names the first method that it lacks.
    """
    for method, function in vars(protocol).items():
        if callable(function) and not method.startswith("_") and not callable(_attribute(value, method)):
            raise _refused(name, value, f"must be a {protocol.__name__}, and has no method {method}()")
    return value  # type: ignore[return-value]


def function(name: str, value: _T) -> _T:
    """``value``, which can be called.

    Raises:
        ConfigError: it cannot.
    """
    if not callable(value):
        raise _refused(name, value, "must be something that can be called")
    return value


def settle_fields(made: Any, where: str = "") -> None:
    """Replace the fields of a frozen dataclass that are declared as ``int``, ``float``, ``bool`` or ``str`` by what the
    checks above make of them, within the bounds that ``within`` gave them. The declared types are text: the module of
    the dataclass defers its annotations. ``where``: the beginning of the fields' names in errors.

    Raises:
        ConfigError: a value is unusable.
    """
    for one in fields(made):
        kind, value = str(one.type), getattr(made, one.name)
        if kind.endswith(" | None"):
            if value is None:
                continue
            kind = kind.removesuffix(" | None")
        name = where + one.name
        minimum, maximum, above = one.metadata.get("bounds", ANY)
        match kind:
            case "int":
                value = integer(name, value, minimum, maximum)
            case "float":
                value = number(name, value, minimum, maximum, above=above)
            case "bool":
                value = flag(name, value)
            case "str":
                value = text(name, value)
            case _:
                continue
        object.__setattr__(made, one.name, value)


def shown(value: object) -> str:
    """``value`` for an error: its ``repr``, cut where it is long, without the passwords of URLs."""
    try:
        found = redacted(repr(value))
    except Exception:  # whatever it is, its own repr() does not work
        return f"<an object of type {type(value).__name__}>"
    return found if len(found) <= MOST_SHOWN else f"{found[: MOST_SHOWN - 3]}..."


def _refused(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} {why}")


def _index(name: str, value: object) -> int:
    if not isinstance(value, bool) and _kind(value) in ("", "int"):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except Exception as error:
            raise _refused(name, value, "must be an integer") from error
    raise _refused(name, value, "must be an integer")


def _real(name: str, value: object) -> float:
    real = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if real and not isinstance(value, (bool, str)) and _kind(value) in ("", "int", "float"):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise _refused(name, value, "must be a finite number") from None
        except Exception as error:
            raise _refused(name, value, "must be a number") from error
    raise _refused(name, value, "must be a number")


def _kind(value: object) -> str:
    """What an array's or tensor's scalar is: ``int``, ``float``, ``bool``, or ``other``, as is all that has dimensions;
    empty for what has no ``dtype``, so that nothing need be imported to know numpy's and torch's scalars."""
    dtype = _attribute(value, "dtype")
    if dtype is None:
        return ""
    try:
        found = _SCALAR.fullmatch(str(dtype))
    except Exception:  # its own str() does not work
        return "other"
    return found["kind"] if found and _attribute(value, "ndim") == 0 else "other"


def _attribute(value: object, name: str) -> Any:
    """An attribute, or None, also where looking for it fails in whatever way."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None
