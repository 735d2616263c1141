"""Programs kept on disk: found again when nothing they depend on has changed, and never in the way."""

import os
import pickle
import secrets
import stat
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.executor.start import executable_cache
from jpaged.executor.start.cache_directories import cache_directory
from jpaged.executor.start.executable_cache import ExecutableCache
from jpaged.pallas_kernels import registry
from jpaged.pallas_kernels.devices import Device
from tests.parallel.eight_devices import call_with_eight_devices
from tests.support.jax_cache import jax_cache

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def compiled(addend=1):
    return jax.jit(lambda x: 2 * x + addend).lower(SHAPE).compile()


def cache_in(directory, *depends_on):
    return ExecutableCache(directory, depends_on, platforms=("cpu",))


def test_a_program_that_was_kept_computes_the_same(tmp_path):
    path = cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))
    # XLA's CPU client cannot serialise again what it has itself read back, so this is a program that JAX's own
    # persistent cache, which all tests share, has never seen.
    addend = secrets.randbelow(1 << 20)
    ExecutableCache.save(path, compiled(addend))
    again = ExecutableCache.load(cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,)), jax.devices()[:1])
    np.testing.assert_array_equal(again(np.float32([1, 2, 3])), addend + np.float32([2, 4, 6]))


def test_a_program_that_calls_python_is_not_kept_and_does_no_harm(tmp_path):
    called = jax.jit(lambda x: jax.pure_callback(np.cos, SHAPE, x)).lower(SHAPE).compile()
    ExecutableCache.save(tmp_path / "called", called)
    assert not any(tmp_path.iterdir())


def runs_on_some_devices(directory):
    """Numbers that programs for some of eight devices give when they come from the cache."""
    found = []
    for devices in (jax.devices()[:1], jax.devices()[2:4]):
        mesh = jax.sharding.Mesh(devices, ("x",))
        x = jax.device_put(np.float32([1, 2, 3, 4]), jax.NamedSharding(mesh, jax.P("x")))
        path = Path(directory) / str(len(devices))
        with jax_cache(None):
            ExecutableCache.save(path, jax.jit(lambda x: x.sum()).lower(x).compile())
        found.append(float(ExecutableCache.load(path, devices)(x)))
    return found


def test_a_program_for_some_of_a_hosts_devices_runs_on_these(tmp_path):
    here = "tests.executor.start.test_executable_cache:runs_on_some_devices"
    assert call_with_eight_devices(here, str(tmp_path)) == [10.0, 10.0]


def test_a_program_is_found_by_all_that_it_depends_on(tmp_path):
    cache = cache_in(tmp_path, "model")
    path = cache.path(("decode", 8), (SHAPE,))
    others = [
        cache.path(("decode", 16), (SHAPE,)),
        cache.path(("decode", 8), (jax.ShapeDtypeStruct((4,), jnp.float32),)),
        cache.path(("decode", 8), (jax.ShapeDtypeStruct((3,), jnp.int32),)),
        cache.path(("decode", 8), (SHAPE, SHAPE)),
        cache_in(tmp_path, "another model").path(("decode", 8), (SHAPE,)),
    ]
    assert len({path, *others}) == 6
    assert ExecutableCache.load(path, jax.devices()) is None


def test_a_program_depends_on_the_gpu_and_on_the_version_of_triton(tmp_path, monkeypatch):
    def path() -> Path | None:
        return cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))

    paths = {path()}
    for capability in ((8, 0), (8, 6)):
        monkeypatch.setattr(executable_cache, "default_device", lambda capability=capability: Device("gpu", capability))
        paths.add(path())
    for version in ("3.9.0", "3.9.1"):
        monkeypatch.setattr(registry, "version", lambda package, version=version: version)
        paths.add(path())
    assert len(paths) == 5


def test_a_program_depends_on_the_settings_of_jax_but_not_on_what_they_report_or_where_it_is_kept(tmp_path):
    def path() -> Path | None:
        return cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))

    usual = path()
    assert usual is not None
    with jax.default_matmul_precision("highest"):
        assert path() != usual
    for name, value in (("jax_enable_x64", True), ("jax_default_matmul_precision", "float32")):
        with changed(name, value):
            assert path() != usual
    with changed("jax_log_compiles", True), changed("jax_compilation_cache_dir", "/elsewhere"):
        assert path() == usual
    assert path() == usual


def test_a_program_for_a_cpu_depends_on_its_features_and_is_not_kept_where_they_are_unknown(tmp_path, monkeypatch):
    def path():
        return cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))

    paths = {path()}
    assert None not in paths
    for features in (("flags: fpu",), ("flags: fpu avx2",)):
        monkeypatch.setattr(executable_cache, "cpu_features", lambda features=features: features)
        paths.add(path())
    assert len(paths) == 3
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert path() is None
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert path() in paths
    monkeypatch.setattr(executable_cache, "cpu_features", lambda: None)
    assert path() is None
    assert cache_in(tmp_path, "model").claim is None


def test_a_program_depends_on_the_flags_of_xla(tmp_path, monkeypatch):
    def path():
        return cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    usual = path()
    assert usual is not None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_pdl=false")
    assert path() != usual


@contextmanager
def changed(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def test_a_file_that_cannot_be_read_is_no_program(tmp_path):
    path = cache_in(tmp_path, "model").path(("decode", 8), (SHAPE,))
    ExecutableCache.save(path, compiled())
    path.write_bytes(path.read_bytes()[:1000])
    assert ExecutableCache.load(path, jax.devices()) is None


def test_a_directory_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    ExecutableCache.save(tmp_path / "file" / "program", compiled())
    assert ExecutableCache.load(tmp_path / "file" / "program", jax.devices()) is None


def test_there_is_room_where_files_can_be_made_and_much_is_free(tmp_path, monkeypatch):
    assert ExecutableCache.has_room(tmp_path)
    assert not any(tmp_path.iterdir())
    assert not ExecutableCache.has_room(Path("/proc/self"))  # where nobody may make a file
    monkeypatch.setattr(executable_cache, "LEAST_FREE_BYTES", 2**80)
    assert not ExecutableCache.has_room(tmp_path)


def test_what_killed_processes_left_is_swept_and_programs_and_fresh_files_stay(tmp_path):
    old = [tmp_path / name for name in ("tmpabc", "0.claim", "0123")]
    fresh = [tmp_path / name for name in ("tmpdef", "1.claim", "4567")]
    for file in old + fresh:
        file.touch()
    for file in old:
        os.utime(file, (0, 0))
    ExecutableCache.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "0123", *fresh])
    ExecutableCache.sweep(tmp_path / "none")


def test_without_a_directory_or_a_platform_that_is_kept_nothing_is(tmp_path):
    assert cache_in(None, "model").path(("decode", 8), (SHAPE,)) is None
    assert ExecutableCache(tmp_path, ("model",)).path(("decode", 8), (SHAPE,)) is not None
    assert ExecutableCache(tmp_path, ("model",), platforms=("gpu",)).path(("decode", 8), (SHAPE,)) is None


class Bomb:
    """Says that it was read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def given_to_another_user(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_a_file_that_another_user_may_have_written_is_not_read(tmp_path, monkeypatch, how):
    path, marker = tmp_path / "program", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Bomb(marker)))
    path.chmod(0o600)
    ExecutableCache.load(path, jax.devices())
    assert marker.exists()  # the pickle does what it says
    marker.unlink()
    if how == "owner":
        given_to_another_user(path, monkeypatch)
    else:
        path.chmod(0o660 if how == "group" else 0o602)
    assert ExecutableCache.load(path, jax.devices()) is None
    assert not marker.exists()


def test_the_directory_is_the_users_own_and_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path / "cache"))
    directory = cache_directory("programs")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    assert stat.S_IMODE(cache_directory("programs").stat().st_mode) == 0o700
    given_to_another_user(directory, monkeypatch)
    with pytest.warns(UserWarning, match="belongs to another user.*JPAGED_CACHE_DIR"):
        assert cache_directory("programs") is None
