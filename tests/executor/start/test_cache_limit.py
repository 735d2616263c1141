"""What compiled programs take on disk is bounded, and no process loses what it or another is about to load."""

import math
import os
import secrets
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.start import cache_limit
from jpaged.executor.start.cache_limit import CACHE_LIMIT_VARIABLE, cache_limit_bytes, remove_least_used
from jpaged.executor.start.executable_cache import ExecutableCache
from tests.support.jax_cache import jax_cache
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def ours(number):
    return f"{number:064x}"


def write(path, used_hours_ago, size=100):
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    used_at = time.time() - 3600 * used_hours_ago  # noqa: TID251  # the clock of files
    os.utime(path, (used_at, used_at))
    return path


def test_the_programs_used_least_recently_go_until_the_rest_fits(tmp_path):
    used_hours_ago = (5, 3, 7, 4, 6)
    files = {hours: write(tmp_path / ours(hours), hours) for hours in used_hours_ago}
    assert remove_least_used([tmp_path], 500) == 0
    assert remove_least_used([tmp_path], 350) == 200
    assert {hours for hours, file in files.items() if file.exists()} == {3, 4, 5}
    assert remove_least_used([tmp_path, tmp_path / "none"], 350) == 0


def test_jaxs_programs_count_and_go_as_ours_do(tmp_path):
    old = [write(tmp_path / "programs" / ours(0), 9), write(tmp_path / "xla" / "jit_f-0a1b-cache", 8)]
    kept = [write(tmp_path / "programs" / ours(1), 7), write(tmp_path / "xla" / "jit_g-0a1b-cache", 6)]
    assert remove_least_used([tmp_path / "programs", tmp_path / "xla"], 200) == 200
    assert not any(file.exists() for file in old)
    assert all(file.exists() for file in kept)


def test_what_was_used_within_the_hour_stays_whatever_the_limit(tmp_path):
    recent, old = write(tmp_path / ours(0), 0.9), write(tmp_path / ours(1), 1.1)
    assert remove_least_used([tmp_path], 1) == 100
    assert recent.exists()
    assert not old.exists()


def test_nothing_but_programs_counts_or_goes(tmp_path):
    others = [write(tmp_path / name, 99, 10_000) for name in ("tmpabc", "0.claim", "notes.txt", ours(1)[1:])]
    (tmp_path / ours(2)).mkdir()
    program = write(tmp_path / ours(3), 99)
    assert remove_least_used([tmp_path], 100) == 0
    assert remove_least_used([tmp_path], 99) == 100
    assert all(file.exists() for file in others)
    assert not program.exists()


@pytest.mark.parametrize("what", ["loads", "writes", "removes"])
def test_a_process_may_do_anything_with_a_program_once_it_is_listed(tmp_path, monkeypatch, what):
    """What another one loads or writes meanwhile stays, and the next one goes; what it removes counts as gone."""
    first, second = write(tmp_path / ours(0), 9), write(tmp_path / ours(1), 8)
    listed = cache_limit._programs

    def another_process_is_quicker(directory):
        files = list(listed(directory))
        if what == "loads":
            ExecutableCache.load(first, jax.devices()[:1])
        elif what == "writes":
            os.replace(write(tmp_path / "tmpnew", 0), first)
        else:
            first.unlink()
        return files

    monkeypatch.setattr(cache_limit, "_programs", another_process_is_quicker)
    removed = remove_least_used([tmp_path], 100)
    assert first.exists() == (what != "removes")
    assert second.exists() == (what == "removes")
    assert removed == (0 if what == "removes" else 100)


def test_loading_a_program_renews_it(tmp_path):
    cache = ExecutableCache(tmp_path, ("model",), platforms=("cpu",))
    loaded, other = (cache.path((name,), (SHAPE,)) for name in ("loaded", "other"))
    addend = np.float32(secrets.randbelow(1 << 20))  # so that JAX's cache has never seen it
    ExecutableCache.save(loaded, jax.jit(lambda x: x + addend).lower(SHAPE).compile())
    write(other, 3)
    os.utime(loaded, (0, 0))
    assert ExecutableCache.load(loaded, jax.devices()[:1]) is not None
    remove_least_used([tmp_path], 1)
    assert loaded.exists()
    assert not other.exists()


def test_several_processes_may_remove_at_once(tmp_path):
    files = [write(tmp_path / ours(number), 1000 - number) for number in range(200)]
    together = threading.Barrier(4)

    def remove():
        together.wait()
        remove_least_used([tmp_path], 5_000)

    threads = [threading.Thread(target=remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file.exists() for file in files] == [False] * 150 + [True] * 50


def test_the_limit_is_a_number_of_gib_and_20_unless_one_is_set():
    assert cache_limit_bytes({}) == cache_limit_bytes({CACHE_LIMIT_VARIABLE: " "}) == 20 * 2**30
    assert cache_limit_bytes({CACHE_LIMIT_VARIABLE: "0.5"}) == 2**29
    assert cache_limit_bytes({CACHE_LIMIT_VARIABLE: "inf"}) == math.inf
    for wrong in ("0", "-1", "nan", "20 GiB"):
        with pytest.raises(InvalidParameterError, match=f"{CACHE_LIMIT_VARIABLE} must be.*{wrong}"):
            cache_limit_bytes({CACHE_LIMIT_VARIABLE: wrong})


def test_a_start_that_compiles_removes_what_is_too_much_and_a_warm_one_looks_at_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, "0.000001")
    options = TINY_ENGINE | {
        "model": str(write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False))
    }
    old = write(tmp_path / "cache" / "programs" / ours(0), 2, 2_000)
    with jax_cache(None):  # else that of other tests may answer, and ours stays empty
        LLM(**options).close()
        assert not old.exists()
        write(old, 2, 2_000)
        LLM(**options).close()
        assert old.exists()
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, "much")
    with pytest.raises(InvalidParameterError, match=CACHE_LIMIT_VARIABLE):
        LLM(**options)
