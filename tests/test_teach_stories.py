"""examples/teach_stories: the reward is what it says, the plot is one, and a few steps raise the reward."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "teach_stories"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    """Its files import each other by name; another example may have files of the same names."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for file in EXAMPLE.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)


def test_a_story_is_rewarded_for_what_was_asked_for():
    from rewards import Task, reward

    task = Task("owl", "map")
    assert task.text == "Tell me a very short story about an owl and a map."
    good = "An owl lost her Map. She found it. They all lived happily ever after."
    assert tuple(reward(task, good, True)) == (1.0, 1.0, 1.0)
    assert tuple(reward(task, good, False)) == (1.0, 0.0, 0.0)
    assert tuple(reward(task, "An owl was happy. Then it rained.", True)) == (0.5, 1.0, 0.0)
    assert reward(task, "word " * 75, True).short == pytest.approx(0.5)
    assert reward(task, "word " * 91, True).short == 0
    assert tuple(reward(task, "", True)) == (0.0, 1.0, 0.0)


def test_the_plot_is_an_svg_with_a_line_for_each_part(tmp_path):
    from plot import write_plot

    write_plot(tmp_path / "plot.svg", "a < b", {"reward": [0.2, 0.5, 1.0], "short": [0.1, 0.0, 0.3]})
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]


def test_a_few_steps_of_training_raise_the_reward():
    from teach import Settings, engine, teach

    settings = Settings(steps=6, requests=2, stories=8, tokens=96, learning_rate=7e-4)
    llm = engine(settings)
    with llm:
        steps = list(teach(llm, settings))
    rewards = [step.total for step in steps]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1, rewards
    assert max(step.distance for step in steps) < 1e-3  # each batch was sampled from the weights that it trains
    assert set(steps[0].seconds) == {"rollout", "log-probabilities", "update", "sync"}
