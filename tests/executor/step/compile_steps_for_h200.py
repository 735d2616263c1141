"""Compiles the step programs of a small model for an H200 and prints one JSON line a program: its parts.

    {"name": "decode_64", "parts": {"kCommandBuffer": 1}, "commands": 12, "apart": 1, "held": 336855, "alias": 336855}

`held` bytes of a device are in what a decode program is donated, `alias` of them it updates in place. decode_16,
sample_16_0 and decode_and_sample_16_0 are of the same model over two GPUs, whose bodies have the one-shot all-reduce.

A part is what the host launches; a command buffer is a CUDA graph of `commands` kernels and copies, of which `apart`
take bundles of weights apart (`bundles.py`). XLA says so in the dump of its "thunks", the launches that a compiled
program consists of.

    python tests/executor/step/compile_steps_for_h200.py DIRECTORY [all]        DIRECTORY: for the dump

A program of its own: the CUDA compiler must be found before JAX starts. `test_cuda_graphs.py` runs it; with `all` it
does not stop at the programs of a step.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
os.environ["JPAGED_CACHE_DIR"] = ""

from tests.support.h200_compile import h200_mesh  # isort: skip

import jax

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh, Specs
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode, Mixed, SharedDecode
from jpaged.executor.step.heads import Sample
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.one_call import DecodeAndSample
from jpaged.executor.step.program import Setup, StepProgram
from jpaged.models import ModelConfig, build
from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.gated_product.hopper_tiling import LEAST_ROWS

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIG = ExecutorConfig(
    max_num_seqs=64,
    max_model_len=2048,
    block_size=16,
    num_blocks=4096,
    decode_buckets=(8, 64),
    token_buckets=(LEAST_ROWS - 8, LEAST_ROWS),  # without and with the kernel of gate and up
    shared_prefix_attention=True,
    one_call_rows=64,
)


class H200(DeviceMesh):
    """The device that is not there."""

    def __init__(self) -> None:
        super().__init__(jax.devices()[:1])
        self.topology = h200_mesh()

    def jit(self, function: Callable[..., Any], args: Any, results: Specs, donate: tuple[int, ...] = ()) -> Any:
        whole = jax.sharding.NamedSharding(self.topology, jax.sharding.PartitionSpec())
        return jax.jit(function, in_shardings=whole, out_shardings=whole, donate_argnums=donate)


def _thunks(name: str) -> list[str]:
    """The dump of the program that was compiled last under this name. Lines of what is in CUDA graphs are indented."""
    dump = Path(sys.argv[1])
    names = (f"*.jit_{name}.thunk_sequence{when}.txt" for when in ("_after_thunk_passes", ""))
    # Those after the passes are only there where these change anything.
    files = next(files for pattern in names if (files := list(dump.glob(pattern))))
    return last_written(files).read_text().splitlines()


def last_written(files: Iterable[Path]) -> Path:
    return max(files, key=lambda file: file.stat().st_mtime_ns)


def parts(name: str) -> tuple[Counter[str], int]:
    """What a program that was compiled consists of, and how many of its kernels and copies are inside CUDA graphs."""
    lines = _thunks(name)
    of_host = [match[1] for line in lines if (match := re.match(r"\d+: (\w+)", line))]
    return Counter(of_host), sum(line.startswith(" ") for line in lines)


def kernels_of_bundles(name: str) -> int:
    """How many kernels of a program that was compiled take bundles apart."""
    return sum("loop_dynamic_slice_fusion" in line for line in _thunks(name))


def decode_over_two() -> Compiler:
    """Compiles decode_16 and its greedy head, and both in one, of two shards."""
    mesh = DeviceMesh(tuple(h200_mesh(2).devices.flat))
    config = replace(CONFIG, decode_buckets=(16, 64), one_shot_rows=16)
    model = build(ModelConfig.from_dict(MODEL), "auto")
    compiler = Compiler(Setup.of(mesh.shard_of(model), config), mesh)
    with jax.sharding.use_abstract_mesh(mesh.mesh.abstract_mesh):
        greedy = SamplingVariant.GREEDY
        compiler.submit([Decode(16), Sample(16, greedy), DecodeAndSample(16, greedy)])
        compiler.results()
    return compiler


def held_bytes(compiler: Compiler, program: StepProgram) -> int:
    """Of a device, in the pool, the slot state and the all-reduce's state; and in earlier tokens."""
    names = {"pools", "state", "exchange"}
    held = sum(held.device_bytes for name, held in compiler._held.items() if name in names)
    return held + sum(4 * given.size for given in program.inputs(compiler.setup).values())


def on_hopper() -> None:
    """Has programs of this process compiled for the device that is not there."""
    jax.default_backend = lambda: "gpu"  # what decides which options XLA gets ...
    devices.default_device = lambda: devices.Device("gpu", (9, 0))  # ... and which kernels are chosen


def main() -> None:
    on_hopper()
    mesh = H200()
    model = build(ModelConfig.from_dict(MODEL), "auto")
    compiler = Compiler(Setup.of(model, CONFIG), mesh)
    with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
        if sys.argv[2:] == ["all"]:
            compiler.submit(step_programs(compiler.setup))
        else:
            bodies = [program for kind in (Decode, SharedDecode, Mixed) for program in kind.programs(compiler.setup)]
            sampling = [one for kind in (Sample, DecodeAndSample) for one in kind.programs(compiler.setup)]
            compiler.submit([*bodies, *(one for one in sampling if one.batch == CONFIG.decode_buckets[-1])])
        compiled = dict.fromkeys(compiler.results(), compiler)
    over_two = decode_over_two()
    compiled |= dict.fromkeys(over_two.results(), over_two)
    for program, compiler in compiled.items():
        launched, commands = parts(program.name)
        record = {"name": program.name, "parts": launched, "commands": commands}
        record["apart"] = kernels_of_bundles(program.name)
        if isinstance(program, Decode | DecodeAndSample) and program.kind != "shared_decode":
            record |= {"held": held_bytes(compiler, program), "alias": compiler.result(program).alias_bytes}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
