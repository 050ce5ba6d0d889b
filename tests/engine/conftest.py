"""Real models with random weights, small enough to run in milliseconds. Nothing is downloaded."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]

if not collect_ignore_glob:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # which optional kernels are missing
