"""Tries a trained model out, with transformers: prints stories for fixed requests, and counts how often it obeys.

    python examples/train_story_model/sample.py story_model --report samples.md

The counts are over requests that pair a hero with an object that training never showed together: does the story
mention everything the request named, does it end by itself, does it repeat itself.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install torch")
from conversations import Request, answered
from transformers import AutoModelForCausalLM, AutoTokenizer

REQUESTS = (
    "Tell me a story about a fox and a lantern.",
    "Write a short story about a lonely lighthouse keeper.",
    "Can you tell me a bedtime story?",
    "A funny story about a dragon who is afraid of thunder, please.",
    "I'd like a story about courage.",
    "tell me a story about a mouse, a bear and a red kite",
    "Make up a story about a girl called Amara who finds a key.",
    "Please write a scary story set in the castle.",
    "A very short story about an owl.",
    "Tell me a long story about a robot and a music box in the forest.",
    "Tell me a story about a zebroid and a flumptwister.",
    "Tell me a story about quantum computers.",
    "Could you write a story about honesty with a title?",
    "a story about penguins",
    "How about a story about two friends in a boat?",
    "Tell me about photosynthesis.",
    "What is 12 + 30?",
    "Hello!",
    "Who are you?",
    "Thank you!",
)
CONVERSATION = (
    "Hello",
    "Yes, please.",
    "Another one, please.",
    "Tell me a story about a hedgehog and a teapot.",
    "What was the hedgehog called?",
    "What happened next?",
    "Thank you!",
)


class Storyteller:
    def __init__(self, directory: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_num_threads(1)  # for a model this small, threads only wait for each other
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, chats: list[list[dict[str, str]]], temperature: float) -> list[tuple[str, bool]]:
        """The answer to each chat, and whether it ended by itself."""
        inputs = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        ).to(self.device)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": 0.95} if temperature else {"do_sample": False}
        )
        if not temperature:
            sampling |= {"temperature": None, "top_p": None}
        output = self.model.generate(**inputs, max_new_tokens=500, **sampling)
        answers = output[:, inputs["input_ids"].shape[1] :]
        return [
            (self.tokenizer.decode(ids, skip_special_tokens=True), bool((ids == self.tokenizer.eos_token_id).any()))
            for ids in answers
        ]


def named(request: Request) -> list[str]:
    """The words of a request that its story must contain."""
    wish, text = request.wish, request.text.lower()
    words = []
    for noun in (wish.hero and wish.hero.kind, wish.friend and wish.friend.kind, wish.thing and wish.thing.noun):
        if noun and re.search(rf"\b{re.escape(noun)}\b", text):
            words.append(noun)
    for name in (wish.hero and wish.hero.name, wish.friend and wish.friend.name):
        if name and re.search(rf"\b{re.escape(name.lower())}\b", text):
            words.append(name.lower())
    if wish.place:
        words.append(wish.place.name)
    if wish.topic:
        words.append(wish.topic.lower())
    return words


def repeats(text: str) -> bool:
    """True if a sentence of four words or more occurs three times."""
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if len(s.split()) >= 4]
    return any(sentences.count(s) >= 3 for s in set(sentences))


def obedience(tell: Storyteller, count: int, temperature: float, batch: int = 50) -> dict[str, float]:
    """Shares over `count` held-out requests. Prints what was missed."""
    rng = random.Random("obedience")
    requests: list[Request] = []
    while len(requests) < count:
        request, _ = answered(rng, held_out=True)
        if request.wish.hero and request.wish.thing:
            requests.append(request)
    wanted = found = whole = ended = looped = 0
    for start in range(0, count, batch):
        some = requests[start : start + batch]
        answers = tell([[{"role": "user", "content": r.text}] for r in some], temperature)
        for request, (story, end) in zip(some, answers, strict=True):
            words = named(request)
            missed = [word for word in words if word not in story.lower()]
            wanted += len(words)
            found += len(words) - len(missed)
            whole += not missed
            ended += end
            looped += repeats(story)
            if missed:
                print(f"missed {missed}: {request.text!r}")
    return {
        "requests": count,
        "elements_mentioned": round(found / max(1, wanted), 4),
        "requests_fulfilled": round(whole / count, 4),
        "ended": round(ended / count, 4),
        "looped": round(looped / count, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="directory of the trained model")
    parser.add_argument("--report", type=Path, help="write the samples to this Markdown file too")
    parser.add_argument("--count", type=int, default=200, help="held-out requests to count over")
    args = parser.parse_args()
    torch.manual_seed(0)
    tell = Storyteller(args.model)

    lines: list[str] = []
    for temperature in (0.0, 0.7):
        lines.append(f"# Temperature {temperature}\n")
        answers = tell([[{"role": "user", "content": text}] for text in REQUESTS], temperature)
        for text, (answer, end) in zip(REQUESTS, answers, strict=True):
            lines.append(f"**{text}**\n\n{answer}{'' if end else ' [did not end]'}\n")
        lines.append(f"# A conversation at temperature {temperature}\n")
        chat: list[dict[str, str]] = []
        for text in CONVERSATION:
            chat.append({"role": "user", "content": text})
            answer, end = tell([chat], temperature)[0]
            chat.append({"role": "assistant", "content": answer})
            lines.append(f"**{text}**\n\n{answer}{'' if end else ' [did not end]'}\n")
    counts = {f"temperature {t}": obedience(tell, args.count, t) for t in (0.0, 0.7)}
    lines.append("# Held-out requests\n\n```json\n" + json.dumps(counts, indent=1) + "\n```")
    report = "\n".join(lines) + "\n"
    if args.report:
        args.report.write_text(report, encoding="utf-8")
    sys.stdout.write(report)


if __name__ == "__main__":
    main()
