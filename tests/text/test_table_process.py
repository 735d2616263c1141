"""The process that makes tables: a grammar gets its own while its sequences go on, or none, and nobody waits."""

import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from jpaged.api.structured_outputs import StructuredOutputsParams as Structured
from jpaged.assets import demo_model_path
from jpaged.text import grammar_tables
from jpaged.text.grammar_compiler import GrammarCompiler
from jpaged.text.grammars import GrammarTokenizer, grammar_text
from jpaged.text.guides import FollowedGrammar, Vocabulary
from jpaged.text.regular.constraints import automaton_of
from jpaged.text.regular.spellings import Spellings
from jpaged.text.token_tables import token_table
from jpaged.text.tokenizer import Tokenizer

VOCAB_SIZE, EOS = 2816, 2
SLOW = Structured(json={"type": "array", "items": {"type": "string", "maxLength": 90}, "minItems": 4, "maxItems": 4})


@pytest.fixture(scope="module")
def given():
    return GrammarTokenizer.of(Tokenizer.load(demo_model_path()), VOCAB_SIZE, (EOS,))


@pytest.fixture
def compiler(given):
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE)
    yield compiler
    compiler.close()


def begun(compiler, params, count):
    grammar = compiler.compile(params).result()
    for _ in range(count):
        grammar.begin(False)
    return grammar


def holds_soon(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def forked(pid):
    """The processes that one has forked."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(one) for one in listed.stdout.split()]


def is_running(pid):
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip(" Z\n"))


def table_process(compiler):
    return forked(compiler._process.pid)[-1]


def test_a_grammar_has_its_table_once_its_fourth_sequence_has_begun(compiler, given):
    params = Structured(regex="[ab]{2}(?:fox|frog)")
    early, grammar = begun(compiler, Structured(choice=["x", "y"]), 3), begun(compiler, params, 4)
    assert holds_soon(lambda: grammar.table is not None)
    tokenizer, vocabulary = given.make(), Vocabulary.of(VOCAB_SIZE, (EOS,), compiler.num_words)
    followed = FollowedGrammar(tokenizer, grammar_text(params))
    expected = token_table(automaton_of(params), followed, tokenizer, vocabulary, Spellings(tokenizer, VOCAB_SIZE))
    for own, other in zip(grammar.table, expected, strict=True):
        assert np.array_equal(own, other)
    assert grammar.table.masks.dtype == np.uint32
    assert early.table is None


def test_tables_that_were_made_first_make_room_for_others_and_come_again(compiler, monkeypatch):
    first, second = (begun(compiler, Structured(choice=["x", text]), 3) for text in "yz")
    monkeypatch.setattr(grammar_tables, "MOST_BYTES", 20_000)  # of one, which has a class for each token
    first.begin(False)
    assert holds_soon(lambda: first.table is not None)
    second.begin(False)
    assert holds_soon(lambda: second.table is not None and first.table is None)
    for _ in range(4):
        first.begin(False)
    assert holds_soon(lambda: first.table is not None and second.table is None)


def test_the_process_runs_behind_those_of_other_sessions(compiler):
    grammar = begun(compiler, Structured(choice=["x", "y"]), 4)
    assert holds_soon(lambda: grammar.table is not None)
    pid = table_process(compiler)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    assert os.getsid(pid) == pid
    with suppress(FileNotFoundError):  # a system that groups no processes by session
        if Path("/proc/sys/kernel/sched_autogroup_enabled").read_text() == "1\n":
            assert Path(f"/proc/{pid}/autogroup").read_text().endswith("nice 10\n")


def test_what_has_no_table_keeps_no_other_waiting(compiler):
    begun(compiler, Structured(json={"type": "object"}), 4)
    grammar = begun(compiler, Structured(choice=["x", "y"]), 4)
    assert holds_soon(lambda: grammar.table is not None)


def test_the_table_of_the_constraint_with_the_most_sequences_is_made_first(compiler, monkeypatch):
    made, original = [], grammar_tables._made

    def told(sock, params):
        made.append(params)
        assert holds_soon(lambda: all_have_begun)
        return original(sock, params)

    monkeypatch.setattr(grammar_tables, "_made", told)
    all_have_begun: list[bool] = []
    counts = {"a": 4, "b": 5, "c": 9, "d": 7}
    grammars = [begun(compiler, Structured(choice=["x", text]), count) for text, count in counts.items()]
    all_have_begun.append(True)
    assert holds_soon(lambda: all(grammar.table is not None for grammar in grammars))
    assert [params.choice[1] for params in made] == ["a", "c", "d", "b"]


def test_the_end_of_the_process_that_makes_a_table_costs_that_table_alone(compiler):
    slow = begun(compiler, SLOW, 4)
    assert holds_soon(lambda: forked(table_process(compiler)))
    os.kill(forked(table_process(compiler))[0], signal.SIGKILL)
    grammar = begun(compiler, Structured(choice=["x", "y"]), 4)
    assert holds_soon(lambda: grammar.table is not None)
    assert slow.table is None


def test_without_the_process_for_tables_sequences_are_followed_all_the_same(compiler, caplog):
    first = begun(compiler, Structured(choice=["y", "z"]), 3)
    process = compiler._process
    os.kill(table_process(compiler), signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "jpaged.engine"):
        first.begin(False)
        assert holds_soon(lambda: caplog.records)
        grammar = begun(compiler, Structured(choice=["x", "y"]), 5)
        assert len(compiler.make_masks([grammar.begin(False)])[0])
    assert [record.message for record in caplog.records] == [
        "The process that makes tables of constraints has ended; all are followed token by token."
    ]
    assert first.table is grammar.table is None
    assert compiler._process is process
    assert process.is_alive


def test_a_closed_compiler_leaves_no_process_that_makes_a_table(compiler, caplog):
    begun(compiler, SLOW, 4)
    pid = table_process(compiler)
    assert holds_soon(lambda: forked(pid))
    (child,) = forked(pid)
    compiler.close()
    assert holds_soon(lambda: not is_running(pid))
    assert not is_running(child)
    assert not caplog.records
