"""write_back: nodes that a backup leaves out, because the host could never hold them, can still be evicted."""

from __future__ import annotations

from asynccache.core import audit
from tests.simulated.synchronous import SynchronousRuntime, core_config, spell


def test_a_leaf_that_was_left_out_of_its_paths_backup_waits_in_its_order() -> None:
    run = SynchronousRuntime(core_config(device=14, host=4, write_policy="write_back", write_back_watermark=0.8))
    first = run.lease(spell("abcdef"), new=8)
    assert first is not None
    for pages in (3, 6):  # a node for each commit: the host can hold the first of them
        first.compute(pages * run.page)
        assert first.commit(pages * run.page)
    first.release()
    second = run.lease(spell("xyz"))  # free pages are few now: backups of the coldest begin
    assert second is not None
    audit.check(run.core)
    run.flush()
    second.release()
    everything = run.lease(b"", new=14 * run.page)
    assert everything is not None
