"""The tokens of reasoning are counted as they were generated, however their text is cut and held back."""

import pytest

from jpaged.api.outputs import CompletionOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.answers import news_of
from jpaged.serving.reasoning_tokens import ReasoningTokens
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.turns.formats import REASONING_FORMATS
from jpaged.text.turns.parser import TurnParser
from tests.text.tokenizers_for_tests import tokenizer

FORMS = {form.name: form for form in REASONING_FORMATS}
THOUGHT, SAID = "\n\nwhy not, 中 </the> café 😀\n", "\n\n中 so"
STOP = "Z" * 40
"""A stop string that holds no text back, since no text begins with it."""


class Generated:
    """An answer that comes so many tokens at a time."""

    def __init__(self, name, reasoning="think", reasons="free", stop=None):
        self.model = Tokenizer(tokenizer(name), "some/model")
        self.form = FORMS[reasoning]
        self.parser = TurnParser(reasoning=self.form, reasons=reasons)
        self.params = SamplingParams(stop=stop)
        self.count = ReasoningTokens(self.model, [], skips_special_tokens=True)
        self.detokenizer = Detokenizer(self.model, [], self.params)

    def ids(self, *texts):
        return [self.model.encode(text, add_special_tokens=False) for text in texts]

    def take(self, ids, most, reason="length"):
        """Returns the counts after each piece. reason: why the answer ends, unless a stop string ends it."""
        counts = []
        for at in range(0, len(ids), most):
            piece, last = ids[at : at + most], at + most >= len(ids)
            found = self.detokenizer.append(piece, stop_token=last and reason == "stop")
            text = self.detokenizer.next_delta(last or found is not None)
            ended = reason if last else "stop" if found else None
            completion = CompletionOutput(0, text, piece, finish_reason=ended, stop_reason=found)
            news_of(completion, self.parser, self.count)
            counts.append(self.count.num_tokens)
            if found:
                break
        return counts


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback, no strip"])
@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("stop", [None, [STOP, "😀ZZ", "\n\n中Z"]], ids=["", "held back"])
@pytest.mark.parametrize("reasoning", ["think", "granite", "harmony"])
def test_they_are_those_between_the_marks(name, most, stop, reasoning):
    made = Generated(name, reasoning, stop=stop)
    opening, thought, closing, said = made.ids(made.form.opening, THOUGHT, made.form.closing, SAID)
    counts = made.take(opening + thought + closing + said, most)
    assert counts[-1] == len(thought)
    assert counts == sorted(counts)
    if most == 1 and not stop:
        assert counts[: len(opening)] == [0] * len(opening)


def test_reasoning_that_the_prompt_has_opened_counts_from_the_first_token():
    made = Generated("byte-level", reasons="open")
    thought, closing, said = made.ids(THOUGHT, "</think>", SAID)
    assert made.take(thought + closing + said, 2)[-1] == len(thought)


def test_what_is_cut_off_inside_a_character_counts_where_it_stands():
    made = Generated("byte-level", reasons="open")
    (thought,) = made.ids("why \U0001f9ff")
    assert made.take(thought[:-1], 1)[-1] == len(thought) - 1
    made = Generated("byte-level", reasons="open")
    thought, closing, said = made.ids("why", "</think>", "\U0001f9ff")
    assert made.take([*thought, *closing, *said[:-1]], 1)[-1] == len(thought)


def test_the_token_that_ends_an_answer_is_no_thought_and_one_that_a_stop_string_cuts_is():
    made = Generated("byte-level", reasons="open")
    (thought,) = made.ids("why not")
    end = made.model.hf.eos_token_id
    assert made.take([*thought, end], 1000, reason="stop")[-1] == len(thought)
    made = Generated("byte-level", reasons="open", stop=["not"])
    thought, rest = made.ids("why not", " at all")
    assert made.take(thought + rest, 1)[-1] == len(thought)


def test_without_a_tokenizer_nothing_is_counted():
    count, parser = (
        ReasoningTokens(None, [], skips_special_tokens=True),
        TurnParser(reasoning=FORMS["think"], reasons="open"),
    )
    news_of(CompletionOutput(0, "", [1, 2], finish_reason="length"), parser, count)
    assert count.num_tokens == 0
