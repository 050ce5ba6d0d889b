"""Checks of arguments: each returns the value in the type that the parameter needs, or raises ``ConfigError``.

A check takes the parameter's name and the value that somebody passed in, and the error names both. A good value is
returned as Python's own type: an integer of numpy or torch becomes an ``int``. Checks change nothing, so after an error
the caller may try again. Public functions check all their arguments before they do anything else. The functions that
they call rely on that and check nothing.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Collection, Iterable, KeysView, Mapping
from enum import Enum
from math import isfinite
from typing import Any, TypeVar

from asynccache.errors import ConfigError
from asynccache.redaction import redacted

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)

MOST_SHOWN = 80
INT32_MAX = 2**31 - 1

_VERSION = re.compile(r"[0-9][0-9A-Za-z.!+_-]{0,63}")
_SCALAR = re.compile(r"(?:torch\.)?[ub]?(?P<kind>int|float|bool)\d*")


def unmet(
    value: float, minimum: float | None = None, maximum: float | None = None, above: float | None = None
) -> str:
    """Return what is wrong with ``value``, as the end of a sentence ("must be at least 1"); "" if it lies within the
    bounds. ``above`` itself is out of bounds."""
    if minimum is not None and maximum is not None:
        return "" if minimum <= value <= maximum else f"must lie between {minimum} and {maximum}"
    if minimum is not None and not value >= minimum:
        return f"must be at least {minimum}"
    if maximum is not None and not value <= maximum:
        return f"must be at most {maximum}"
    return "" if above is None or value > above else f"must be above {above}"


def integer(name: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` as an ``int``. It may be an integer of Python, numpy or torch, or anything else that
    ``operator.index`` takes. Floats, truth values and arrays that have dimensions are refused.

    Raises:
        ConfigError: the value is no integer, or below ``minimum``, or above ``maximum``.
    """
    found = value if type(value) is int else _index(name, value)
    if why := unmet(found, minimum, maximum):
        raise _refused(name, value, why)
    return found


def number(
    name: str, value: object, minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> float:
    """Return ``value`` as a finite ``float``. It may be a real number of Python, numpy or torch. Text and truth values
    are refused.

    Raises:
        ConfigError: the value is no number, is NaN or infinite, or lies outside the bounds (see ``unmet``).
    """
    found = value if type(value) is float else _real(name, value)
    if not isfinite(found):
        raise _refused(name, value, "must be a finite number")
    if why := unmet(found, minimum, maximum, above):
        raise _refused(name, value, why)
    return found


def flag(name: str, value: object) -> bool:
    """Return ``value`` as a ``bool``. It may be True or False of Python, numpy or torch.

    Raises:
        ConfigError: the value is anything else, 0, 1, None and "no" included.
    """
    if value is True or value is False:
        return value
    if not is_flag(value):
        raise _refused(name, value, "must be True or False")
    return bool(value)


def is_flag(value: object) -> bool:
    """Return True if ``flag`` takes ``value``, for parameters that may also be something else."""
    return isinstance(value, bool) or _kind(value) == "bool"


def text(name: str, value: object, *, empty: bool = True) -> str:
    """Return ``value`` as a ``str``. It must be text that can be encoded as UTF-8, which lone surrogates cannot.
    ``empty``: whether "" is allowed.

    Raises:
        ConfigError: the value is no such text.
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


def version(name: str, value: object) -> str:
    """Return ``value``, the version of a package as that package tells it: a digit, and letters, digits and ``.!+_-``
    behind it, 64 characters at most.

    Raises:
        ConfigError: the value is no such text.
    """
    found = text(name, value)
    if not _VERSION.fullmatch(found):
        raise _refused(name, value, "must be a version, as in '0.32.0'")
    return found


def integers(name: str, value: object) -> list[int]:
    """Return ``value``, a list or tuple of integers, as a list of ``int``.

    Raises:
        ConfigError: it is anything else.
    """
    row = instance(name, value, (list, tuple))
    return list(row) if set(map(type, row)) <= {int} else [integer(name, one) for one in row]


def names(name: str, value: object) -> tuple[str, ...]:
    """Return the texts in ``value``, which is a list, a tuple, a set, a mapping or the keys of one.

    Raises:
        ConfigError: the value is none of these, or has an element that is no text.
    """
    kinds = (list, tuple, set, frozenset, Mapping, KeysView)
    return tuple(text(name, one) for one in instance(name, value, kinds))


def texts(name: str, value: object, *, numbers: bool = False) -> dict[str, str]:
    """Return a copy of ``value``, a mapping of texts to texts. ``numbers``: whether a value may also be a number, as in
    JSON; it becomes its text.

    Raises:
        ConfigError: the value is no such mapping. The error does not show the mapping's values, since one may be a
        password.
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
    """Return a member of ``enum``: ``value`` itself if it is a member, or the member that has this value.

    Raises:
        ConfigError: there is no such member; the message lists the values of all members.
    """
    if isinstance(value, (str, enum)):
        for one in enum:
            if value is one or value == one.value:
                return one
    raise _no_choice(name, value, [str(one.value) for one in enum])


def choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return ``value``, which must be one of ``choices``.

    Raises:
        ConfigError: ``value`` is not one of them; the message lists the choices.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise _no_choice(name, value, choices)


def namespace(name: str, value: object) -> str | bytes | None:
    """Return ``value``, a ``namespace``: text, bytes or None.

    Raises:
        ConfigError: it is anything else, or text that cannot be encoded as UTF-8.
    """
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _refused(name, value, "must be text, bytes or None")
    text(name, value)
    return value  # the same object: an ``Adapter`` is a subclass of str that has a name, too


def instance(name: str, value: object, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    """Return ``value``, which must be an instance of ``kind``, or of one of several kinds.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    raise _refused(name, value, f"must be of type {' or '.join(one.__name__ for one in kinds)}")


def provider(name: str, value: object, protocol: type[_T]) -> _T:
    """Return ``value``, which must have every method of ``protocol``.

    Raises:
        ConfigError: ``value`` lacks a method; the message names the first that it lacks.
    """
    for method, function in vars(protocol).items():
        if callable(function) and not method.startswith("_") and not callable(_attribute(value, method)):
            raise _refused(name, value, f"must be a {protocol.__name__}, and has no method {method}()")
    return value  # type: ignore[return-value]


def function(name: str, value: _T) -> _T:
    """Return ``value``, which must be callable.

    Raises:
        ConfigError: it is not.
    """
    if not callable(value):
        raise _refused(name, value, "must be something that can be called")
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence, such as ``; did you mean 'window'?``, with the most similar of ``names``; "" if
    none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return ``value`` as errors show it: its ``repr``, cut to ``MOST_SHOWN`` characters, without passwords of URLs."""
    try:
        found = redacted(repr(value))
    except Exception:  # the repr() of somebody's class may raise anything
        return f"<an object of type {type(value).__name__}>"
    return found if len(found) <= MOST_SHOWN else f"{found[: MOST_SHOWN - 3]}..."


def _refused(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} {why}")


def _no_choice(name: str, value: object, choices: Collection[str]) -> ConfigError:
    near = nearest(value, choices) if isinstance(value, str) else ""
    return ConfigError(f"{name}={shown(value)} must be one of {', '.join(choices)}{near}")


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
    """Return which kind of scalar of numpy or torch ``value`` is: ``int``, ``float``, ``bool`` or ``other``. An array
    that has dimensions is ``other``; an object without ``dtype`` is "". The kind is told by attributes, so that neither
    numpy nor torch has to be imported."""
    dtype = _attribute(value, "dtype")
    if dtype is None:
        return ""
    try:
        found = _SCALAR.fullmatch(str(dtype))
    except Exception:  # the str() of somebody's class may raise anything
        return "other"
    return found["kind"] if found and _attribute(value, "ndim") == 0 else "other"


def _attribute(value: object, name: str) -> Any:
    """Return an attribute of ``value``; None if there is no such attribute, or if looking for it raises any error."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None
