"""Which server has which key: one server for all, or a cluster's map of hash slots.

A cluster's map is as good as the last answer. A server that no longer has a slot says who has it (MOVED: from now on;
ASK: this once), and the request goes there. The map is read anew before the next request after a MOVED, or when a
server could not be reached, at most once a second.
"""

from __future__ import annotations

import asyncio
import re
from binascii import crc_hqx
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache_backends.pause import Health
from asynccache_backends.redis.connection import Job, plain
from asynccache_backends.redis.node import Lane, Node
from asynccache_backends.redis.resp import ProtocolError, Refusal, command
from asynccache_backends.redis.settings import Address, Settings

SLOTS = 16384
REDIRECTIONS = 4
REFRESH_SECONDS = 1.0
OPEN_SECONDS = 30.0

LOST = "LOST"
"""The code of a ``Refusal`` that no server gave: the one that should have could not be reached."""

_REDIRECTION = re.compile(r"(?:MOVED|ASK) ([0-9]{1,5}) (\S{0,255}):([0-9]{1,5})(?: |$)")
_TAG = re.compile(rb"[^{]*\{([^}]+)\}")
_NOBODY = Refusal("CLUSTERDOWN", "CLUSTERDOWN nobody has the slot")
_NO_CLUSTER = ("ERR", "NOPERM")  # what a server that is none, or will not say, answers
_PING = plain([command(b"PING")])
_SLOTS = plain([command(b"CLUSTER", b"SLOTS")])


Groups = dict[tuple[Node, bool], list[int]]
"""Which commands of a request are for which node; True: it has their slot only by half, and must be told so."""


def slot_of(key: bytes) -> int:
    """Its hash slot: of what is between the first brace and the next closing one, if that is anything, or of all."""
    tag = _TAG.match(key)
    return crc_hqx(tag[1] if tag else key, 0) % SLOTS


class Router:
    """Sends each command where its key is. All that changes about routing is in here.

    ``nodes``: those that have keys.
    """

    def __init__(self, settings: Settings, counts: Counter[str]) -> None:
        self.clustered = False
        self._settings = settings
        self._counts = counts
        self.nodes: dict[Address, Node] = {}
        self._owners: list[Node | None] = []
        self._stale = False
        self._refreshed = float("-inf")
        self._closed = False

    def owner(self, key: bytes) -> Node | None:
        """The node that has ``key``; None if nobody does."""
        return self._owners[slot_of(key) if self.clustered else 0]

    async def open(self) -> None:
        """Find out whether it is a cluster, and its map.

        Raises:
            Unavailable: no server can be reached, or it refuses us, or answers nonsense. Timeout: it does not answer.
            ConfigError: the URL says otherwise.
        """
        question = _PING if self._settings.cluster == "off" else _SLOTS
        within = max(OPEN_SECONDS, 2 * self._settings.stall * len(self._settings.seeds))
        try:
            async with asyncio.timeout(within):  # a server that says a byte now and then is never silent
                self._settle(*await self._of_any(self._settings.seeds, question))
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise Timeout(f"{self._settings}: no answer in {within:g} s") from None
            raise

    async def ask(self, lane: Lane, keys: Sequence[bytes], job: Job) -> list[Any]:
        """The reply to each command, from who has its key, one of ``keys`` for each; a ``Refusal`` where that one could
        not be reached.

        Raises:
            BackendError: the only one cannot be reached, or hangs.

        Cancelling it returns at once; connections that were in use are closed.
        """
        if not self.clustered:
            (node,) = self.nodes.values()
            return await node.ask(lane, job)
        await self.refresh()
        replies: list[Any] = [_NOBODY] * len(keys)
        groups = self._by_owner(keys)
        for _ in range(REDIRECTIONS):
            async with asyncio.TaskGroup() as tasks:
                for (node, asking), which in groups.items():
                    tasks.create_task(self._ask(lane, job.part(which), node, asking, which, replies))
            groups = self._redirected(groups, replies)
        return replies

    async def refresh(self) -> None:
        """Read the map anew if it is known to be old, at most once a second. Others use the old one meanwhile; it stays
        if nobody can be asked.

        Cancelling it leaves the old one.
        """
        now = asyncio.get_running_loop().time()
        if not self._stale or now < self._refreshed + REFRESH_SECONDS:
            return
        self._refreshed = now
        with suppress(BackendError):
            known = sorted(self.nodes.values(), key=lambda node: node.pause.health is not Health.WELL)
            address, reply = await self._of_any([*(node.address for node in known), *self._settings.seeds], _SLOTS)
            if isinstance(reply, list):
                self._learn(address, reply)

    def renew(self) -> None:
        """Use no connection again: its server has changed sides. A cluster's map is old then, too."""
        self._stale = True
        for node in self.nodes.values():
            node.close(idle=True)

    def close(self) -> None:
        """End all connections; requests under way fail."""
        self._closed = True
        for node in self.nodes.values():
            node.close()

    # the map

    def _settle(self, address: Address, reply: Any) -> None:
        """What the first answer says it is."""
        if isinstance(reply, list):
            self.clustered = True
            self._learn(address, reply)
            return
        self._owners = [self._node(address)]
        if isinstance(reply, Refusal) and reply.code not in _NO_CLUSTER:
            raise Unavailable(f"{self._settings}: {reply.text}")
        if self._settings.cluster == "on" or len(self._settings.seeds) > 1:
            raise ConfigError(f"storage={str(self._settings)!r}: {address} is no part of a cluster: {str(reply)[:200]}")

    def _learn(self, asked: Address, reply: Sequence[Any]) -> None:
        ranges = [_range_of(entry, asked) for entry in reply]  # all of them, before anything changes
        owners: list[Node | None] = [None] * SLOTS
        for first, last, address in ranges:
            owners[first : last + 1] = [self._node(address)] * (last + 1 - first)
        self._owners, self._stale = owners, False
        self._forget_others()

    def _forget_others(self) -> None:
        """End the connections to those that have no slots any more, but not under a request."""
        owners = {id(node) for node in self._owners}
        for address, node in list(self.nodes.items()):
            if id(node) not in owners and not node.asked:
                node.close()
                del self.nodes[address]

    def _node(self, address: Address) -> Node:
        if address not in self.nodes:
            self.nodes[address] = Node(address, self._settings, self._counts)
            if self._closed:
                self.nodes[address].close()
        return self.nodes[address]

    async def _of_any(self, addresses: Sequence[Address], job: Job) -> tuple[Address, Any]:
        """The first who answers, and the answer."""
        failure: BackendError | None = None
        for address in dict.fromkeys(addresses):
            try:
                (reply,) = await self._node(address).ask(Lane.WORDS, job)
            except BackendError as error:
                failure = error
            else:
                return address, reply
        assert failure is not None
        raise failure

    # a request

    def _by_owner(self, keys: Sequence[bytes]) -> Groups:
        groups: Groups = {}
        for i, key in enumerate(keys):
            node = self.owner(key)
            if node is None:
                self._stale = True
            else:
                groups.setdefault((node, False), []).append(i)
        return groups

    async def _ask(
        self, lane: Lane, part: Job, node: Node, asking: bool, which: Sequence[int], replies: list[Any]
    ) -> None:
        """Put what ``node`` says to ``part`` where it belongs in ``replies``."""
        try:
            answers = (await node.ask(lane, part.asking()))[1::2] if asking else await node.ask(lane, part)
        except BackendError as error:
            self._stale = True
            answers = [Refusal(LOST, f"{LOST} {error}")] * len(which)
        for i, reply in zip(which, answers, strict=True):
            replies[i] = reply

    def _redirected(self, groups: Groups, replies: Sequence[Any]) -> Groups:
        """Where to ask again, and for what. A redirection that names no slot and no port is none; the host may be an
        IPv6 address without brackets, or missing: the server does not know its own."""
        again: Groups = {}
        for i in (i for which in groups.values() for i in which):
            reply = replies[i]
            if not isinstance(reply, Refusal) or reply.code not in ("MOVED", "ASK", "CLUSTERDOWN"):
                continue
            self._stale = self._stale or reply.code != "ASK"
            match = _REDIRECTION.match(reply.text)
            if match is None or int(match[1]) >= SLOTS or not 0 < int(match[3]) < 65536:
                continue
            node = self._node(Address(match[2].strip("[]") or self._settings.seeds[0].host, int(match[3])))
            if reply.code == "MOVED":
                self._owners[int(match[1])] = node
            again.setdefault((node, reply.code == "ASK"), []).append(i)
        return again


def _range_of(entry: Any, asked: Address) -> tuple[int, int, Address]:
    """First and last slot and the server that has them, of what ``asked`` said to CLUSTER SLOTS.

    Raises:
        ProtocolError: it said something else.
    """
    match entry:
        case [int(first), int(last), [bytes() | None as host, int(port), *_], *_]:
            known = b"" if host is None or host == b"?" else host  # unknown: it is the address that you came by
            if 0 <= first <= last < SLOTS and 0 < port < 65536 and known.isascii():
                return first, last, Address(known.decode() or asked.host, port)
    raise ProtocolError(f"{asked}: a map of the cluster that is none: {str(entry)[:200]}")
