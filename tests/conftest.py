"""Shared by all tests: the CPU as the device, programs that compile quickly, one compilation cache for all workers,
bytecode that is kept, few collections of garbage, memory that is given back, and Ctrl-C that is heard.

With `JPAGED_TESTS_SECONDS` tests that are not fast are skipped when the time is over.
`--fast` leaves only the tests named in `FAST`, without those marked `long`, and fails those that compile a program.
"""

import gc
import os
import signal
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory import give_back_if_large


def _cheapest_code() -> str:
    """XLA_FLAGS for code in one piece, from XLA's older emitters: the newer ones take two to three times as long. JAX
    0.10's code runs well at the least optimisation: without any it compiles in a third of the time, but a step of the
    tests' engines takes four times as long. Under later versions kernels are interpreted, whose many programs each run
    once. A sum stays one loop; XLA would cut it into windows, and write each of them out.
    """
    flags = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_disable_hlo_passes=tree_reduction_rewriter"]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        flags += ["--xla_backend_optimization_level=1", "--xla_cpu_use_fusion_emitters=false"]
    else:
        flags.append("--xla_backend_optimization_level=0")
        flags.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    return " ".join(flags)


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", _cheapest_code())
# To note where each operation stands in the sources takes some percent of an engine's start; no test looks at it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("JPAGED_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jpaged-tests"))
# PyTorch's threads: tiny models gain nothing from more, and on a busy machine lose up to fifty times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests start some hundred processes, each of which would compile the sources of this package for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, for all that is started here as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
FAST = (
    "bench/test_arguments.py",
    "bench/test_compare.py",
    "bench/test_device_trace.py",
    "bench/test_kernels_bench.py",
    "engine",
    "executor/start/test_one_shot.py",
    "executor/start/test_worker_threads.py",
    "host",
    "models/test_config.py",
    "models/test_published_configs.py",
    "processes/test_links.py",
    "processes/test_pool_view.py",
    "processes/test_router.py",
    "processes/test_wire.py",
    "scoring/test_ahead.py",
    "scoring/test_rows_and_inputs.py",
    "scoring/test_shards.py",
    "scoring/test_windows.py",
    "serving/test_http.py",
    "serving/test_http_connection.py",
    "serving/test_middleware.py",
    "serving/test_page.py",
    "serving/test_sampling.py",
    "test_help.py",
    "test_missing_packages.py",
    "test_rubbish.py",
    "text",
)
"""Files and directories of tests that compile nothing and load no model: control plane, protocol, text and API."""

SECONDS = "JPAGED_TESTS_SECONDS"
"""An environment variable. So many seconds after the start the tests that are not fast are skipped."""

_begun = time.monotonic()
_COMPILED = "/jax/core/compile/backend_compile_duration"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the tests that compile nothing (tests/conftest.py)")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # else only its workers collect
        gc.disable()  # imports and collection make millions of objects that all stay
    if not config.getoption("--fast"):
        return
    if missing := [name for name in FAST if not (TESTS / name).exists()]:
        raise pytest.UsageError(f"FAST in {__file__} names what is not in {TESTS}: {', '.join(missing)}")
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(_refuse_to_compile)


def _refuse_to_compile(event: str, duration: float, **_: Any) -> None:
    if event == _COMPILED:
        pytest.fail(f"compiles a program, so it is not one of the fast tests: see FAST in {__file__}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.getoption("--fast") and collection_path.is_file() and not _is_fast(collection_path)
    return True if left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the fast tests last: while they run, each of several workers ends within seconds of the others."""
    items.sort(key=lambda item: _is_fast(item.path))
    if config.getoption("--fast"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before a fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = os.environ.get(SECONDS)
    if seconds and time.monotonic() - _begun > float(seconds) and not _is_fast(item.path):
        pytest.skip(f"no time left: {SECONDS}={seconds}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # when fixtures are gone, too
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, a process that has grown large gives memory back."""
    if nextitem is None or nextitem.path != item.path:
        give_back_if_large()


@cache
def _is_fast(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in FAST)
