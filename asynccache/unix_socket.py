"""Unix sockets to listen at: another process's socket is never removed, and only chosen users may connect."""

from __future__ import annotations

import errno
import os
import socket
import stat


def is_free(path: str) -> bool:
    """Return False if a process listens at ``path``. A socket that a killed process has left is removed. Never blocks.
    Raises OSError: ``path`` is no socket, or cannot be asked."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError("there is something that is no socket")
    except FileNotFoundError:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN):  # EAGAIN: so many wait to be accepted that there is no room for one more
        return False
    if code != errno.ECONNREFUSED:
        raise OSError(code, os.strerror(code))
    os.unlink(path)
    return True


def bound(path: str, group: int | None = None) -> socket.socket:
    """Return a Unix socket at ``path`` to which only this user, or ``group`` as well, may connect, from the first
    moment on. Raises OSError: there can be none."""
    if not is_free(path):
        raise OSError("somebody listens there")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
    except BaseException:
        made.close()
        raise
    return made
