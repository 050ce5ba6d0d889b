"""``python -m asynccache``: the ``asynccache`` command, for where it is not on the path."""

import sys

from asynccache.cli.entry import main

sys.exit(main())
