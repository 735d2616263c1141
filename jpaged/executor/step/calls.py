"""Calls compiled step programs on what is held on the device."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.held import Held
from jpaged.executor.step.program import StepProgram

_IN_ONE_ORDER = threading.Lock()
"""Held while a program of several devices is dispatched. Each of them runs one program at a time, and in the middle of
it waits for its peers: two that come to the devices in different orders, from engines in threads of their own, would
wait for each other for ever."""


CompileOnFirstUse = Callable[[StepProgram], CompiledProgram]
"""Gives a program that has not been compiled yet. Raises KeyError if there is no such program."""


class _Programs(dict[StepProgram, CompiledProgram]):
    """Compiled programs. One that is not there is compiled when it is looked up, where `compile` is given."""

    def __init__(self, programs: Mapping[StepProgram, CompiledProgram], compile: CompileOnFirstUse | None) -> None:
        super().__init__(programs)
        self._compile = compile

    def __missing__(self, program: StepProgram) -> CompiledProgram:
        if self._compile is None:
            raise KeyError(program)
        self[program] = compiled = self._compile(program)
        return compiled


class Calls:
    """Every call of a runner's programs goes through here.

    compile: gives the programs that are not there; None: all are there.

    Attributes:
        programs: those that are compiled, and by lookup all.
        held: what they read and update, as of the last call.
        dispatch: a context to dispatch any program in.
    """

    def __init__(
        self,
        programs: Mapping[StepProgram, CompiledProgram],
        held: Held,
        compile: CompileOnFirstUse | None = None,
    ) -> None:
        self.programs = _Programs(programs, compile)
        self.held = held
        is_split = len(held["pools"][0].sharding.device_set) > 1
        self.dispatch: AbstractContextManager[object] = _IN_ONE_ORDER if is_split else nullcontext()

    def packed(self, program: StepProgram) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A buffer for a program's packed input, all padding, and views of its fields."""
        layout = self.programs[program].signature.layout
        assert layout is not None
        return layout.new()

    def run(self, program: StepProgram, **inputs: Any) -> Any:
        """Calls a program with these inputs and the held values that it takes. Keeps the held values that it returns,
        and returns its result.
        """
        compiled = self.programs[program]
        takes, updates, _ = compiled.signature
        held = self.held
        arguments = [inputs[name] if name in inputs else held[name] for name in takes]
        with self.dispatch:
            *updated, result = compiled.executable(*arguments)
        held.update(zip(updates, updated, strict=True))
        return result
