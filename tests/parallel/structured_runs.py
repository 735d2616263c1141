"""What `test_structured_outputs` has done in a process of eight devices, with a layer of the embedded model and its
tokenizer.
"""

import tempfile
from pathlib import Path
from typing import Any

from jpaged import LLM, SamplingParams, StructuredOutputsParams
from tests.support.small_demo import small_demo
from tests.tiny_models import DEMO_ENGINE

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{2,9}!"},
    {"choice": ["a fox", "a snail"]},
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
)


def answers_by_layout() -> dict[str, list[list[int]]]:
    """Tokens of the same requests on one device, and on two replicas of two shards."""
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=60, structured_outputs=StructuredOutputsParams(**constraint))
        for i, constraint in enumerate(CONSTRAINTS * 2)
    ]
    params.append(SamplingParams(temperature=0, max_tokens=20))
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "two replicas": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    }
    sizes = DEMO_ENGINE | {"max_num_seqs": 8, "decode_buckets": (8,)}
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        model = str(small_demo(Path(directory) / "model"))
        for name, layout in layouts.items():
            with LLM(model, **sizes, **layout, dtype="float32", verbose=False) as llm:
                outputs = llm.generate(["Once"] * len(params), params, use_tqdm=False)
                found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    return found
