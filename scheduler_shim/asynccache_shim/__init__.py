"""asynccache_shim: a continuous-batching scheduler between a serving stack and asynccache.

These are its public names. ``asynccache_hf`` has models of transformers that it can run.
"""

from __future__ import annotations

from asynccache_shim.board import SchedulerConfig
from asynccache_shim.model import NO_TOKEN, Batch, Checkpoint, Chunk, Model, Sampling
from asynccache_shim.request import Finish, Limits, Matched, Request, State
from asynccache_shim.scheduler import Scheduler
from asynccache_shim.shards import follow

__all__ = [
    "NO_TOKEN",
    "Batch",
    "Checkpoint",
    "Finish",
    "Limits",
    "Matched",
    "Model",
    "Request",
    "Sampling",
    "Scheduler",
    "SchedulerConfig",
    "State",
    "Chunk",
    "follow",
]
