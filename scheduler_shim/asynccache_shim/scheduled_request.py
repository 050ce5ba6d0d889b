"""A request as the scheduler keeps it: its tokens so far, its lease, and how far it is computed."""

from __future__ import annotations

import asyncio

import numpy as np

from asynccache import Lease, PrefetchHandle
from asynccache_shim.model import Checkpoint, Chunk, Pages
from asynccache_shim.request import Request, State, Tokens, add_token


class ScheduledRequest:
    """One request of one scheduler. All positions and lengths are in tokens.

    submitted: the ``Request`` that its caller holds, to which the scheduler tells its state and its output.
    id, order: the request's number. length: tokens so far, of prompt and output.
    computed: KV is written up to here. reserved: the lease's pages reach up to here.
    entry: the length when the request was admitted; up to there it prefills. marks: where states are to be kept.
    checkpointed: the position of the latest checkpoint of a state.
    patient: whether the prefetch may still go on. handle: the prefetch; None: there is none.
    watch: the task that waits for the prefetch or for the load. entering: the task that waits in the cache's line.
    blocked: the value of ``Board.freed`` when the request was retracted; -1: it was not. While other requests hold
        pages it is not admitted again before ``freed`` has grown.
    private: what it has computed in its present pages may not be published.
    failed_loads: how often its pages failed to load.
    behind: the request that this one waited for when that was last looked up, and how many tokens they share.
    deadline: the time of the loop after which a token is the last one; None: there is none.
    """

    __slots__ = (
        "_buffer", "behind", "blocked", "checkpointed", "computed", "deadline", "entering", "entry", "failed_loads",
        "handle", "id", "lease", "length", "marks", "order", "pages", "patient", "priority", "private", "reserved",
        "submitted", "terms", "watch",
    )  # fmt: skip

    def __init__(self, submitted: Request, number: int) -> None:
        self.submitted = submitted
        self.terms = terms = submitted.terms
        self.id = self.order = number
        self.priority = terms.priority
        self.length = len(terms.tokens)
        self._buffer = np.empty(self.length + terms.limits.max_new_tokens, np.int32)
        self._buffer[: self.length] = terms.tokens
        self.lease: Lease | None = None
        self.handle: PrefetchHandle | None = None
        self.watch: asyncio.Task[None] | None = None
        self.entering: asyncio.Task[Lease] | None = None
        self.patient = False
        self.blocked = -1
        self.failed_loads = 0
        self.behind: tuple[ScheduledRequest, int] | None = None
        most = terms.limits.max_time
        self.deadline = None if most is None else asyncio.get_running_loop().time() + most
        self._forget()

    def __repr__(self) -> str:
        return f"ScheduledRequest({self.id}, {self.submitted.state.value}, {self.computed} of {self.length} tokens)"

    def _forget(self) -> None:
        self.computed = self.reserved = self.entry = self.checkpointed = 0
        self.private = False
        self.marks: tuple[int, ...] = ()
        self.pages: Pages = np.empty(0, np.int32)

    @property
    def tokens(self) -> Tokens:
        """Prompt and output so far."""
        return self._buffer[: self.length]

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return self.length - len(self.terms.tokens)

    @property
    def more(self) -> int:
        """The number of tokens that may still be generated and need KV. The last token of the output needs none."""
        return len(self._buffer) - self.length - 1

    @property
    def over(self) -> bool:
        """True if the request has ended, in whatever way."""
        return self.submitted.finish is not None

    @property
    def runs(self) -> bool:
        """True if the request can be part of a step."""
        return self.lease is not None and self.submitted.state is State.RUNNING

    def publishes(self) -> bool:
        """Return True if what the request has computed may be published. Once it may not, all that it computes in the
        same pages is kept back: it is computed from what may not be published."""
        if self.private:
            return False
        try:
            self.private = not (self.terms.publishes is None or self.terms.publishes())
        except Exception:  # the caller's own; it must not end the loop
            self.private = True
        return not self.private

    def computes_for(self, other: ScheduledRequest, page_size: int) -> int:
        """Return with how many tokens, in whole pages, ``other`` begins like this request, if not all of these are
        computed yet; else 0. The last token of a prompt is always computed by itself."""
        most = min(self.length, other.length - 1) // page_size * page_size
        if self.over or self.computed >= most or self.terms.namespace != other.terms.namespace:
            return 0
        differs = np.flatnonzero(self._buffer[:most] != other._buffer[:most])
        shared = int(differs[0]) // page_size * page_size if len(differs) else most
        return shared if shared > self.computed else 0

    @property
    def decodes(self) -> bool:
        """True if all tokens but the last are computed, so that the next step generates one."""
        return self.length - self.computed == 1

    def entered(self, lease: Lease, page_size: int, has_states: bool) -> None:
        """Note that the request was admitted with ``lease``, whose pages may still be on their way to the device."""
        self.lease = lease
        self.computed = self.checkpointed = lease.cached
        self.entry = self.length
        self.pages = lease.pages
        self.reserved = len(self.pages) * page_size
        self.marks = (lease.checkpoint_at, (self.entry - 1) // page_size * page_size) if has_states else ()
        self.submitted.state = State.LOADING

    def give_way(self) -> None:
        """Give up the request's place in the cache's line, if it has one."""
        if self.entering is not None:
            self.entering.cancel()

    def left(self) -> Lease | None:
        """Take the lease away from the request, and return it to be released; None if there was none."""
        lease, self.lease = self.lease, None
        self._forget()
        return lease

    def append(self, token: int) -> None:
        """Add a token to the output."""
        self._buffer[self.length] = token
        self.length += 1
        add_token(self.submitted, token)

    def chunk(self, stop: int, checkpoint: Checkpoint | None, has_swa: bool) -> Chunk:
        """The request's part of a step that computes it up to ``stop``."""
        assert self.lease is not None
        none = np.empty(0, np.int32)
        return Chunk(
            request_id=self.id,
            tokens=self.tokens,
            start=self.computed,
            stop=stop,
            pages=self.pages,
            swa_pages=self.lease.page_table("swa") if has_swa else none,
            states=self.lease.states,
            checkpoint=checkpoint,
            sample=stop == self.length,
            sampling=self.terms.sampling,
        )
