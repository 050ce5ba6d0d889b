"""What goes over a link between the head and a worker: typed values, several of them in one frame.

Laws:
* A frame is a MessagePack array of messages; a message is an array that begins with the number of its kind.
* Everything is checked while it is read: a frame that holds anything else raises ``RankFailure``, which ends the link,
  and none of its messages is acted on.
* All that the head says is for every worker alike, and is encoded once.
* A reason, which may be anybody's text, can always be sent: it is cut off at ``MOST_REASON``, and what has no UTF-8 in
  it is replaced.

``call``: a number of the head's; the answer to a message that has one carries the same number, and comes exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from asynccache.config import CacheConfig, Component, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.plan import BackupHost, BackupStorage, Clone, Copy, LoadBack, Move, Status, StoredPages
from asynccache.errors import RankFailure
from asynccache.storage.options import StoreOptions
from asynccache.worker.contract import Asked, Read

Places = tuple[int, int, int]


MOST_REASON = 4096
"""Bytes of a reason."""


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A value that goes over a link."""


# the handshake


class Hello(Message):
    """A worker's first word: the version of asynccache that it runs, and its rank."""

    version: str
    rank: int


class Welcome(Message):
    """The head's answer: how many ranks there are by tp, cp and pp."""

    topology: Places


class Call(Message):
    """From the head, and answered once."""

    call: int


class Answer(Message):
    """To the call of this number."""

    call: int


# from the head


class Settings(Message):
    """A ``CacheConfig`` in plain values. ``components``: the class of each, and its fields."""

    components: tuple[tuple[str, dict[str, Any]], ...]
    sidecars: tuple[dict[str, Any], ...]
    others: dict[str, Any]


class Open(Call, tag=1):
    """Open pools and stores. Answered by ``Opened``."""

    settings: Settings


class Ready(Message, tag=2):
    """All workers are open: the cache takes requests."""


class Kind(IntEnum):
    """What an effect copies: from the device to the host, back, or on the device."""

    BACKUP = 0
    LOAD = 1
    CLONE = 2


BACKUP, _CLONE = Kind.BACKUP, Kind.CLONE  # to look one up in an enum takes 0.2 µs, in Python 3.11


class Perform(Message, tag=3):
    """An effect of the core, when the batches ``after`` are over on the device. ``source``: the load that a private
    copy is made of, or 0."""

    kind: Kind
    op: int
    moves: tuple[Move, ...]
    source: int = 0
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, effect: Copy, after: tuple[int, ...] = ()) -> Perform:
        """``effect``, to be sent."""
        return cls(_KINDS[type(effect)], effect.op, effect.moves, effect.after if type(effect) is Clone else 0, after)

    @property
    def effect(self) -> Copy:
        """What was sent."""
        if self.kind is _CLONE:
            return Clone(self.op, self.moves, self.source)
        return (BackupHost if self.kind is BACKUP else LoadBack)(self.op, self.moves)


_KINDS = {BackupHost: Kind.BACKUP, LoadBack: Kind.LOAD, Clone: Kind.CLONE}


class Forget(Message, tag=6):
    """The head has closed this load or private copy, which failed: nothing that is said from now on needs it."""

    op: int


class SendBatch(Message, tag=7):
    """A batch of the engine's work. ``loads``: the loads that it needs."""

    number: int
    payload: bytes
    loads: tuple[int, ...] = ()


class Backup(NamedTuple):
    """A ``BackupStorage`` as it is sent. Its own annotations are no use to a decoder: a compiled core keeps of
    ``tuple[StoredPages, ...]`` that it is a tuple."""

    op: int
    pages: tuple[StoredPages, ...]


class Store(Call, tag=8):
    """Write host pages to the stores. Answered by ``Written``."""

    batch: tuple[Backup, ...]

    @classmethod
    def of(cls, call: int, batch: Sequence[BackupStorage]) -> Store:
        """``batch``, to be sent."""
        return cls(call, tuple([Backup(*effect) for effect in batch]))

    @property
    def effects(self) -> list[BackupStorage]:
        """What was sent."""
        return [BackupStorage(*backup) for backup in self.batch]


class GiveUp(Message, tag=9):
    """Write no more of the batch that begins with this operation than what is under way."""

    op: int


class Ask(Call, tag=10):
    """Which of these pages do the stores have? Answered by ``Answers``."""

    asked: tuple[Asked, ...]


class Fetch(Call, tag=11):
    """Read these pages into host slots; ``run``: see ``Worker.read``. Answered by ``Answers``."""

    reads: tuple[Read, ...]
    run: bool


class Delete(Call, tag=12):
    """Forget stored pages; ``hashes`` joined. Answered by ``Done``."""

    hashes: bytes


class Clear(Call, tag=13):
    """Forget everything that is stored. Answered by ``Done``."""


class Flush(Call, tag=14):
    """Make durable what is stored. Answered by ``Done``."""


class Probe(Message, tag=15):
    """Try stores that are left alone again, if it is time, with the key of this page."""

    page_hash: bytes


class OpenStore(Call, tag=16):
    """Open a store under this number. Answered by ``StoreOpened``."""

    number: int
    url: str
    options: dict[str, str]
    position: int | None


class UseStore(Message, tag=17):
    """Ask it from now on."""

    number: int
    position: int | None


class DropStore(Call, tag=18):
    """Close one that was opened, if it was, and is not used. Answered by ``Done``."""

    number: int


class LeaveStore(Message, tag=19):
    """Ask it nothing more."""

    number: int


class CloseStore(Call, tag=20):
    """Close one that was left. Answered by ``Done``."""

    number: int


class Watch(Message, tag=21):
    """Tell by ``Keys`` what it holds, from now on or (``on`` false) no more."""

    number: int
    on: bool


class Cancel(Message, tag=22):
    """Nobody wants the answer of this call. It is answered when its buffers are let go."""

    call: int


class Close(Call, tag=23):
    """Close stores, pools and device; ``patience``: see ``LocalWorker.aclose``. Answered by ``Done``, the last word."""

    patience: float


class Lost(Message, tag=24):
    """The group is over: what ``rank`` has come to."""

    rank: int
    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


Orders = (
    Open | Ready | Perform | Forget | SendBatch | Store | GiveUp | Ask | Fetch | Delete | Clear | Flush | Probe
    | OpenStore | UseStore | DropStore | LeaveStore | CloseStore | Watch | Cancel | Close | Lost
)  # fmt: skip
"""What a head says."""

# from a worker


class Ended(Message, tag=1):
    """Operations have let go of their buffers, in this order, and all have come to the same."""

    status: Status
    ops: list[int]


class Over(Message, tag=2):
    """A batch is over, or will not run. ``error``: the engine could not run it."""

    number: int
    error: str = ""

    def __post_init__(self) -> None:
        self.error = _sendable(self.error)


class Done(Answer, tag=3):
    """A call without a result went well."""


class Failed(Answer, tag=4):
    """A call failed. ``kind``: the error's class."""

    kind: str
    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


class Opened(Answer, tag=5):
    """``layers``: the last that this worker has, and one. ``weights``: bytes a page, of the pools that have any.
    ``stores``: nearest first, and whether others write there, too. ``digest``: of the pool whose stored pages stand for
    FULL; empty, if it has none here."""

    layers: int
    weights: dict[str, int]
    stores: tuple[tuple[StoreOptions, bool], ...]
    digest: bytes


class Answers(Answer, tag=6):
    """A ``Result`` a page, for each pool that was asked about or read."""

    answers: tuple[bytes, ...]


class Written(Answer, tag=7):
    """See ``Stored``."""

    failed: tuple[int, ...]
    pages: int
    full_pages: int
    bytes: int


class StoreOpened(Answer, tag=8):
    """A store is open. ``shared``: whether others write there, too."""

    options: StoreOptions
    shared: bool


class Keys(Message, tag=9):
    """A store that is watched has these keys, or has them no more."""

    store: int
    there: bool
    keys: tuple[bytes, ...]


class Health(Message, tag=10):
    """Whether all stores refuse calls."""

    shut: bool


class Counters(Message, tag=11):
    """What the stores count: in sum, and by name."""

    storage: dict[str, int | float]
    stores: dict[str, dict[str, int | float]]


class Died(Message, tag=12):
    """This worker cannot go on."""

    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


News = Ended | Over | Keys | Health | Counters | Died | Done | Failed | Opened | Answers | Written | StoreOpened
"""What a worker says."""


def _sendable(reason: str) -> str:
    if len(reason) * 4 <= MOST_REASON and reason.isascii():
        return reason
    return reason.encode(errors="replace")[:MOST_REASON].decode(errors="ignore")


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """What reads a frame, or a word of the handshake. It raises ``RankFailure``: what is given is none."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(frame: bytes) -> Any:
        try:
            return decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RankFailure(f"sent what is no message: {error}") from None

    return decoded


encode = msgspec.msgpack.Encoder().encode
"""A frame of messages, or a word of the handshake."""
decode_orders: Callable[[bytes], list[Orders]] = _decoder(list[Orders])
decode_news: Callable[[bytes], list[News]] = _decoder(list[News])
decode_hello: Callable[[bytes], Hello] = _decoder(Hello)
decode_welcome: Callable[[bytes], Welcome] = _decoder(Welcome)


# settings as plain values

_COMPONENTS: dict[str, type[Component]] = {kind.__name__: kind for kind in (Full, SlidingWindow, Mamba)}


def settings_of(config: CacheConfig) -> Settings:
    """``config``, to be sent."""
    plain = msgspec.to_builtins(config)  # not encoded yet: a worker of this process may have what no frame can hold
    kinds = [type(part).__name__ for part in config.components]
    return Settings(tuple(zip(kinds, plain.pop("components"), strict=True)), tuple(plain.pop("sidecars")), plain)


def config_of(settings: Settings) -> CacheConfig:
    """The configuration that was sent. Raises ``RankFailure``: it is none."""
    try:
        components = tuple(_COMPONENTS[kind](**part) for kind, part in settings.components)
        sidecars = tuple(Sidecar(**part) for part in settings.sidecars)
        return CacheConfig(components=components, sidecars=sidecars, **settings.others)
    except (KeyError, TypeError, ValueError) as error:
        raise RankFailure(f"sent settings that are none: {error}") from None
