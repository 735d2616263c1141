"""A helper of `CompileProcesses`: compiles its share of the programs into the executable cache.

    python -m jpaged.executor.compile_process FD        FD: an inherited socket; started by `CompileProcesses` only

In come a `Setting`, then (`ExecutorConfig`, keys). Out goes each key when its program is in the cache. The process ends
when it has done its share, and at once when the other end of the socket closes.
"""

import gc
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from jpaged.executor.compilation import Compiler, enable_persistent_cache
from jpaged.executor.mesh import DeviceMesh, pick_devices
from jpaged.models import build


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent deals with it
    gc.disable()  # a short life: what it would find costs less than looking for it
    connection = Connection(fd)
    try:
        setting = connection.recv()
        enable_persistent_cache()
        mesh = DeviceMesh(pick_devices(setting.tensor_parallel_size))
        with mesh.as_default():
            model = build(setting.model_config, setting.dtype)
            config, keys = connection.recv()
            threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
            compiler = Compiler(mesh.shard_of(model), config, model.dtype, mesh, kept_on=setting.kept_on)
            for key in compiler.compile_steps(keys):
                connection.send(key)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, or has no use for this process


def _end_with_parent(connection: Connection) -> None:
    try:
        connection.recv()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
