"""Shared by all tests: the CPU as the device, and one compilation cache for all workers."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JPAGED_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jpaged-tests"))

try:  # one thread each: tiny models gain nothing from more, and on a busy machine lose up to fifty times
    import torch
except ImportError:
    pass
else:
    torch.set_num_threads(1)
