"""Compiles the steps of a small model with Triton's kernels for an H200 and prints one JSON line a program.

    JPAGED_TRITON_CALLS=native python tests/executor/step/compile_triton_steps_for_h200.py DIRECTORY

    {"name": "decode_8", "parts": {"kCommandBuffer": 1}, "commands": 31, "held": .., "alias": .., "ffi": 0,
     "native": [{"name": "_decode", "buffers": 12, "parameters": 12, "shared": 69632}, ..]}

`ffi` counts the calls that jaxlib serves. Of those that XLA launches itself, `buffers` is how many operands and results
XLA passes, `parameters` how many the entry in its PTX has, `updated` how many operands a result is aliased to. `held`,
`alias`, `parts` and `commands` are those of `compile_steps_for_h200.py`. DIRECTORY: for XLA's dumps.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.executor.step.compile_steps_for_h200 import CONFIG, H200, MODEL, held_bytes, parts  # isort: skip

import jax

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.heads import Sample
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from jpaged.pallas_kernels import devices

_ENTRY = re.compile(r"\.visible \.entry \w+\((.*?)\)")


def native_calls(hlo: str) -> list[dict[str, Any]]:
    """What the calls that XLA launches itself say of their kernels."""
    found = []
    for line in hlo.splitlines():
        if 'custom_call_target="__gpu$xla.gpu.ptx"' not in line:
            continue
        results, operands = re.search(r"= (.*?) custom-call\((.*?)\), custom_call_target", line).groups()
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, api_version", line)
        found.append(
            {
                "name": re.search(r'[{ ]name = "(\w+)"', line)[1],
                "buffers": operands.count("%") + len(re.findall(r"\w+\[[\d,]*\]", results)),
                "parameters": _ENTRY.search(line)[1].count(".param"),
                "updated": 0 if aliases is None else aliases[1].count("("),
                "shared": int(re.search(r"shared_mem_bytes = (\d+)", line)[1]),
            }
        )
    return found


def main() -> None:
    jax.default_backend = lambda: "gpu"
    devices.default_device = lambda: devices.Device("gpu", (9, 0))
    mesh = H200()
    model = build(ModelConfig.from_dict(MODEL | {"num_hidden_layers": 2}), "auto")
    options: dict[str, Any] = {"decode_buckets": (8,), "token_buckets": (256,), "shared_prefix_attention": False}
    options |= {"kernel_backend": "triton"}
    config = replace(CONFIG, max_num_seqs=8, **options)
    compiler = Compiler(Setup.of(model, config), mesh)
    programs = [Decode(8), *Mixed.programs(compiler.setup), Sample(8, SamplingVariant.GREEDY)]
    programs += [one for one in Sample.programs(compiler.setup) if one.batch == 8 and one not in programs][:1]
    with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
        compiler.submit(programs)
        for program in compiler.results():
            launched, commands = parts(program.name)
            file = next(Path(sys.argv[1]).glob(f"*.jit_{program.name}.sm_*gpu_after_optimizations.txt"))
            hlo = file.read_text()
            record = {"name": program.name, "parts": launched, "commands": commands}
            record["alias"] = compiler.result(program).alias_bytes
            if not isinstance(program, Sample):
                record["held"] = held_bytes(compiler, program)
            record |= {"ffi": hlo.count('custom_call_target="triton_kernel_call'), "native": native_calls(hlo)}
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
