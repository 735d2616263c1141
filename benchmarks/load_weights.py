"""How long a checkpoint takes from safetensors files to the device, and how much of the host's memory.

    python benchmarks/dummy_model.py qwen3-30b-a3b DIR --weights
    python benchmarks/load_weights.py DIR --json FILE

Host memory is what the process has beside the files' own pages, which the system takes back when others need them
(RssAnon and RssShmem of /proc/self/status, read every 20 ms): its peak while loading, and how much more that is than
before. Files that were written or read shortly before come from the system's cache; `--drop-cache` asks it to forget
them first.
"""

import argparse
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType

import jax

from jpaged import models
from jpaged.bench.report import write_report
from jpaged.models import ModelConfig


def host_bytes() -> int:
    """Of this process, without pages of files."""
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if not found:  # systems that do not tell them apart
        found = re.findall(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, found))


class Peak:
    """The most that `host_bytes` is within a `with` block."""

    def __init__(self) -> None:
        self.bytes = host_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, host_bytes())

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the checkpoint")
    parser.add_argument("--drop-cache", action="store_true", help="ask the system to forget the files' contents first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write JSON")
    args = parser.parse_args()
    files = sorted(args.directory.glob("*.safetensors"))
    if args.drop_cache:
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    model = models.build(ModelConfig.from_directory(args.directory), "auto")
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the device's context is no part of loading
    before = host_bytes()
    with Peak() as peak:
        begun = time.perf_counter()
        weights = models.load(model, args.directory)
        jax.block_until_ready(weights)
        seconds = time.perf_counter() - begun
    size = sum(file.stat().st_size for file in files)
    figures = {
        "bytes": size,
        "seconds": seconds,
        "gb_per_s": size / seconds / 1e9,
        "host_bytes_before": before,
        "host_bytes_peak": peak.bytes,
        "drop_cache": args.drop_cache,
    }
    print(
        f"{size / 1e9:.1f} GB in {seconds:.1f} s, {figures['gb_per_s']:.2f} GB/s; host memory at most"
        f" {peak.bytes / 2**30:.2f} GiB, {(peak.bytes - before) / 2**30:.2f} GiB more than before"
    )
    if args.json:
        write_report(args.json, "load weights", {"directory": args.directory.name}, figures)


if __name__ == "__main__":
    main()
