"""Bounds what compiled programs take on disk: those that were used least recently go first.

    JPAGED_CACHE_DIR/programs/<64 hexadecimal digits>    ours: loading one renews its time of modification
    JPAGED_CACHE_DIR/xla/<name>-cache                    JAX's: the time of last access, as the file system keeps it

Several processes may do this at once, beside others that load and write. Nothing is locked: what was used within the
last hour stays, whatever the limit; a process that has opened a file can read it to its end; and a program that is gone
is compiled again.
"""

import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jpaged.api.errors import InvalidParameterError, shown

log = logging.getLogger("jpaged.startup")

CACHE_LIMIT_VARIABLE = "JPAGED_CACHE_LIMIT_GIB"

DEFAULT_LIMIT_GIB = 20.0
"""Generous, so that nobody compiles again who uses many models: a small model's programs take a quarter of a MiB each
on a CPU. Yet upgrades, each of which leaves all programs of before behind, cannot fill a disk.
"""

IN_USE_S = 3600.0
"""What was used within it stays: several times what the longest start takes."""

_PROGRAM = re.compile(r"[0-9a-f]{64}|.+-cache")


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    used_at: float


def cache_limit_bytes(environment: Mapping[str, str]) -> float:
    """What compiled programs may take on disk.

    Raises:
        InvalidParameterError: the environment variable is no such size.
    """
    value = environment.get(CACHE_LIMIT_VARIABLE, "").strip()
    try:
        gib = float(value or DEFAULT_LIMIT_GIB)
    except ValueError:
        gib = math.nan
    if not gib > 0:
        raise InvalidParameterError(
            f"{CACHE_LIMIT_VARIABLE} must be a number of GiB above 0, or inf for no limit, got {shown(value)}; unset "
            f"it to have {DEFAULT_LIMIT_GIB:g}."
        )
    return gib * 2**30


def note_use(path: Path) -> None:
    """Tells other processes, too, that a program is used now."""
    with suppress(OSError):  # a directory that this user may only read
        os.utime(path)


def remove_least_used(directories: Iterable[Path], limit_bytes: float) -> int:
    """Removes programs from these directories until they take at most so much together, but none used within
    `IN_USE_S`. Returns how many bytes it has removed.
    """
    files = [file for directory in directories for file in _programs(directory)]
    excess = sum(file.size for file in files) - limit_bytes
    oldest_kept = time.time() - IN_USE_S  # noqa: TID251  # the clock of files
    removed = 0
    for file in sorted(files, key=lambda file: file.used_at):
        if removed >= excess or file.used_at > oldest_kept:
            break
        try:
            if _used_at(os.stat(file.path)) > oldest_kept:  # since they were listed
                continue
            os.unlink(file.path)
        except FileNotFoundError:  # another process has removed it
            excess -= file.size
        except OSError:  # it is another user's
            continue
        else:
            removed += file.size
    if removed:
        log.info("%.1f MiB of programs that were used least recently are removed from disk", removed / 2**20)
    return removed


def _programs(directory: Path) -> Iterator[_File]:
    """Nothing but programs: neither files half written nor claims, nor what a user has put there."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                if _PROGRAM.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    yield _File(entry.path, found.st_size, _used_at(found))


def _used_at(found: os.stat_result) -> float:
    return max(found.st_mtime, found.st_atime)
