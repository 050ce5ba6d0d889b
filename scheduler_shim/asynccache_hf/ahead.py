"""Prompts that wait for each other: a prompt that begins as one before it, which is being computed, waits for that
one's pages.

Otherwise requests that come together would each compute what they share: a lease sees what is in the cache when it is
taken, and while the first of them is computed nothing is.

Laws: a prompt waits only for those that came before it, so there is always one that waits for nobody; and it holds
nothing while it waits. It waits for one at a time, the first of those that share most with it: whoever shares less
shares that with this one, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

Beginning = tuple[str | bytes | None, int]
"""A namespace, and what ``numbers`` has for some first pages of it."""


def numbers(tokens: Sequence[int], page_size: int) -> list[int]:
    """A number for the first whole page of ``tokens``, for the first two, and so on: the same for all that begin alike.
    Others have the same once in 2**64 or so; so it may say who waits or who goes together, and not what is found."""
    own, size = np.asarray(tokens, np.int32).tobytes(), 4 * page_size
    found: list[int] = []
    for at in range(0, len(own) - size + 1, size):
        found.append(hash((found[-1] if found else 0, own[at : at + size])))
    return found


def findable(tokens: Sequence[int], page_size: int) -> int:
    """Pages of ``tokens`` that a lease may find: the last token of a prompt is computed in any case."""
    return (len(tokens) - 1) // page_size


class UncomputedPrompt:
    """A prompt that has come and is not computed yet. ``reached``: so many of its tokens nobody has to wait for, since
    they are cached, or about to be loaded."""

    def __init__(self, prompts: UncomputedPrompts, beginnings: Sequence[Beginning], most: int) -> None:
        """``beginnings``: its first page, its first two, and so on. ``most``: how many of its pages others may compute
        for it."""
        self.beginnings = beginnings
        self.most = most
        self.reached = 0
        self._prompts = prompts
        self._gone = False
        self._moved = asyncio.Event()

    def reach(self, tokens: int) -> None:
        self.reached = max(self.reached, tokens)
        self._tell()

    async def turn(self) -> None:
        """Return when nobody ahead is computing what this one begins with. Cancelling it changes nothing."""
        while (found := self._prompts.ahead_of(self)) is not None:
            other, shared = found
            while not other._gone and other.reached < shared:
                await other._moved.wait()
            if other.reached >= shared:
                self.reach(shared)  # which nobody behind has to wait for once more

    def go(self) -> None:
        """Note that nothing more of this prompt is computed, and wake those who wait for it."""
        self._gone = True
        self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class UncomputedPrompts:
    """The prompts that have come and are not computed yet. For one event loop."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._alike: dict[Beginning, dict[UncomputedPrompt, None]] = {}  # in the order in which they came

    def enter(self, tokens: Sequence[int], extra_key: str | bytes | None) -> UncomputedPrompt:
        """``tokens``, in the namespace ``extra_key``, are the next to be computed. ``leave`` has to follow."""
        beginnings = [(extra_key, number) for number in numbers(tokens, self._page_size)]
        prompt = UncomputedPrompt(self, beginnings, findable(tokens, self._page_size))
        for beginning in beginnings:
            self._alike.setdefault(beginning, {})[prompt] = None
        return prompt

    def ahead_of(self, prompt: UncomputedPrompt) -> tuple[UncomputedPrompt, int] | None:
        """Return the first of the prompts that share most with ``prompt``, beyond what it has reached, and how many
        tokens they share; None if no other prompt does."""
        for pages in range(prompt.most, prompt.reached // self._page_size, -1):
            first = next(iter(self._alike[prompt.beginnings[pages - 1]]))
            if first is not prompt:
                return first, pages * self._page_size
        return None

    def leave(self, prompt: UncomputedPrompt) -> None:
        """Note that all of ``prompt`` is computed, or that nobody will compute it. May be repeated."""
        prompt.go()
        for beginning in prompt.beginnings:
            alike = self._alike.get(beginning, {})
            alike.pop(prompt, None)
            if not alike:
                self._alike.pop(beginning, None)
