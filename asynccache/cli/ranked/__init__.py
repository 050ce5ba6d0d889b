"""``stress`` and ``replay`` over several ranks, processes of this machine with pools and stores of their own.

Law: the command is the clock and the frontend. It says in *ticks*, the same to every rank, which requests arrive and
which are aborted; a rank does one scheduler iteration a tick and answers with what its tree has become. What a rank
does depends on ticks and on what steps granted, never on a clock of its own; what takes how long is its own affair.

``session`` is a run, ``crew`` its processes, ``conductor`` its ticks; ``child`` is a rank, ``scheduler`` and ``server``
what it does in a tick, ``lives`` how its requests take turns; ``messages`` go between; ``shard`` is a rank's part of
pools and stores; ``digest`` and ``merge`` compare ranks and add them up.
"""
