"""Remote methods: the messages between a head and its ranks are made from the signatures of the methods they call.

``@remote`` marks a method that another process may call. ``orders_of`` makes a message of each: a typed array with the
method's name and its arguments. A coroutine is *answered*, with what it returns; a plain method is not. So a new call
is one method, and what is decoded has been checked against the method's annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction, signature
from typing import Any, NamedTuple, TypeVar, Union, get_type_hints

import msgspec

from asynccache.worker import messages as m

F = TypeVar("F", bound=Callable[..., Any])

Fold = Callable[..., Any]
"""A function that makes one answer of those of all ranks: it gets them by rank, and then the arguments of the call. It
raises ``RankFailure`` with a rank whose answer cannot be right."""

_MARK = "__remote_fold__"


def remote(fold: Fold | None = None) -> Callable[[F], F]:
    """Mark a method that other processes may call. The method itself is unchanged. ``fold``: combines the answers of
    all ranks; without it the answer of a group is None."""

    def mark(method: F) -> F:
        setattr(method, _MARK, fold)
        return method

    return mark


class Order(NamedTuple):
    """A remote method by its ``name``. ``message``: the type of its message, which has the arguments in order; of a
    call, behind its number. ``answer``: the type of its answer; None: nobody answers."""

    name: str
    message: type[Any]
    answer: type[Any] | None
    fold: Fold | None


def orders_of(*owners: type) -> dict[str, Order]:
    """Return an order for each remote method of ``owners``. Of methods with one name the first owner's counts."""
    found: dict[str, Order] = {}
    for owner in owners:
        for name, method in vars(owner).items():
            if hasattr(method, _MARK):
                found.setdefault(name, _order(name, method))
    return found


def _order(name: str, method: Callable[..., Any]) -> Order:
    hints = get_type_hints(method)
    fields = [(argument, hints[argument]) for argument in list(signature(method).parameters)[1:]]
    answer = None
    if iscoroutinefunction(method):
        value = [("value", hints["return"])]
        answer = msgspec.defstruct(f"{name}_answer", value, bases=(m.Answer,), tag=f"{name}.answer")
    base = m.Message if answer is None else m.Call
    message = msgspec.defstruct(name, fields, bases=(base,), tag=name)
    return Order(name, message, answer, getattr(method, _MARK))


def order_decoder(orders: Mapping[str, Order]) -> Callable[[bytes], list[m.Message]]:
    """Return a function that decodes a frame of a head."""
    return m.decoder(list[Union[tuple(order.message for order in orders.values())]])  # type: ignore[misc]  # noqa: UP007


def news_decoder(orders: Mapping[str, Order]) -> Callable[[bytes], list[m.Message]]:
    """Return a function that decodes a frame of a rank: answers, and what it says unasked."""
    answers = [order.answer for order in orders.values() if order.answer is not None]
    kinds = (m.Ended, m.BatchOver, m.StoreKeys, m.StoreHealth, m.StoreCounters, m.Died, m.Failed, *answers)
    return m.decoder(list[Union[kinds]])  # type: ignore[valid-type]  # noqa: UP007
