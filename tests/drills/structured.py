"""Answers to 2,000 random schemas by the embedded model, at temperatures from greedy to uniform, each validated."""

import argparse
import json
import time

import jsonschema
import numpy as np

from jpaged import LLM, SamplingParams, StructuredOutputsParams
from tests.support.random_schemas import random_schema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    llm = LLM(max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=600)
    schemas = [random_schema(rng) for _ in range(args.schemas)]
    params = [
        SamplingParams(
            temperature=(0.0, 1.0, 1e4)[i % 3],
            seed=i,
            max_tokens=400,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=i % 2 == 0),
        )
        for i, schema in enumerate(schemas)
    ]
    begun = time.monotonic()
    outputs = llm.generate(["Once upon a time"] * len(schemas), params)
    wrong = cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            cut += 1
            continue
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
        except (ValueError, jsonschema.ValidationError) as error:
            wrong += 1
            print(f"{json.dumps(schema)}\n  {answer.text!r}\n  {error}")
    seconds = time.monotonic() - begun
    print(f"{len(schemas)} schemas in {seconds:.0f} s: {len(schemas) - wrong - cut} valid, {cut} cut, {wrong} wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
