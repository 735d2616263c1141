"""Compiles steps of a small model with batch_invariant=True for an H200 and prints one JSON line a program.

    python tests/executor/step/compile_invariant_steps_for_h200.py DIRECTORY        DIRECTORY: for XLA's dumps

    {"name": "mixed_1024", "parts": {"kCommandBuffer": 1}, "commands": 61, "arithmetic": {"%0 = f32[512,512] ..": 4}}

`arithmetic` has the kernels that XLA made of everything but products and attention and that multiply or add up floats:
what they compute, without names, and how many there are of each. `parts` and `commands` are those of
`compile_steps_for_h200.py`.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.executor.step.compile_steps_for_h200 import CONFIG, H200, MODEL, on_hopper, parts  # isort: skip

import jax

from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build, row_tiles
from jpaged.pallas_kernels import devices

_COMPUTATION = re.compile(r"^(%[\w.\-]+) \(.*?\) -> .*? \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^ENTRY .*?\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)


def arithmetic(hlo: str) -> Counter[str]:
    """What kernels that XLA made compute, of those that multiply or add up floats."""
    bodies = dict(_COMPUTATION.findall(hlo))
    called = re.findall(r"fusion\(.*?calls=(%[\w.\-]+)", _ENTRY.search(hlo)[1])
    return Counter(
        without_names(bodies[name])
        for name in called
        if re.search(r"(bf16|f32)\[[\d,]+\]\S* (multiply|reduce)\(", bodies[name])
    )


def without_names(body: str) -> str:
    """Instructions with names and numbers of parameters in the order in which they come."""
    body = re.sub(r", (metadata|frontend_attributes|backend_config)=\{.*?\}(?=\n|, [a-z_]+=)", "", body)
    for pattern in (r"%[\w.\-]+", r"(?<=parameter\()\d+"):
        names: dict[str, str] = {}
        body = re.sub(pattern, lambda found, names=names: names.setdefault(found[0], f"%{len(names)}"), body)
    return body


def main() -> None:
    on_hopper()
    row_tiles.default_device = devices.default_device
    mesh = H200()
    model = build(ModelConfig.from_dict(MODEL | {"num_hidden_layers": 2}), "auto")
    options = {"max_num_seqs": 512, "decode_buckets": (512,), "token_buckets": (1024,), "one_call_rows": 0}
    config = replace(CONFIG, batch_invariant=True, shared_prefix_attention=False, **options)
    compiler = Compiler(Setup.of(model, config), mesh)
    with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
        compiler.submit([Decode(512), *Mixed.programs(compiler.setup)])
        for program in compiler.results():
            launched, commands = parts(program.name)
            file = next(Path(sys.argv[1]).glob(f"*.jit_{program.name}.sm_*gpu_after_optimizations.txt"))
            record = {"name": program.name, "parts": launched, "commands": commands}
            print(json.dumps(record | {"arithmetic": arithmetic(file.read_text())}), flush=True)


if __name__ == "__main__":
    main()
