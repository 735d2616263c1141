"""A task of multiple choice for lm-eval: beginnings of stories, each with its own continuation and three of others.

    stories --questions--> rows --StoriesTask--> questions.jsonl, stories.yaml --evaluate--> accuracies, log-likelihoods

For `clients.py` and `scoring_lm_eval.py`. It needs lm_eval, and not jpaged.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPENINGS = ("Once upon a time", "One day, a little", "There was a", "In a small house")
"""Story i begins with OPENINGS[i % 4]."""

_TASK = """\
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


def questions(stories: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """A row for each story: its first 20 words, four continuations of a few words, and which of them is its own."""
    words = [story.split() for story in stories]
    draw = random.Random(seed)
    rows = []
    for i, story in enumerate(words):
        others = draw.sample([j for j in range(len(words)) if j != i], 3)
        choices = [" " + " ".join(words[j][20 : 20 + draw.randint(2, 8)]) for j in (i, *others)]
        order = draw.sample(range(4), 4)
        rows.append(
            {"prompt": " ".join(story[:20]), "choices": [choices[j] for j in order], "label": order.index(0), "id": i}
        )
    return rows


class StoriesTask:
    """The task in files. source: the rows, a JSON object a line."""

    def __init__(self, directory: Path, rows: Sequence[dict[str, Any]]) -> None:
        from lm_eval.tasks import TaskManager

        self.source = directory / "questions.jsonl"
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / "stories.yaml").write_text(_TASK.format(file=json.dumps(str(self.source))))
        self._manager = TaskManager(include_path=str(directory), include_defaults=False)

    def evaluate(self, model: Any) -> tuple[dict[str, float], list[list[float]]]:
        """What an lm-eval model reaches: accuracies by sum and by length, and for each row its choices' sums."""
        import lm_eval

        found = lm_eval.simple_evaluate(model, tasks=["jpaged_stories"], task_manager=self._manager, bootstrap_iters=0)
        figures = found["results"]["jpaged_stories"]
        samples = sorted(found["samples"]["jpaged_stories"], key=lambda sample: sample["doc_id"])
        sums = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]
        return {metric: figures[f"{metric},none"] for metric in ("acc", "acc_norm")}, sums
