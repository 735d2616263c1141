"""Answers to 2,000 random schemas by the embedded model, at temperatures from greedy to uniform, each validated.

    make drill-structured ARGS="--directory jsonschemabench/data --schemas 500"

takes schemas from the .json files below a directory instead, drawn at random. Those that are refused are counted, and
so are those for which Python's own validator fails. With `--tables` each schema is asked for some times before, so that
its answer goes by its table, if it has one.
"""

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing.exceptions

from jpaged import LLM, SamplingParams, StructuredOutputsParams
from jpaged.api.errors import InvalidParameterError
from tests.support.random_schemas import random_schema

_TIMES = 4
"""So many sequences of a grammar begin before its table is made."""
_LONGEST_WAIT_S = 20.0
_AT_ONCE = 100
"""Schemas of which tables are made before they are asked for; fewer than the engine keeps compiled."""

REFERENCES = (referencing.exceptions.Unresolvable, referencing.exceptions.Unretrievable)


def read_schemas(directory: Path, count: int, rng: np.random.Generator) -> list[Any]:
    """So many schemas of those below a directory."""
    files = sorted(directory.rglob("*.json"))
    if not files:
        raise SystemExit(f"There is no .json file below {directory}.")
    chosen = rng.choice(len(files), min(count, len(files)), replace=False)
    return [json.loads(files[i].read_text()) for i in chosen]


def accepted(llm: LLM, schemas: list[Any]) -> list[Any]:
    """Those that the engine takes; says why it refuses the others, and how long the slowest check took."""
    taken, refused, slowest = [], Counter[str](), 0.0
    for schema in schemas:
        begun = time.monotonic()
        try:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
            llm.engine.check_request("schema", "Once", params)
            taken.append(schema)
        except InvalidParameterError as error:
            refused[str(error)[:110]] += 1
        slowest = max(slowest, time.monotonic() - begun)
    print(f"{len(taken)} of {len(schemas)} schemas are taken; the slowest check took {slowest:.1f} s. Refused:")
    for reason, count in refused.most_common(25):
        print(f"  {count:4} {reason}")
    return taken


def make_tables(llm: LLM, params: list[SamplingParams]) -> None:
    """Has all tables made that can be, until no more come for a while, and gives them to the device."""
    shortest = [replace(one, max_tokens=1) for one in params for _ in range(_TIMES)]
    llm.generate(["Once"] * len(shortest), shortest, use_tqdm=False)
    grammars = [llm.engine._grammars.compile(one.structured_outputs).result() for one in params]
    found, since = 0, time.monotonic()
    while found < len(grammars) and time.monotonic() - since < _LONGEST_WAIT_S:
        time.sleep(0.1)
        now = sum(grammar.table is not None for grammar in grammars)
        found, since = now, time.monotonic() if now > found else since
    for one, grammar in zip(params, grammars, strict=True):
        if grammar.table is not None:  # a request that runs alone brings the whole table
            llm.generate(["Once"], replace(one, max_tokens=1), use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="of schemas")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--tables", action="store_true", help="answers go by tables")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    llm = LLM(max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=600)
    if args.directory is None:
        schemas = [random_schema(rng) for _ in range(args.schemas)]
    else:
        schemas = accepted(llm, read_schemas(args.directory, args.schemas, rng))
    params = [
        SamplingParams(
            temperature=(0.0, 1.0, 1e4)[i % 3],
            seed=i,
            max_tokens=args.max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=i % 2 == 0),
        )
        for i, schema in enumerate(schemas)
    ]
    begun = time.monotonic()
    outputs = []
    for first in range(0, len(schemas), _AT_ONCE):
        some = params[first : first + _AT_ONCE]
        if args.tables:
            make_tables(llm, some)
        outputs += llm.generate(["Once upon a time"] * len(some), some)
    wrong = cut = unclear = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            cut += 1
            continue
        try:
            validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            validator(schema).validate(json.loads(answer.text))
        except (RecursionError, re.error, *REFERENCES) as error:  # the validator's own trouble
            unclear += 1
            print(f"not validated: {str(error)[:200]}")
        except (ValueError, jsonschema.ValidationError) as error:
            wrong += 1
            print(f"{json.dumps(schema)}\n  {answer.text!r}\n  {error}")
    seconds = time.monotonic() - begun
    print(
        f"{len(schemas)} schemas in {seconds:.0f} s: {len(schemas) - wrong - cut - unclear} valid, {cut} cut,"
        f" {unclear} not validated, {wrong} wrong; {llm.get_metrics().num_requests_by_table} went by tables"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
