"""Multiple choice by `jpaged score` and by lm-eval's own Hugging Face backend: the same accuracy, the same sums.

    pip install jpaged lm_eval accelerate torch        # an environment of its own
    python -m tests.drills.scoring_lm_eval --questions 200

The task is local: beginnings of stories that the embedded model tells, each with its own continuation and three of
other stories. lm-eval runs the embedded model's checkpoint through transformers, in float32, on the CPU; jpaged scores
the same rows. Compared are accuracy (by sum and by length), every best choice, and every log-likelihood: within 1e-4
of it, or of 1 where it is smaller than that.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

from lm_eval.models.huggingface import HFLM

from jpaged import LLM, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.scoring import score_files
from tests.drills.lm_eval_stories import OPENINGS, StoriesTask, questions


def stories(count: int, seed: int) -> list[str]:
    """Stories that the embedded model tells."""
    llm = LLM(dtype="float32", verbose=False, max_num_seqs=64)
    openings = [OPENINGS[i % len(OPENINGS)] for i in range(count)]
    params = [SamplingParams(temperature=0.8, max_tokens=60, seed=seed + i, ignore_eos=True) for i in range(count)]
    outputs = llm.generate(openings, params, use_tqdm=False)
    return [opening + output.outputs[0].text for opening, output in zip(openings, outputs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="scoring-lm-eval-drill-"))
    output = directory / "scores.jsonl"
    rows = questions(stories(args.questions, args.seed), args.seed)
    task = StoriesTask(directory, rows)

    # lm-eval's Hugging Face backend begins with the special tokens that the tokenizer itself adds, as this does.
    score_files(task.source, output, dtype="float32", use_tqdm=False, verbose=False)
    scores = [json.loads(line) for line in output.read_text().splitlines()]
    hits = [
        (s["best"] == row["label"], s["best_per_byte"] == row["label"]) for s, row in zip(scores, rows, strict=True)
    ]
    ours = {"acc": sum(hit for hit, _ in hits) / len(hits), "acc_norm": sum(hit for _, hit in hits) / len(hits)}
    model = HFLM(pretrained=str(demo_model_path()), dtype="float32", device="cpu", batch_size=8)
    theirs, sums = task.evaluate(model)
    print(f"jpaged score:           {ours}")
    print(f"lm-eval (transformers): {theirs}")
    worst = 0.0
    for score, theirs_sums in zip(scores, sums, strict=True):
        ours_sums = [choice["logprob"] for choice in score["choices"]]
        worst = max(worst, *(abs(a - b) / max(1, abs(b)) for a, b in zip(ours_sums, theirs_sums, strict=True)))
        if score["best"] != max(range(4), key=theirs_sums.__getitem__):
            raise SystemExit(
                f"question {score['index']}: best choice {score['best']}, lm-eval's sums are {theirs_sums}"
            )
    print(f"{len(scores)} questions, same best choices; log-likelihoods differ by at most {worst:.1e}")
    if not all(math.isclose(ours[name], theirs[name], abs_tol=1e-9) for name in ours) or worst > 1e-4:
        raise SystemExit("the two do not agree.")


if __name__ == "__main__":
    main()
