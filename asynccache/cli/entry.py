"""Where the command begins and ends: Ctrl-C is quiet while its modules are loaded, and after its last word, too."""

import signal


def main() -> int:
    """The command, from ``sys.argv``; the exit status."""
    try:
        from asynccache.cli.main import main as command  # within: this takes longer than all else before it

        status = command()
    except KeyboardInterrupt:
        status = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # only the interpreter's own end is left
    return status
