"""Compiles programs when a step first needs them, instead of all of them at start.

    start        `first_programs`: the bodies and the head that nearly every first request runs
    a step       its program is not there --> lower and compile it in the step's thread --> run it

For CPUs: there compiling is most of a small model's first start, few of the programs are used by any one run, and those
are kept on disk as they come. On a GPU a start takes all of them from the executable cache, and a program that came
later would need memory that the plan has given to the KV pool.
"""

import logging
import time
from collections.abc import Callable, Collection

from jpaged.api.config import CompilePrograms
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.jax_settings import jax_settings, settings_as
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.program import StepProgram
from jpaged.host.garbage import without_collections
from jpaged.host.interrupt import KeptInterrupt

log = logging.getLogger("jpaged.startup")


def compiles_on_first_use(asked: CompilePrograms, mesh: DeviceMesh, kernel_backend: str | None) -> bool:
    """Whether programs are compiled when they are first used; all are compiled at start otherwise.

    asked, kernel_backend: as of `EngineArgs`. With a backend that is forced "auto" is at start: what it cannot do is
        found there, before there are requests.

    Raises:
        InvalidParameterError: asked for where the devices are no CPUs.
    """
    device = mesh.devices[0]
    if asked == "on_first_use" and device.platform != "cpu":
        raise InvalidParameterError(
            f"compile_programs='on_first_use' is for CPUs, but the device is {device.device_kind}: a program that is"
            " compiled while requests run would need memory that the KV pool has. Leave it out: a second start finds"
            " its programs on disk."
        )
    is_usual = device.platform == "cpu" and kernel_backend in (None, "xla")
    return asked == "on_first_use" or (asked == "auto" and is_usual)


class OnFirstUse:
    """Gives a runner the programs that it lacks (`CompileOnFirstUse`), under the JAX settings that there are now.

    compiler: of the runner's setup. compiled: the programs that there are.

    Attributes:
        missing: the programs that have not been compiled.
        before: called before each compilation, which may take as long as hundreds of steps.
    """

    def __init__(self, compiler: Compiler, mesh: DeviceMesh, compiled: Collection[StepProgram]) -> None:
        self._compiler = compiler
        self._mesh = mesh
        self._settings = jax_settings()
        self.missing = set(step_programs(compiler.setup)) - set(compiled)
        self.before: Callable[[], None] = lambda: None

    def __call__(self, program: StepProgram) -> CompiledProgram:
        """Raises KeyError if a runner of this setup has no such program."""
        if program not in self.missing:
            raise KeyError(program)
        self.before()
        begun = time.perf_counter()
        with self._mesh.as_default(), settings_as(self._settings), without_collections(), KeptInterrupt():
            compiled = self._compiler.compile_now(program)
        self.missing.discard(program)
        how = "read from disk" if compiled.origin == "kept" else "compiled"
        log.info("%s was %s on its first use, in %.2f s", program.name, how, time.perf_counter() - begun)
        return compiled
