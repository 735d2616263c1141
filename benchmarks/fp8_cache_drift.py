"""Whether keys and values in FP8 change log-probabilities the more, the longer a prompt is.

    python benchmarks/fp8_cache_drift.py --model DIR --tokens 16384                the words of conversations, joined
    python benchmarks/fp8_cache_drift.py --model DIR --load-format dummy           random tokens, random weights

An engine with a pool in the model's type and one with a pool in FP8 read the same prompts, in chunks, through their
kernels for block tables. Of each stretch of positions:

    difference    mean of |log-probability in FP8 - in the model's type|, of the prompt's own tokens
    bias          mean of the signed difference
    agreement     tokens at which both find the same one likeliest
    perplexity    of both

Of conversations the assistant's words count alone, which the story model has learned to predict.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.report import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_story_model"))

from data import Encoder, join


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--tokens", type=int, default=16_384, help="of a prompt (default: 16,384)")
    parser.add_argument("--prompts", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--stretch", type=int, default=2048, help="positions in a line of the result (default: 2,048)")
    parser.add_argument("--calculate-kv-scales", action="store_true", help="as of `jpaged serve`")
    parser.add_argument("--memory", type=float, default=0.4, help="of the device, that an engine has (default: 0.4)")
    parser.add_argument("--json", type=Path, help="where to write a report")
    args = parser.parse_args()
    directory = Path(model_directory(args.model))

    shape = (args.prompts, args.tokens)
    if args.load_format == "dummy":
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        tokens, counted = np.random.default_rng(0).integers(0, vocab_size, shape), np.ones(shape, bool)
    else:
        encoder = Encoder(str(directory / "tokenizer.json"))
        batch = join(encoder, random.Random("drift"), *shape, held_out=True)
        tokens, counted = batch.tokens, batch.learned > 0
    counted = counted[:, :-1]  # by the token before
    plain, narrow = (
        read(
            directory, tokens, args, kv_cache_dtype=kind, calculate_kv_scales=kind == "fp8" and args.calculate_kv_scales
        )
        for kind in ("auto", "fp8")
    )
    results = []
    for first in range(0, args.tokens - 1, args.stretch):
        place = slice(first, first + args.stretch)
        results.append({"positions": first} | compared(plain, narrow, counted, place))
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        write_report(args.json, "fp8_cache_drift", vars(args), results)


def read(
    directory: Path, tokens: np.ndarray, args: argparse.Namespace, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first: its log-probability, and which one was likeliest; [prompts, tokens - 1]."""
    llm = LLM(
        str(directory),
        load_format=args.load_format,
        max_model_len=tokens.shape[1] + 16,
        max_num_seqs=8,
        decode_buckets=(8,),
        max_num_batched_tokens=2048,
        token_buckets=(2048,),
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        verbose=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in tokens], params, use_tqdm=False)
    own, likeliest = [], []
    for prompt, output in zip(tokens.tolist(), outputs, strict=True):
        found = output.prompt_logprobs
        assert found is not None
        of_tokens = [one or {} for one in found[1:]]
        own.append([one[token].logprob for one, token in zip(of_tokens, prompt[1:], strict=True)])
        likeliest.append([max(one, key=lambda token, one=one: one[token].logprob) for one in of_tokens])
    return np.array(own), np.array(likeliest)


def compared(
    plain: tuple[np.ndarray, np.ndarray], narrow: tuple[np.ndarray, np.ndarray], counted: np.ndarray, place: slice
) -> dict[str, Any]:
    chosen = counted[:, place]
    (ours, best), (theirs, other) = ([x[:, place][chosen] for x in pair] for pair in (plain, narrow))
    return {
        "tokens": int(chosen.sum()),
        "difference": float(np.abs(theirs - ours).mean()),
        "bias": float((theirs - ours).mean()),
        "agreement": float((best == other).mean()),
        "perplexity": float(np.exp(-ours.mean())),
        "perplexity_fp8": float(np.exp(-theirs.mean())),
    }


if __name__ == "__main__":
    main()
