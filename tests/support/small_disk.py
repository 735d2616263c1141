"""A small file system that a drill can fill."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(parent: Path, size_kib: int) -> Iterator[Path | None]:
    """A file system of its own below this directory; None where this user may not mount any."""
    path = parent / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False)


@contextlib.contextmanager
def filled(disk: Path, left_bytes: int = 0) -> Iterator[None]:
    """The disk has only so much room until the end of the context."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        with filler.open("r+b") as file:
            file.truncate(max(0, filler.stat().st_size - left_bytes))
        yield
    finally:
        filler.unlink(missing_ok=True)
