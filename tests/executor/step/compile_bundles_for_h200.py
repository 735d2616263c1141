"""Compiles bodies of Qwen3-0.6B for an H200, without bundles of small weights and with them. Prints a JSON line each:

    {"name": "decode_8", "bundles": 2, "weights": 115, "commands": 300, "apart": 2, "process_s": 12.7}

weights: arrays that the program takes for them. commands: kernels and copies of its CUDA graph; of these `apart` take
bundles apart. process_s: processor time of lowering and compiling it.

    python tests/executor/step/compile_bundles_for_h200.py DIRECTORY [LAYERS]       DIRECTORY: for the dumps

For the docs; that a body of fewer layers takes a bundle apart by one kernel is tested (`test_cuda_graphs.py`).
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.executor.step.compile_steps_for_h200 import CONFIG, MODEL, H200, kernels_of_bundles, on_hopper, parts  # isort: skip

import jax

from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step import bundles
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build

QWEN3 = MODEL | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}


def main() -> None:
    on_hopper()
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 28
    model = build(ModelConfig.from_dict(QWEN3 | {"num_hidden_layers": layers}), "auto")
    mesh = H200()
    for least in (len(model.abstract_weights) + 1, bundles.LEAST_COUNT):
        with mock.patch.object(bundles, "LEAST_COUNT", least):
            setup = Setup.of(model, replace(CONFIG, shared_prefix_attention=False, one_call_rows=0))
            weights = len(setup.bundles.alone) + len(setup.bundles.groups)
        for program in (Decode(8), Decode(64), Mixed(CONFIG.token_buckets[-1])):
            begun = time.process_time()
            compiler = Compiler(setup, mesh)
            with jax.sharding.use_abstract_mesh(mesh.topology.abstract_mesh):
                compiler.submit([program])
                compiler.results()
            taken = round(time.process_time() - begun, 1)
            record = {"name": program.name, "bundles": len(setup.bundles.groups), "weights": weights}
            counts = {"commands": parts(program.name)[1], "apart": kernels_of_bundles(program.name)}
            print(json.dumps(record | counts | {"process_s": taken}), flush=True)


if __name__ == "__main__":
    main()
