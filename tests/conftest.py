"""Shared by all tests: the CPU as the device, one compilation cache for all workers, and Ctrl-C that is heard."""

import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JPAGED_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jpaged-tests"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, for all that is started here as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:  # one thread each: tiny models gain nothing from more, and on a busy machine lose up to fifty times
    import torch
except ImportError:
    pass
else:
    torch.set_num_threads(1)
