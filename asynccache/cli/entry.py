"""The command's entry point: it handles Ctrl-C and SIGTERM from the first import to the end of the process.

While modules are loaded and after the command has ended, both signals end it without a traceback. SIGTERM does
what Ctrl-C would do at that moment, because its handler calls the handler that SIGINT has then. The exit status is 130
after Ctrl-C and 143 after SIGTERM. A second SIGTERM ends the process at once, because the first one restores the
kernel's default action.
"""

import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143


class Termination:
    """A handler of SIGTERM."""

    def __init__(self) -> None:
        self.came = False
        """Whether the signal has come."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call the present handler of SIGINT. Where SIGINT is ignored, as in a shell's background job, raise
        KeyboardInterrupt.

        Raises:
            KeyboardInterrupt: the handler of SIGINT raises it, or SIGINT is ignored.
        """
        self.came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def main() -> int:
    """Run the command with the process's arguments; returns its exit status."""
    termination = Termination()
    signal.signal(signal.SIGTERM, termination)
    try:
        from asynccache.cli.main import main as command  # here, because a signal may come while this is imported

        status = command()
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        while True:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                break
            except KeyboardInterrupt:                    # the command is over, so there is nothing left to interrupt
                continue
    return TERMINATED if status == INTERRUPTED and termination.came else status
