"""Real models with random weights, small enough to run in milliseconds. Nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest

pytest.importorskip("transformers")

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()  # which optional kernels are missing
