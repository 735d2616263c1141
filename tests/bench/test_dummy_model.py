"""The tokenizers that `benchmarks/dummy_model.py` writes."""

import runpy
from pathlib import Path

import pytest
from tokenizers import Tokenizer

TEXT = "def double(number):\n    return 2 * number\n"


@pytest.mark.parametrize("texts", [None, [TEXT] * 20])
def test_a_tokenizer_has_as_many_tokens_as_asked_for_and_gives_texts_back(texts, tmp_path):
    program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "dummy_model.py"))
    program["write_tokenizer"](tmp_path, 700, texts)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.get_vocab_size() == 700
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT) if texts is None else len(ids) < len(TEXT) / 3  # random words are not merged
