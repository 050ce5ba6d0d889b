"""What is tested here needs the extras that the examples name."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import torch

torch.set_num_threads(1)
