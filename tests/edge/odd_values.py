"""Values that a caller may pass where another kind is meant, and what each of them means, if anything."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch


class Odd(NamedTuple):
    """One value, made anew for each call. ``integer``, ``number``, ``flag``, ``text`` and ``row`` (of tokens) say what
    it means where one of these is wanted; None: nothing, and it must be refused there."""

    name: str
    make: Callable[[], Any]
    integer: int | None = None
    number: float | None = None
    flag: bool | None = None
    text: str | None = None
    row: list[int] | None = None


class Eight(IntEnum):
    MEMBER = 8


class Index:
    """An object whose ``__index__`` answers ``answer``, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __index__(self) -> int:
        if isinstance(self.answer, BaseException):
            raise self.answer
        found: int = self.answer
        return found


class Float:
    """An object whose ``__float__`` answers ``answer``, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __float__(self) -> float:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if isinstance(self.answer, str) else float(self.answer)  # type: ignore[return-value]


class Hostile:
    """An object of which every method raises."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("this object does nothing that it is asked")

    __bool__ = __len__ = __iter__ = __repr__ = __str__ = __hash__ = __index__ = __float__ = __array__ = _refuse

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this object is compared with nothing")


def _number(name: str, make: Callable[[], Any], integer: int) -> Odd:
    return Odd(name, make, integer=integer, number=float(integer))


def _real(name: str, make: Callable[[], Any], number: float) -> Odd:
    return Odd(name, make, number=number if math.isfinite(number) else None)


def _same(name: str, value: Any, **means: Any) -> Odd:
    return Odd(name, lambda: value, **means)


INTEGERS = [
    *[_number(str(value), partial(int, value), value) for value in (0, 1, 8, -1, 2**31, -(2**63), 2**64, 10**30)],
    _number("np.int32(8)", lambda: np.int32(8), 8),
    _number("np.int64(-3)", lambda: np.int64(-3), -3),
    _number("np.uint8(1)", lambda: np.uint8(1), 1),
    _number("np.array(8)", lambda: np.array(8), 8),
    _number("torch.tensor(8)", lambda: torch.tensor(8), 8),
    _number("torch.tensor(1, int32)", lambda: torch.tensor(1, dtype=torch.int32), 1),
    _number("IntEnum", lambda: Eight.MEMBER, 8),
    _number("Index(8)", lambda: Index(8), 8),
    _number("Index(10**40)", lambda: Index(10**40), 10**40),
]

NUMBERS = [
    _real("8.0", lambda: 8.0, 8.0),
    _real("0.5", lambda: 0.5, 0.5),
    _real("-1.5", lambda: -1.5, -1.5),
    _real("1e300", lambda: 1e300, 1e300),
    _real("nan", lambda: math.nan, math.nan),
    _real("inf", lambda: math.inf, math.inf),
    _real("-inf", lambda: -math.inf, math.inf),
    _real("np.float32(0.5)", lambda: np.float32(0.5), 0.5),
    _real("np.float64(nan)", lambda: np.float64(math.nan), math.nan),
    _real("torch.tensor(0.5)", lambda: torch.tensor(0.5), 0.5),
    _real("torch.tensor(inf)", lambda: torch.tensor(math.inf), math.inf),
    _real("Decimal('8')", lambda: Decimal("8"), 8.0),
    _real("Fraction(1, 2)", lambda: Fraction(1, 2), 0.5),
    _real("10**400", lambda: Float(10**400), math.inf),
]

FLAGS = [
    _same("True", True, flag=True), _same("False", False, flag=False), _same("np.True_", np.True_, flag=True),
    Odd("np.array(False)", lambda: np.array(False), flag=False),
    Odd("torch.tensor(True)", lambda: torch.tensor(True), flag=True),
]  # fmt: skip

TEXTS = [
    _same("'8'", "8", text="8"), _same("''", "", text=""), _same("'\\ud800'", "\ud800"),
    _same("np.str_('8')", np.str_("8"), text="8"), _same("b'8'", b"8"), _same("b''", b"", row=[]),
    _same("bytes of a token", b"\x08\0\0\0", row=[8]),
    Odd("bytearray", lambda: bytearray(b"\x08\0\0\0"), row=[8]),
    Odd("memoryview", lambda: memoryview(b"\x08\0\0\0"), row=[8]),
    Odd("2-d memoryview", lambda: memoryview(b"\x08\0\0\0").cast("B", (2, 2))),
]  # fmt: skip

OTHERS = [
    _same("None", None), _same("object()", object()), _same("...", ...), _same("complex", 8 + 0j),
    _same("np.complex64", np.complex64(8)), _same("np.datetime64", np.datetime64("2020-01-01")),
    _same("np.timedelta64", np.timedelta64(8, "s")), _same("int", int), _same("np.int64", np.int64),
    Odd("[]", list, row=[]), Odd("[8]", lambda: [8], row=[8]), _same("(8,)", (8,), row=[8]),
    Odd("[8.0]", lambda: [8.0]), Odd("['8']", lambda: ["8"]), Odd("[None]", lambda: [None]), Odd("[-8]", lambda: [-8]),
    Odd("[[8]]", lambda: [[8]]), Odd("[2**31]", lambda: [2**31]), Odd("[Index('8')]", lambda: [Index("8")]),
    Odd("[Index(error)]", lambda: [Index(KeyError("no"))]), Odd("[Hostile()]", lambda: [Hostile()]),
    Odd("{}", dict), Odd("{'a': 1}", lambda: {"a": 1}), Odd("{8}", lambda: {8}),
    Odd("generator", lambda: (one for one in (8, 9))), Odd("lambda", lambda: lambda: 8),
    _same("range", range(8, 10), row=[8, 9]),
    Odd("np.array([8])", lambda: np.array([8]), row=[8]), Odd("np.array([8.0])", lambda: np.array([8.0])),
    Odd("np.array([[8, 9]])", lambda: np.array([[8, 9]])), Odd("np.array(['a'])", lambda: np.array(["a"])),
    Odd("np.array([None])", lambda: np.array([None])), Odd("np.array([True])", lambda: np.array([True])),
    Odd("torch.tensor([8])", lambda: torch.tensor([8]), row=[8]),
    Odd("torch.tensor([[8, 9]])", lambda: torch.tensor([[8, 9]])),
    Odd("torch.tensor([0.5])", lambda: torch.tensor([0.5])),
    Odd("Index('8')", lambda: Index("8")), Odd("Index(8.0)", lambda: Index(8.0)),
    Odd("Index(error)", lambda: Index(ValueError("no"))), Odd("Float('8')", lambda: Float("8")),
    Odd("Float(error)", lambda: Float(KeyError("no"))), Odd("Hostile()", Hostile),
    Odd("asyncio.Event()", asyncio.Event),
]  # fmt: skip

ODD = [*INTEGERS, *NUMBERS, *FLAGS, *TEXTS, *OTHERS]
"""All of them, each with a name of its own."""
