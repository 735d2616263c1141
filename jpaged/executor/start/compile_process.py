"""A helper of `CompileProcesses`: compiles its share of the programs into the executable cache.

    python -m jpaged.executor.start.compile_process FD    FD: an inherited socket; started by `CompileProcesses` only

In come a `Setting`, then (`ExecutorConfig`, programs). Out goes each `StepProgram` when it is in the cache. The process
ends when it has done its share or cannot leave it in the cache, and at once when the other end of the socket closes.
"""

import gc
import os
import sys
import traceback
from multiprocessing.connection import Connection

from jpaged.host.parent import end_with_parent


def main(fd: int) -> None:
    end_with_parent(os.getppid(), [fd])  # also while it imports JAX, below, and opens the device
    gc.disable()  # a short life: what it would find costs less than looking for it
    try:
        _compile_share(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, or has no use for this process
    except Exception:
        traceback.print_exc()
    os._exit(0)  # nobody wants what threads still compile, and taking JAX down in order lasts


def _compile_share(connection: Connection) -> None:
    from jpaged.executor.mesh import DeviceMesh, pick_devices
    from jpaged.executor.start.cache_directories import enable_persistent_cache
    from jpaged.executor.start.compilation import Compiler
    from jpaged.executor.start.jax_settings import adopt
    from jpaged.executor.step.program import Setup
    from jpaged.models import build

    setting = connection.recv()
    adopt(setting.jax_settings)
    enable_persistent_cache()
    mesh = DeviceMesh(pick_devices(setting.tensor_parallel_size))
    with mesh.as_default():
        model = build(setting.model_config, setting.dtype)
        config, programs = connection.recv()
        compiler = Compiler(Setup.of(mesh.shard_of(model), config), mesh, kept_on=setting.kept_on)
        for program in compiler.compile_for_cache(programs):
            connection.send(program)


if __name__ == "__main__":
    main(int(sys.argv[1]))
