"""Two engines on one card over time: what one does not need serves the other (`--part sharing`).

    A starts, B starts      each with the pages of its longest sequence
    A busy                  A's pool grows
    A idle                  after `--kv-idle-release-s` its pages go back
    B busy                  and serve B
    A asleep, B busy        A has nothing but its addresses and weights
    B idle, A awake, A busy the same tokens as at first

Beside what the engines say of themselves, the card's memory is sampled all the while, as `nvidia-smi` sees it.
"""

import argparse
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from jpaged.bench.engine_processes import EngineProcess, engine_argv
from jpaged.host.devices import visible_gpus

RELEASE_S = 1.0
"""`kv_idle_release_s` by default."""

_SPARE_S = 2.0
"""That pages have to go back in, once they were idle for so long."""


class CardMemory:
    """The memory over time of the first GPU that JAX would use, by `nvidia-smi`; nothing where there is none.

    samples: (seconds since the beginning, GB in use).
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._begun = time.perf_counter()
        self._process: subprocess.Popen[str] | None = None
        gpus = visible_gpus(os.environ)
        if shutil.which("nvidia-smi") is None or not gpus:
            return
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpus[0], "-lms", "250"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.samples.append((round(time.perf_counter() - self._begun, 2), int(line) * 2**20 / 1e9))

    def now(self) -> float | None:
        """GB in use at the last look."""
        return self.samples[-1][1] if self.samples else None

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def measure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A figure for each phase as it ends, and the samples.

    Raises:
        EngineDeadError: an engine ended.
    """
    release_s = RELEASE_S if args.kv_idle_release_s is None else args.kv_idle_release_s
    layout = next((one for one in args.layout or () if one != "paged"), "sliced")
    argv = [*engine_argv(parser, args, layout, kv_idle_release_s=release_s), "--obeys"]
    rest = f"rest {release_s + _SPARE_S}"
    card = CardMemory()
    begun = time.perf_counter()
    first = ""
    try:
        with EngineProcess("A", argv) as a, EngineProcess("B", argv) as b:
            for phase, engine, command in (
                ("A starts", a, "rest 0"),
                ("B starts", b, "rest 0"),
                ("A busy", a, "serve"),
                ("A idle", a, rest),
                ("B busy", b, "serve"),
                ("A asleep", a, "sleep"),
                ("B busy, A asleep", b, "serve"),
                ("B idle", b, rest),
                ("A awake", a, "wake"),
                ("A busy again", a, "serve"),
            ):
                answer = engine.ask(command)
                figure = {"phase": phase, "at_s": time.perf_counter() - begun, "engine": engine.name, **answer}
                if "tokens_sha256" in answer:  # both have the same model and get the same prompts
                    first = first or answer["tokens_sha256"]
                    figure["same_tokens"] = answer["tokens_sha256"] == first
                yield figure | {"card_gb": card.now()}
    finally:
        card.end()
    yield {"phase": "all", "card_gb_over_time": card.samples}
