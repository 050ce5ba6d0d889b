"""Unix sockets: who is at the other end, and one that only some may connect to."""

from __future__ import annotations

import errno
import grp
import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path

from asynccache.errors import ConfigError
from asynccache.unix_socket import bound, is_free

SO_PEERGROUPS, SO_PEERPIDFD = 59, 77  # of Linux; Python does not name them


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process at the other end, its user and its group. The process is 0 if it is in a container whose
    processes cannot be seen from here."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def groups_of(sock: socket.socket) -> list[int]:
    """Return the other groups of the process at the other end. Raises OSError: there are more than 256."""
    data = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)  # Python has no room for more
    return [number for (number,) in struct.iter_unpack("I", data)]


def pidfd_of(sock: socket.socket, pid: int) -> int:
    """Return a pidfd of the process at the other end. Raises OSError: it has gone, or cannot be seen from here."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise  # it has gone, and its number may be another one's
        return os.pidfd_open(pid)  # before Linux 6.5


def process_of(pidfd: int) -> tuple[str, int] | None:
    """Return an identity that no other living process has; None if there is none.

    Since Linux 6.9 it is the inode of the process's pidfds. Before, all pidfds share the inode of anonymous files; then
    it is the number of the process, if that can be seen from here: in another container the same number may stand for
    another.
    """
    anonymous = os.eventfd(0)
    try:
        inode = os.fstat(pidfd).st_ino
        if inode != os.fstat(anonymous).st_ino:
            return "inode", inode
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
            pid = int(next(line for line in lines if line.startswith("Pid:"))[4:])
            return ("pid", pid) if pid > 0 else None  # 0: it cannot be seen; -1: it has gone
        return None
    finally:
        os.close(anonymous)


def is_dead(pidfd: int) -> bool:
    """Return True if the process has died."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def group_id(group: str) -> int:
    """Return the number of a group. Raises ConfigError: there is no such group."""
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"group={group!r}: there is no such group") from None


def listening_socket(path: str, group: int | None, backlog: int) -> socket.socket:
    """Return a Unix socket at ``path`` that listens, to which only this user, or ``group``, may connect. Raises
    ConfigError: there can be none."""
    free_path(path)
    try:
        made = bound(path, group)
    except OSError as error:
        raise ConfigError(f"listen=unix:{path}: {error.strerror or error}") from None
    made.listen(backlog)
    return made


def free_path(path: str) -> None:
    """Raise ConfigError if somebody listens at ``path``, or if no socket can be made there. The socket of a killed
    process is removed."""
    try:
        why = None if is_free(path) else "a host process listens there; --replace takes over from it"
    except OSError as error:
        why = error.strerror or str(error)
    if why is not None:
        raise ConfigError(f"listen=unix:{path}: {why}")
