"""Where the command begins and ends: Ctrl-C and SIGTERM are quiet while its modules are loaded and after its last word.

Law: SIGTERM does what Ctrl-C would do at that moment, because its handler calls the handler that SIGINT has then. A
command that either of them ended has its own exit status for each. A second SIGTERM ends the process at once: the first
one gives the signal back to the kernel, which asks nobody.
"""

import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143


class Termination:
    """A handler of SIGTERM. ``came``: whether there was one."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Do what Ctrl-C does now; where SIGINT is ignored, as in a shell's background job, do what it does by default.

        Raises:
            KeyboardInterrupt: that is what Ctrl-C does now.
        """
        self.came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def main() -> int:
    """The command, from ``sys.argv``; the exit status."""
    termination = Termination()
    signal.signal(signal.SIGTERM, termination)
    try:
        from asynccache.cli.main import main as command  # within: this takes longer than all else before it

        status = command()
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        while True:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                break
            except KeyboardInterrupt:                    # only the interpreter's own end is left to interrupt
                continue
    return TERMINATED if status == INTERRUPTED and termination.came else status
