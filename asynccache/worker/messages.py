"""The messages between the head and a worker: typed values, several of them in one frame of a link.

Laws:
* A frame is a MessagePack array of messages; a message is an array that begins with the number of its kind.
* Everything is checked while it is read: a frame that holds anything else raises ``RankFailure``, which ends the link,
  and none of its messages is acted on.
* All that the head says is for every worker alike, and is encoded once.
* A reason, which may be any text, can always be sent: it is cut off after ``MOST_REASON`` bytes, and characters that
  have no UTF-8 are replaced.

A message with a field ``call``, a number that the head chooses, gets exactly one answer, which carries the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from asynccache.config import CacheConfig
from asynccache.core.plan import BackupStorage, Status, StoredPages
from asynccache.errors import RankFailure
from asynccache.storage.url import StoreOptions
from asynccache.worker.contract import ReadOrder, StoreQuestion, Work

Places = tuple[int, int, int]


MOST_REASON = 4096
"""The most bytes of a reason."""


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A value that goes over a link."""

# the handshake


class Hello(Message):
    """A worker's first message: the version of asynccache that it runs, and its rank."""

    version: str
    rank: int


class Welcome(Message):
    """The head's answer: how many ranks there are by tp, cp and pp."""

    topology: Places


class Call(Message):
    """A message from the head that is answered once."""

    call: int


class Answer(Message):
    """A worker's answer to the call of this number."""

    call: int


# from the head


class OpenWorker(Call, tag=1):
    """Open pools and stores. Answered by ``WorkerOpened``."""

    settings: CacheConfig


class AllOpen(Message, tag=2):
    """All workers are open: the cache takes requests."""


class PerformWork(Message, tag=3):
    """Copy what one work says. Its end is told by ``WorksEnded``."""

    work: Work


class ForgetLoad(Message, tag=6):
    """This load or private copy has failed on some rank, and no later message of the head names it."""

    op: int


class SendBatch(Message, tag=7):
    """A batch of the engine's work. ``loads``: the loads that it needs."""

    number: int
    payload: bytes
    loads: tuple[int, ...] = ()


class SentBackup(NamedTuple):
    """A ``BackupStorage`` as it is sent. A decoder cannot use the annotations of ``BackupStorage`` itself: of
    ``tuple[StoredPages, ...]`` a compiled core keeps only that it is a tuple."""

    op: int
    pages: tuple[StoredPages, ...]


class WritePages(Call, tag=8):
    """Write host pages to the stores. Answered by ``PagesWritten``."""

    batch: tuple[SentBackup, ...]

    @classmethod
    def of(cls, call: int, batch: Sequence[BackupStorage]) -> WritePages:
        """Return the message for ``batch``."""
        return cls(call, tuple([SentBackup(*effect) for effect in batch]))

    @property
    def effects(self) -> list[BackupStorage]:
        """The batch as the core's effects."""
        return [BackupStorage(*backup) for backup in self.batch]


class GiveUp(Message, tag=9):
    """Write nothing more of the batch that begins with this operation, after what is under way."""

    op: int


class AskPages(Call, tag=10):
    """Ask which of these pages the stores have. Answered by ``PageResults``."""

    asked: tuple[StoreQuestion, ...]


class ReadPages(Call, tag=11):
    """Read these pages into host slots; ``run``: see ``Worker.read``. Answered by ``PageResults``."""

    reads: tuple[ReadOrder, ...]
    run: bool


class DeletePages(Call, tag=12):
    """Delete stored pages. ``hashes``: 32 bytes for each page, joined. Answered by ``CallDone``."""

    hashes: bytes


class ClearStores(Call, tag=13):
    """Delete everything that is stored. Answered by ``CallDone``."""


class FlushStores(Call, tag=14):
    """Make what is stored durable. Answered by ``CallDone``."""


class ProbeStores(Message, tag=15):
    """Probe stores that refuse calls, where that is due, with the key of this page."""

    page_hash: bytes


class OpenStore(Call, tag=16):
    """Open a store under this number. Answered by ``StoreOpened``."""

    number: int
    url: str
    options: dict[str, str]
    position: int | None


class UseStore(Message, tag=17):
    """Use this open store from now on, at ``position``; None: as the farthest."""

    number: int
    position: int | None


class DropStore(Call, tag=18):
    """Close this store, which is not used, if it was opened. Answered by ``CallDone``."""

    number: int


class LeaveStore(Message, tag=19):
    """Give this store no more calls from now on."""

    number: int


class CloseStore(Call, tag=20):
    """Close this store, which was left. Answered by ``CallDone``."""

    number: int


class WatchStore(Call, tag=21):
    """Tell by ``StoreKeys`` from now on which keys this store has. Answered by ``CallDone``, when all that it has by
    now were told."""

    number: int


class UnwatchStore(Message, tag=25):
    """Tell no more which keys this store has."""

    number: int


class CancelCall(Message, tag=22):
    """Cancel this call: nobody wants its answer any more. The answer still comes, when the call's buffers are let
    go."""

    call: int


class CloseWorker(Call, tag=23):
    """Close stores, pools and device. ``patience``: see ``LocalWorker.aclose``. Answered by ``CallDone``. The
    answer is the last message of a worker."""

    patience: float


class GroupLost(Message, tag=24):
    """The group is over. ``rank``: the rank that failed; -1 if that is a head without a rank. ``reason``: what it
    did."""

    rank: int
    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


HeadMessage = (
    OpenWorker | AllOpen | PerformWork | ForgetLoad | SendBatch | WritePages | GiveUp | AskPages | ReadPages
    | DeletePages | ClearStores | FlushStores | ProbeStores | OpenStore | UseStore | DropStore | LeaveStore | CloseStore
    | WatchStore | UnwatchStore | CancelCall | CloseWorker | GroupLost
)  # fmt: skip
"""Any message from a head, after the handshake."""

# from a worker


class WorksEnded(Message, tag=1):
    """Works have ended, in this order and all with ``status``, and their buffers are let go. ``works``: the first
    operation of each."""

    status: Status
    works: list[int]


class BatchOver(Message, tag=2):
    """A batch is over. ``error``: why the engine could not run it; empty if it did."""

    number: int
    error: str = ""

    def __post_init__(self) -> None:
        self.error = _sendable(self.error)


class CallDone(Answer, tag=3):
    """A call without a result went well."""


class CallFailed(Answer, tag=4):
    """A call failed. ``kind``: the name of the error's class."""

    kind: str
    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


class WorkerOpened(Answer, tag=5):
    """A worker is open. ``layers``: how many layers the model has, up to the last one that this worker has.
    ``weights``: bytes of a page, for each pool with bytes on this worker. ``stores``: the options of each, nearest
    first, and True if it is shared (``is_shared``). ``digest``: what turns a page's hash into its key in the pool whose
    stored pages stand for FULL; empty if this worker has no bytes of FULL."""

    layers: int
    weights: dict[str, int]
    stores: tuple[tuple[StoreOptions, bool], ...]
    digest: bytes


class PageResults(Answer, tag=6):
    """A ``Result`` for each page, as bytes for each pool that was asked about or read."""

    answers: tuple[bytes, ...]


class PagesWritten(Answer, tag=7):
    """A batch was written: the fields of ``StoredBatch``."""

    failed: tuple[int, ...]
    pages: int
    full_pages: int
    bytes: int


class StoreOpened(Answer, tag=8):
    """A store is open. ``shared``: see ``is_shared``."""

    options: StoreOptions
    shared: bool


class StoreKeys(Message, tag=9):
    """A watched store has these keys from now on or, if ``there`` is False, has them no more."""

    store: int
    there: bool
    keys: tuple[bytes, ...]


class StoreHealth(Message, tag=10):
    """The health of the stores. ``shut``: True if all of them refuse calls."""

    shut: bool


class StoreCounters(Message, tag=11):
    """The stores' counters: their sums, and those of each store by name."""

    storage: dict[str, int | float]
    stores: dict[str, dict[str, int | float]]


class WorkerDied(Message, tag=12):
    """The end of a worker that cannot go on."""

    reason: str

    def __post_init__(self) -> None:
        self.reason = _sendable(self.reason)


WorkerMessage = (
    WorksEnded | BatchOver | StoreKeys | StoreHealth | StoreCounters | WorkerDied | CallDone | CallFailed | WorkerOpened
    | PageResults | PagesWritten | StoreOpened
)  # fmt: skip
"""Any message from a worker, after the handshake."""


def _sendable(reason: str) -> str:
    if len(reason) * 4 <= MOST_REASON and reason.isascii():
        return reason
    return reason.encode(errors="replace")[:MOST_REASON].decode(errors="ignore")


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes a frame, or a message of the handshake. It raises ``RankFailure`` for anything
    else."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(frame: bytes) -> Any:
        try:
            return decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RankFailure(f"sent what is no message: {error}") from None

    return decoded


encode = msgspec.msgpack.Encoder().encode
"""Encodes a list of messages as a frame, or one message of the handshake."""
decode_head_messages: Callable[[bytes], list[HeadMessage]] = _decoder(list[HeadMessage])
decode_worker_messages: Callable[[bytes], list[WorkerMessage]] = _decoder(list[WorkerMessage])
decode_hello: Callable[[bytes], Hello] = _decoder(Hello)
decode_welcome: Callable[[bytes], Welcome] = _decoder(Welcome)
