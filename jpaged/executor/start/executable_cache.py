"""Keeps compiled step programs on disk, so that a later start neither traces nor compiles them.

    JPAGED_CACHE_DIR/programs/<sha256 of everything that a program depends on>

JAX's own persistent cache finds a program by its HLO, so tracing and lowering come first each time; for a model of 28
layers they take half a second a program, on one thread. Here a program is found by its inputs: the sources of this
package, the model's and the executor's configuration, its argument shapes, the versions and settings of JAX, XLA,
Triton and driver, and the device. Files are written whole or not at all; one that cannot be read, or that another user
may have written, is compiled anew.

A program for a CPU is machine code for what this CPU can do, so it also depends on the CPU's model and features: in a
directory that machines share each finds its own. Where the system does not tell them (only Linux does), or a program
spans several processes, none is kept.
"""

import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from jpaged.executor.start.cache_directories import is_own
from jpaged.executor.start.cache_limit import note_use
from jpaged.executor.start.jax_settings import settings_of_programs
from jpaged.host.cores import cpu_features
from jpaged.pallas_kernels import registry
from jpaged.pallas_kernels.devices import default_device

KEPT_PLATFORMS = ("gpu", "cpu")
"""Platforms whose programs are cached."""

LEAST_FREE_BYTES = 2**29
"""Free disk space required before programs are cached."""

_STALE_S = 24 * 3600.0
"""Older temporary files and claims are leftovers of killed processes."""


class ExecutableCache:
    """Programs of one model and configuration on one device.

    Args:
        directory: where to keep them; None keeps nothing.
        depends_on: whatever the programs depend on beside their names and argument shapes; its repr counts.
        platforms: of devices whose programs are kept.

    Attributes:
        claim: the file of who compiles many of them (`Turns`); None where nothing is kept.
    """

    def __init__(
        self, directory: Path | None, depends_on: Sequence[Any], platforms: Collection[str] = KEPT_PLATFORMS
    ) -> None:
        device = jax.devices()[0]
        features: tuple[str, ...] | None = ()
        if device.platform == "cpu":
            features = cpu_features() if jax.process_count() == 1 else None
        self._directory = directory if device.platform in platforms and features is not None else None
        environment = (
            jax.__version__,
            jaxlib.__version__,
            device.device_kind,
            features,
            device.client.platform_version,
            default_device(),
            registry.compilers(),
            os.environ.get("XLA_FLAGS", ""),
            settings_of_programs(),
            _source_digest() if self._directory else "",
        )
        self._depends_on = repr((environment, *depends_on)).encode()
        name = hashlib.sha256(self._depends_on).hexdigest() + ".claim"
        self.claim = None if self._directory is None else self._directory / name

    def path(self, key: tuple, arguments: Any) -> Path | None:
        """The file of a program. arguments: a tree of `ShapeDtypeStruct`s."""
        if self._directory is None:
            return None
        leaves, structure = jax.tree.flatten(arguments)
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        name = hashlib.sha256(self._depends_on + repr((key, shapes, str(structure))).encode())
        return self._directory / name.hexdigest()

    @staticmethod
    def has_room(directory: Path) -> bool:
        """Whether a cold start's programs can be kept there."""
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"0")
            disk = os.statvfs(directory)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize >= LEAST_FREE_BYTES

    @staticmethod
    def sweep(directory: Path) -> None:
        """Removes what processes that were killed have left behind: files half written, and claims."""
        with suppress(OSError):
            for pattern in ("tmp*", "*.claim"):
                for file in directory.glob(pattern):
                    if time.time() - file.stat().st_mtime > _STALE_S:  # noqa: TID251  # the clock of files
                        file.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program, or None if there is none or it cannot be used.

        devices: those it is for, which need not be all that there are.
        """
        if devices[0].platform == "gpu":
            with suppress(ImportError):  # loads the runtime that programs with Mosaic kernels are linked against
                import jax.experimental.mosaic.gpu  # noqa: F401
            with suppress(ImportError):  # registers what launches Triton kernels; imports no Triton
                import jaxlib.gpu_triton  # noqa: F401
        try:
            with path.open("rb") as file:
                if not is_own(os.fstat(file.fileno())):
                    return None
                note_use(path)
                program, in_tree, out_tree = pickle.loads(file.read())
            return serialize_executable.deserialize_and_load(program, in_tree, out_tree, execution_devices=devices)
        except FileNotFoundError:
            return None
        except Exception:  # truncated, of another build, refused by the driver: whatever it is, compiling helps
            return None

    @staticmethod
    def save(path: Path, compiled: jax.stages.Compiled) -> None:
        """Keeps a program, if it can be serialised (one that calls Python cannot) and the disk takes it: a cache may
        fail without harm.

        compiled: for a CPU never one that was itself read from a cache, JAX's among them: XLA writes such programs
            without their functions, and says so only when what was read back again is run.
        """
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # of many kinds, by what cannot be written and by the version of JAX
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError:
            return


@cache
def _source_digest() -> str:
    """The digest of every module of this package; any of them may change a program."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
