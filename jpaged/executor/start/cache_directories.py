"""Where compiled programs are kept between runs, and whether what lies there can be trusted.

A compiled program is code, and reading it back runs some (JAX serializes programs as pickles). So it is read only from
directories and files that no other user of the machine can write.
"""

import os
import stat
import warnings
from functools import cache
from pathlib import Path

import jax

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

CACHE_DIR_VARIABLE = "JPAGED_CACHE_DIR"


def cache_directory(name: str) -> Path | None:
    """Where compiled programs are kept between runs: "xla" by JAX, "programs" by `ExecutableCache`.

    `JPAGED_CACHE_DIR` chooses the directory above ($XDG_CACHE_HOME/jpaged, else ~/.cache/jpaged); empty means None. The
    directory is this user's alone. One that belongs to another user is not used, and a warning says so.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (Path(chosen) if chosen else base / "jpaged") / name
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
        if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
            directory.chmod(0o700)
            found = directory.stat()
    except OSError:
        return None  # a read-only home: start a little slower rather than not at all
    if not is_own(found):
        _warn_of(directory)
        return None
    return directory


def cache_directories() -> list[Path]:
    """All directories of compiled programs that are kept between runs."""
    found = (cache_directory(name) for name in ("programs", "xla"))
    return [directory for directory in found if directory is not None]


def is_own(found: os.stat_result) -> bool:
    """Whether a file or directory is this user's or root's, and no other user may write it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE


@cache
def _warn_of(directory: Path) -> None:
    warnings.warn(
        f"{directory} belongs to another user, who could have put any code there; nothing is cached. Set"
        f" {CACHE_DIR_VARIABLE} to a directory of your own.",
        stacklevel=2,
    )


def enable_persistent_cache() -> Path | None:
    """Points JAX's compilation cache at a directory of the user's, unless one is set already."""
    if directory := jax.config.values["jax_compilation_cache_dir"]:
        return Path(directory)
    directory = cache_directory("xla")
    if directory is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory
