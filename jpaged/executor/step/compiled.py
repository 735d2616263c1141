"""A step program once it is compiled, and what is known of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax

from jpaged.executor.step.program import Signature

Origin = Literal["compiled", "shared", "kept", "jax"]


@dataclass(frozen=True)
class CompiledProgram:
    """An executable, and how it is called.

    origin: "compiled" by this process, "shared" by a helper, or "kept" in the cache by an earlier start or a replica;
        "jax": lowered here, and compiled earlier, as JAX's own cache had it.
    lowering_s, compiling_s, loading_s: what that took here.
    """

    executable: jax.stages.Compiled
    signature: Signature
    origin: Origin = "compiled"
    lowering_s: float = 0.0
    compiling_s: float = 0.0
    loading_s: float = 0.0

    @cached_property
    def _memory(self) -> Any:
        return self.executable.memory_analysis()

    @property
    def temp_bytes(self) -> int:
        """Device memory it needs while it runs, beyond its arguments and results."""
        return self._memory.temp_size_in_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of its results."""
        return self._memory.output_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        """Bytes of results that are arguments updated in place."""
        return self._memory.alias_size_in_bytes
