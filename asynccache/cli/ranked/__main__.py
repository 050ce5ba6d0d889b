"""The program of one rank's process, ``python -m asynccache.cli.ranked RANK``; its duty comes as a line of JSON on
standard input. The rank's own module is imported behind that: it imports torch, which takes seconds, and a command that
is killed meanwhile ends this process, too."""

from __future__ import annotations

import sys

from asynccache.cli.ranked.duty import read_duty

if __name__ == "__main__":
    duty = read_duty()
    from asynccache.cli.ranked.rank import main

    sys.exit(main(duty))
