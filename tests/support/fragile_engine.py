"""An engine process that ends, or hangs, whenever it is about to run certain requests: `EngineProcesses` starts it in
place of the real one where a test says so (`fragile`).

    JPAGED_FRAGILE=TOKEN:LENGTH:HOW     requests whose prompt ends with TOKEN, when LENGTH tokens of them are known
                                        HOW: "kill" (SIGKILL), "raise" (an error in the step) or "hang"
    JPAGED_FRAGILE_WEIGHTS=VALUE        weights in which this number stands: memory runs out when half of them are new
    JPAGED_FAKE_CUDA=UUID               its CPU is a device whose memory processes share (`fake_cuda.py`)
"""

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import jax

from jpaged.engine.loop import EngineCore
from jpaged.models.loading.live import WeightUpdater
from jpaged.processes import engine_process
from tests.support import fake_cuda

VARIABLE = "JPAGED_FRAGILE"
WEIGHTS_VARIABLE = "JPAGED_FRAGILE_WEIGHTS"


def _fragile(token: int, length: int, how: str) -> None:
    """Makes `EngineCore.step` break at such requests."""
    step = EngineCore.step

    def breaking(self: EngineCore, **options: Any) -> Any:
        slots = self.scheduler.slots
        for slot in slots.used().tolist():
            known = slots.known(slot)
            request = slots.requests[slot]
            if request is None or int(request.prompt_token_ids[-1]) != token or len(known) < length:
                continue
            if how == "raise":
                raise ArithmeticError("a step went wrong")
            while how == "hang":
                time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, **options)

    EngineCore.step = breaking  # type: ignore[method-assign]


def _fragile_weights(value: float) -> None:
    """Makes `WeightUpdater.apply` break at such weights."""
    apply = WeightUpdater.apply

    def breaking(self: WeightUpdater, weights: Any, update: Any) -> Any:
        if any(bool((one.array == value).any()) for one in update.writes):
            apply(self, weights, replace(update, writes=update.writes[: len(update.writes) // 2]))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory, said a test")
        return apply(self, weights, update)

    WeightUpdater.apply = breaking  # type: ignore[method-assign]


def make_fragile(value: str) -> None:
    """value: as of JPAGED_FRAGILE."""
    token, length, how = value.split(":")
    _fragile(int(token), int(length), how)


if __name__ == "__main__":
    if fake_cuda.VARIABLE in os.environ:
        fake_cuda.install(fake_cuda.FakeCuda(bytes.fromhex(os.environ[fake_cuda.VARIABLE])))
    if VARIABLE in os.environ:
        make_fragile(os.environ[VARIABLE])
    if WEIGHTS_VARIABLE in os.environ:
        _fragile_weights(float(os.environ[WEIGHTS_VARIABLE]))
    sys.exit(engine_process.main(sys.argv[1:]))
