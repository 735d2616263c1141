"""Compiles FP8 decode steps for an H200 and prints one JSON line a model and bucket: its layers, rows and launches.

    python tests/executor/step/compile_fp8_steps_for_h200.py DIRECTORY LAYERS,.. ROWS,.. [8b]

DIRECTORY: for XLA's dumps, in which `*thunk_sequence*` lists the launches. 8b: of the widths of Llama-3.1-8B instead of
small ones. There is no GPU to try kernels on, so XLA may choose other ones for the products than on a card.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.executor.step.compile_steps_for_h200 import CONFIG, H200, MODEL, parts  # isort: skip

import jax

from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from jpaged.pallas_kernels import devices

_WIDTHS_OF_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
}


def main() -> None:
    jax.default_backend = lambda: "gpu"
    devices.default_device = lambda: devices.Device("gpu", (9, 0))
    mesh = H200()
    layers, rows = ([int(number) for number in given.split(",")] for given in sys.argv[2:4])
    widths = _WIDTHS_OF_8B if sys.argv[4:] == ["8b"] else {}
    options: dict[str, Any] = {"token_buckets": (256,), "shared_prefix_attention": False}
    config = replace(CONFIG, max_num_seqs=max(rows), decode_buckets=tuple(rows), **options)
    dump = Path(sys.argv[1])
    for number in layers:
        of_model = MODEL | widths | {"num_hidden_layers": number}
        model = build(ModelConfig.from_dict(of_model, quantization="fp8"), "auto")
        compiler = Compiler(Setup.of(model, config), mesh)
        with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
            compiler.submit([Decode(size) for size in rows])
            for program in compiler.results():
                launched, commands = parts(program.name)
                record = {"layers": number, "name": program.name, "parts": launched, "commands": commands}
                print(json.dumps(record), flush=True)
        for file in dump.glob("*.thunk_sequence*"):
            file.rename(file.with_name(f"{number}_layers.{file.name.split('.', 1)[1]}.seen"))


if __name__ == "__main__":
    main()
