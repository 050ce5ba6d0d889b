"""``python -m asynccache``: the ``asynccache`` command, also where its script is not on the path."""

import sys

from asynccache.cli.entry import main

sys.exit(main())
