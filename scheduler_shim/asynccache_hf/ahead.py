"""Prompts that wait for each other. When a prompt begins like an earlier one that is still being computed, it waits for
the pages of the earlier one.

Otherwise requests that come together would each compute the tokens that they share. A lease finds only pages that are
in the cache when it is taken, and while the first request is being computed its pages are not there yet.

Laws. A prompt waits only for earlier prompts, so there is always one that waits for nobody. A prompt has no lease while
it waits. It waits for one other prompt at a time, the first of those that share most with it: the tokens shared with
any other prompt are among those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

Beginning = tuple[str | bytes | None, int]
"""A namespace, and one of the numbers that ``numbers`` returns for a prompt in it."""


def numbers(tokens: Sequence[int], page_size: int) -> list[int]:
    """Return a number for the first whole page of ``tokens``, one for the first two pages, and so on. Prompts that
    begin alike have the same numbers. Different beginnings have the same number about once in 2**64 times. So the
    numbers may decide which prompts wait or go together, but not which pages a prompt finds."""
    own, size = np.asarray(tokens, np.int32).tobytes(), 4 * page_size
    found: list[int] = []
    for at in range(0, len(own) - size + 1, size):
        found.append(hash((found[-1] if found else 0, own[at : at + size])))
    return found


def findable(tokens: Sequence[int], page_size: int) -> int:
    """Return how many pages of ``tokens`` a lease may find. The last token of a prompt is always computed, so its page
    does not count."""
    return (len(tokens) - 1) // page_size


class UncomputedPrompt:
    """A prompt that has come and is not computed yet. ``reached``: how many of its first tokens are cached, or about to
    be loaded; it waits for nobody because of these."""

    def __init__(self, prompts: UncomputedPrompts, beginnings: Sequence[Beginning], most: int) -> None:
        """``beginnings``: the numbers of its first page, of its first two, and so on. ``most``: how many of its pages
        other prompts may compute for it."""
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
        """Return when no earlier prompt is computing pages that this one begins with. Cancelling the wait changes
        nothing."""
        while (found := self._prompts.ahead_of(self)) is not None:
            other, shared = found
            while not other._gone and other.reached < shared:
                await other._moved.wait()
            if other.reached >= shared:
                self.reach(shared)  # the prompts behind this one need not wait for these tokens any more

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
        """Add the prompt ``tokens`` in the namespace ``extra_key``, behind all that have come before, and return it.
        The caller must call ``leave`` later."""
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
