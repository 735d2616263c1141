"""What a story is worth, computed by a program: does it do what was asked, is it short, does it end happily?"""

import random
import re
from dataclasses import dataclass
from typing import NamedTuple

HEROES = ("fox", "bear", "hare", "robot", "owl", "mouse", "hedgehog", "dragon", "duck", "squirrel", "turtle", "frog")
THINGS = ("lantern", "kite", "key", "drum", "boat", "basket", "clock", "blanket", "ladder", "whistle", "map", "ball")

MOST_WORDS = 60
"""A story of no more words is short. One of half as many more is worth nothing for its length."""

_HAPPY = re.compile(r"\b(happy|happily|happiest|joy|laughed|smiled|glad|friends?|best|danced|cheered|hugged)\b", re.I)


@dataclass(frozen=True)
class Task:
    """A request for a story about a hero and a thing."""

    hero: str
    thing: str

    @property
    def text(self) -> str:
        article = "an" if self.hero[0] in "aeiou" else "a"
        return f"Tell me a very short story about {article} {self.hero} and a {self.thing}."


class Reward(NamedTuple):
    """Parts of a reward, each from 0 to 1."""

    mentions: float
    short: float
    happy: float

    @property
    def total(self) -> float:
        """Their mean."""
        return sum(self) / len(self)


def draw_tasks(rng: random.Random, count: int) -> list[Task]:
    return [Task(rng.choice(HEROES), rng.choice(THINGS)) for _ in range(count)]


def reward(task: Task, story: str, has_ended: bool) -> Reward:
    """has_ended: the model ended the story itself. One that was cut off is not short, and has no end."""
    words = re.findall(r"[\w']+", story)
    known = {word.lower() for word in words}
    mentions = sum(word in known for word in (task.hero, task.thing)) / 2
    if not has_ended:
        return Reward(mentions, 0.0, 0.0)
    short = min(1.0, max(0.0, 3 - 2 * len(words) / MOST_WORDS))
    last = [sentence for sentence in re.split(r"(?<=[.!?])\W*\s", story.strip()) if sentence][-1:]
    return Reward(mentions, short, float(any(_HAPPY.search(sentence) for sentence in last)))
