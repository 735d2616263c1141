"""Where compiled programs are kept between runs."""

import os
from pathlib import Path

import jax

CACHE_DIR_VARIABLE = "JPAGED_CACHE_DIR"


def cache_directory(name: str) -> Path | None:
    """Where compiled programs are kept between runs: "xla" by JAX, "programs" by `ExecutableCache`.

    `JPAGED_CACHE_DIR` chooses the directory above ($XDG_CACHE_HOME/jpaged, else ~/.cache/jpaged); empty means None.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (Path(chosen) if chosen else base / "jpaged") / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home: start a little slower rather than not at all
    return directory


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
