"""Compiles steps of models with products that read the same rows, and with latent attention, for an H200, and prints
one JSON line a program: what copies a weight in each step, only to join it with another or to transpose it.

    {"model": "deepseek-v2-lite", "name": "decode_32", "moved": []}

    python tests/executor/step/compile_weights_in_place_for_h200.py DIRECTORY        DIRECTORY: for the dump

A program of its own, as `compile_steps_for_h200.py` is, whose device and dumps it has; `test_cuda_graphs.py` runs it.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.executor.step.compile_steps_for_h200 import CONFIG, H200, last_written, on_hopper  # isort: skip

import jax

from jpaged.bench.models import CONFIGS
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build

LAYERS = {"deepseek-v2-lite": 2, "qwen3.5-9b": 4}
PROGRAMS = (Decode(32), Mixed(2048))


def moved(dump: str) -> list[str]:
    """The instructions of a program that read a weight, join or transpose it, and write it."""
    entry = dump[dump.index("\nENTRY ") :]
    lines = re.findall(r"^ *(?:ROOT )?%(\S+) = \S+ (?:fusion|copy|transpose|concatenate)\((.*)$", entry, re.MULTILINE)
    moves = re.compile("concatenate|transpose|copy")
    return [name for name, operands in lines if moves.search(name) and re.search(r"%args_0__\d+_", operands)]


def main() -> None:
    on_hopper()
    mesh = H200()
    sizes = {"max_num_seqs": 32, "decode_buckets": (8, 32), "token_buckets": (256, 2048), "one_call_rows": 0}
    config = replace(CONFIG, shared_prefix_attention=False, **sizes)
    for name, layers in LAYERS.items():
        shape = dict(CONFIGS[name], num_hidden_layers=layers)
        if "layer_types" in shape:
            shape["layer_types"] = shape["layer_types"][:layers]
        compiler = Compiler(Setup.of(build(ModelConfig.from_dict(shape), "auto"), config), mesh)
        with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
            compiler.submit(PROGRAMS)
            compiler.results()
        for program in PROGRAMS:
            dumps = Path(sys.argv[1]).glob(f"*.jit_{program.name}.*after_optimizations.txt")
            found = moved(last_written(dumps).read_text())
            print(json.dumps({"model": name, "name": program.name, "moved": found}), flush=True)


if __name__ == "__main__":
    main()
