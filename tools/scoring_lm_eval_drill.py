"""Multiple choice by `jpaged score` and by lm-eval's own Hugging Face backend: the same accuracy, the same sums.

    pip install jpaged lm_eval accelerate torch        # an environment of its own
    python tools/scoring_lm_eval_drill.py --questions 200

The task is local: beginnings of stories that the embedded model tells, each with its own continuation and three of
other stories. lm-eval runs the embedded model's checkpoint through transformers, in float32, on the CPU; jpaged scores
the same rows. Compared are accuracy (by sum and by length), every best choice, and every log-likelihood: within 1e-4
of it, or of 1 where it is smaller than that.
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.scoring import score_files

TASK = """\
task: jpaged_stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Story beginnings, four continuations each, and which one is the story's own."""
    llm = LLM(dtype="float32", verbose=False, max_num_seqs=64)
    openings = ["Once upon a time", "One day, a little", "There was a", "In a small house"]
    params = [SamplingParams(temperature=0.8, max_tokens=60, seed=seed + i, ignore_eos=True) for i in range(count)]
    outputs = llm.generate([openings[i % 4] for i in range(count)], params, use_tqdm=False)
    words = [(openings[i % 4] + output.outputs[0].text).split() for i, output in enumerate(outputs)]
    rng = random.Random(seed)
    rows = []
    for i, story in enumerate(words):
        others = rng.sample([j for j in range(count) if j != i], 3)
        choices = [" " + " ".join(words[j][20 : 20 + rng.randint(2, 8)]) for j in (i, *others)]
        order = rng.sample(range(4), 4)
        rows.append(
            {"prompt": " ".join(story[:20]), "choices": [choices[j] for j in order], "label": order.index(0), "id": i}
        )
    return rows


def by_lm_eval(source: Path, directory: Path) -> tuple[dict[str, float], list[list[float]]]:
    """Accuracies, and the log-likelihoods of each question's choices."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (directory / "stories.yaml").write_text(TASK.format(file=json.dumps(str(source))))
    model = HFLM(pretrained=str(demo_model_path()), dtype="float32", device="cpu", batch_size=8)
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["jpaged_stories"], task_manager=manager, bootstrap_iters=0)
    figures = found["results"]["jpaged_stories"]
    samples = sorted(found["samples"]["jpaged_stories"], key=lambda sample: sample["doc_id"])
    sums = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
    return {"acc": figures["acc,none"], "acc_norm": figures["acc_norm,none"]}, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="scoring-lm-eval-drill-"))
    source, output = directory / "questions.jsonl", directory / "scores.jsonl"
    rows = questions(args.questions, args.seed)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    # lm-eval's Hugging Face backend begins with the special tokens that the tokenizer itself adds, as this does.
    score_files(source, output, dtype="float32", use_tqdm=False, verbose=False)
    scores = [json.loads(line) for line in output.read_text().splitlines()]
    hits = [
        (s["best"] == row["label"], s["best_per_byte"] == row["label"]) for s, row in zip(scores, rows, strict=True)
    ]
    ours = {"acc": sum(hit for hit, _ in hits) / len(hits), "acc_norm": sum(hit for _, hit in hits) / len(hits)}
    theirs, sums = by_lm_eval(source, directory)
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
