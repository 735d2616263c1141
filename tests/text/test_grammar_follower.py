"""Grammars followed without waiting, in several processes of which any may die at any time."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from unittest import mock

import msgspec
import numpy as np
import pytest

from jpaged.api.errors import JPagedError
from jpaged.api.structured_outputs import StructuredOutputsParams as Structured
from jpaged.assets import demo_model_path
from jpaged.engine.constraints.following import Job
from jpaged.text import frames, grammar_guides, grammar_process
from jpaged.text.grammar_compiler import GrammarCompiler
from jpaged.text.grammar_follower import Follower
from jpaged.text.grammar_process import Changes, Followed, KeptMasks, Made, MakeMasks, MaskNumbers, Place, Places
from jpaged.text.grammar_shards import Shard
from jpaged.text.grammars import GrammarTokenizer
from jpaged.text.tokenizer import Tokenizer

VOCAB_SIZE, EOS = 2816, 2
NUM_SHARDS = 3
NO_TOKEN = -1


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_model_path())


@pytest.fixture(scope="module")
def given(tokenizer):
    return GrammarTokenizer.of(tokenizer, VOCAB_SIZE, (EOS,))


@pytest.fixture
def compiler(given):
    compiler = GrammarCompiler(lambda: given, VOCAB_SIZE, NUM_SHARDS)
    yield compiler
    compiler.close()


def token_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)[-1]


def job_of(guides, tokens, guessed):
    count = len(guides)
    return Job(
        np.arange(count),
        guides,
        np.array([tokens] * count, np.int32),
        np.full((count,), guessed),
        np.zeros((count,), np.int64),
    )


def listed(places):
    """`Places` one by one."""
    columns = (column.tolist() for column in places[:3])
    return [
        Place(places.forced.get(i, ()), *of_guide, failure=places.failures.get(i, ""))
        for i, of_guide in enumerate(zip(*columns, strict=True))
    ]


def answers(follower, count):
    """Places and masks of all slots, as `take_all` brings them."""
    places, masks = {}, {}
    while len(places) < count or any(place.waits and slot not in masks for slot, place in places.items()):
        for answer in follower.take_all(waits=True):
            into, values = (places, listed(answer.places)) if answer.places is not None else (masks, answer.masks)
            assert not into.keys() & set(answer.slots.tolist())
            into.update(zip(answer.slots.tolist(), values, strict=True))
    return places, masks


def shards_of(compiler):
    """The processes' ids: the one that was started, and those that it has forked, without the one for tables."""
    first = compiler._process.pid
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(first)], capture_output=True, text=True, check=True)
    return [first, *map(int, listed.stdout.split()[:-1])]


def test_sequences_are_spread_over_shards_which_say_what_one_alone_says(compiler, tokenizer):
    grammar = compiler.compile(Structured(regex="[ab]{2}(?:fox|frog|[0-9]+)")).result()
    guides, alone = [grammar.begin(False) for _ in range(10)], grammar.begin(False)
    follower = compiler.follower()
    for text in "ab":
        follower.put(job_of(guides, [token_of(tokenizer, text)], False))
        places, masks = answers(follower, 10)
        (expected,) = compiler.advance([alone], np.array([[token_of(tokenizer, text)]]), [False], [0])
        (mask,) = compiler.make_masks([alone])
        assert set(places.values()) == {expected}
        assert all(made.tolist() == mask.tolist() for made in masks.values())
    assert len(masks) == 10
    live = [shard.num_live for shard in compiler._process.shards]
    assert sum(live) == 11
    assert max(live) - min(live) <= grammar_guides._MORE_IN_KNOWN
    assert min(live) > 0
    del guides[:], alone
    assert [shard.num_live for shard in compiler._process.shards] == [0, 0, 0]
    assert len(shards_of(compiler)) == NUM_SHARDS


def test_of_what_was_guessed_the_first_allowed_token_counts(compiler, tokenizer):
    a, b, z = (token_of(tokenizer, text) for text in "abz")
    guide = compiler.compile(Structured(regex="[ab]{9}")).result().begin(False, True)
    follower = compiler.follower()
    for tokens, num_refused in (([a, b, NO_TOKEN], 0), ([z, EOS, b, NO_TOKEN], 2)):
        follower.put(job_of([guide], tokens, True))
        (place,) = answers(follower, 1)[0].values()
        assert (place.num_refused, place.is_refused) == (num_refused, False)
    assert guide.followed.tolist() == [a, b]
    follower.put(job_of([guide], [z, EOS, NO_TOKEN], True))
    (place,), (mask,) = (list(found.values()) for found in answers(follower, 1))
    assert place.is_refused
    assert place.needs_mask  # several tokens were refused, so few are allowed
    assert {a, b} <= set(mask.tolist())
    assert not {z, EOS} & set(mask.tolist())


@pytest.mark.parametrize("which", range(NUM_SHARDS))
def test_whichever_shard_dies_its_sequences_go_on_in_others_and_nobody_waits_for_it(compiler, tokenizer, which):
    a = token_of(tokenizer, "a")
    grammar = compiler.compile(Structured(regex="[ab]{3}")).result()
    guides = [grammar.begin(False, i % 2 > 0) for i in range(12)]
    follower = compiler.follower()
    follower.put(job_of(guides, [a], False))
    before, _ = answers(follower, 12)
    process = compiler._process
    os.kill(shards_of(compiler)[which], signal.SIGKILL)
    follower.put(job_of(guides, [a], False))
    after, masks = answers(follower, 12)
    assert compiler._process is not process
    assert {place.failure for place in (*before.values(), *after.values())} == {""}
    assert all(guide.followed.tolist() == [a, a] for guide in guides)
    assert all(set(mask.tolist()) == {a, token_of(tokenizer, "b")} for mask in masks.values())
    ends = time.monotonic() + 120
    while any(shard.sock.fileno() >= 0 for shard in process.shards):
        assert time.monotonic() < ends


@pytest.mark.parametrize("fails", ["killed", "raising", "raising, unasked"])
def test_why_a_shard_ends_is_logged_once_and_its_sequences_go_on(compiler, tokenizer, caplog, fails):
    a = token_of(tokenizer, "a")
    guide = compiler.compile(Structured(regex="[ab]{3}")).result().begin(False)
    follower = compiler.follower()
    follower.put(job_of([guide], [a], False))
    answers(follower, 1)
    shard, unknown = guide.shard, 4711
    if fails == "killed":
        os.kill(compiler._process.pid, signal.SIGKILL)
    elif fails == "raising":
        shard.ask(MakeMasks(Changes([], [], [], []), [unknown]), lambda _: True)
    else:
        shard.sock.sendall(frames.framed(msgspec.msgpack.encode(MakeMasks(Changes([], [], [], []), [unknown]))))
    ends = time.monotonic() + 120
    while guide.is_alive:
        follower.wait(0.01)
        follower.take_all()
        assert time.monotonic() < ends
    follower.put(job_of([guide], [a], False))
    places, _ = answers(follower, 1)
    assert not places[0].failure
    tracebacks = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(tracebacks) == ("raising" in fails)
    assert all(f"KeyError: {unknown}" in text for text in tracebacks)
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        "The processes that follow grammars have ended; others take up their sequences."
    ]


def test_places_are_what_they_were_once_they_have_come_over_a_socket():
    places = [
        Place(),
        Place(needs_mask=False, num_refused=15),
        Place(is_refused=True),
        Place((3, 4), False, 2),
        Place(failure="it ended"),
    ]
    sent = msgspec.msgpack.encode(Followed.of(places))
    assert msgspec.msgpack.decode(sent, type=Followed).places == places
    assert listed(msgspec.msgpack.decode(sent, type=Followed).arrays) == places
    assert Places.of(places).waiting == [0, 2]
    assert [place.waits for place in places] == [True, False, True, False, False]


def test_both_ends_of_a_socket_keep_the_same_masks_and_each_is_sent_once_while_they_do(monkeypatch):
    monkeypatch.setattr(grammar_process, "MOST_KEPT", 3)
    shard, kept, draw = MaskNumbers(), KeptMasks(), np.random.default_rng(0)
    sent = []
    for _ in range(200):
        masks = [(bool(one % 2), np.array([one], np.int32).tobytes()) for one in draw.integers(0, 6, 3).tolist()]
        made = msgspec.msgpack.decode(msgspec.msgpack.encode(shard.pack(masks, {})), type=Made)
        taken = kept.take(made)
        assert [(mask.dtype == np.int32, mask.tobytes()) for mask in taken] == masks
        assert kept.take(Made(made.numbers, []))[0] is taken[0]
        sent.append(len(made.new))
    assert 0 < sum(sent) < 2 * len(sent)
    assert 0 in sent
    (failed,) = kept.take(shard.pack([(True, b"")], {0: "it ended"}))
    assert failed == "it ended"


def test_waking_ends_a_wait_and_is_news_until_all_is_taken(compiler):
    follower = compiler.follower()
    assert not follower.has_news
    threading.Timer(0.05, follower.wake).start()
    begun = time.monotonic()
    follower.wait(120)
    assert time.monotonic() - begun < 60
    assert follower.has_news
    assert follower.take_all() == []
    assert not follower.has_news


def test_a_constraint_that_takes_long_to_compile_gets_more_shards_beside_the_work(compiler, monkeypatch):
    monkeypatch.setattr(grammar_guides, "_QUICK_S", 0.0)
    grammar = compiler.compile(Structured(regex="[a-z]{3,9}")).result()
    assert len(grammar.shards) == 1
    ends = time.monotonic() + 120
    guides = [grammar.begin(False)]
    assert guides[0].shard in grammar.shards
    while len(grammar.shards) < NUM_SHARDS:
        guides.append(grammar.begin(False))
        assert time.monotonic() < ends
        time.sleep(0.01)
    spread = [grammar.begin(False) for _ in range(3 * NUM_SHARDS)]
    assert {guide.shard for guide in spread} == set(compiler._process.shards)
    masks = compiler.make_masks(spread)
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


def test_who_asks_does_not_wait_for_a_shard_that_writes():
    """A shard that is writing reads nothing, and what it does not read fills the socket."""
    ours, theirs = socket.socketpair()
    owner = threading.local()  # of the shard, which sees it weakly
    shard = Shard(owner, ours)
    come = []
    message = MakeMasks(Changes([], [(i, Structured(regex="a" * 250_000)) for i in range(2)], [], []), [1])
    asking = threading.Thread(target=lambda: [shard.ask(message, lambda made: not come.append(made)) for _ in range(3)])
    asking.start()
    asking.join(120)
    assert not asking.is_alive()

    decoder = msgspec.msgpack.Decoder(MakeMasks)
    read = []

    def serve():
        for _ in range(3):
            frames.write_frame(theirs, msgspec.msgpack.encode(Made([0], [(0, False, bytes(1_000_000))])))
            read.append(decoder.decode(frames.read_frame(theirs)))

    serving = threading.Thread(target=serve)
    serving.start()
    ends = time.monotonic() + 120
    while serving.is_alive() or len(come) < 3:
        shard.pump()
        assert time.monotonic() < ends
    assert read == [message] * 3
    assert [made[0].nbytes for made in come] == [1_000_000] * 3
    theirs.close()
    ours.close()


def test_what_is_to_come_fails_once_all_is_closed_and_nothing_starts_again(compiler, tokenizer):
    grammar = compiler.compile(Structured(regex="[ab]{3}")).result()
    guides = [grammar.begin(False) for _ in range(2)]
    follower = compiler.follower()
    follower.put(job_of(guides, [token_of(tokenizer, "a")], False))
    follower.close()
    compiler.close()
    process = compiler._process
    places, masks = {}, {}
    for answer in follower.take_all(waits=True):
        (masks if answer.places is None else places).update(dict.fromkeys(answer.slots.tolist()))
    assert places or masks
    follower.put(job_of(guides, [token_of(tokenizer, "a")], False))
    failed, _ = answers(follower, 2)
    assert all("has ended" in place.failure for place in failed.values())
    with pytest.raises(JPagedError, match="the engine has been closed"):
        compiler.compile(Structured(regex="[cd]{3}")).result()
    assert compiler._process is process
    assert not process.is_alive


class SharedAnswers(deque):
    """To which another thread appends an answer after each look at them, as long as it has `more`."""

    more = 3

    def _append_more(self) -> None:
        if self.more:
            self.append(self.more)
            self.more -= 1

    def __iter__(self):
        found = list(super().__iter__())
        self._append_more()
        return iter(found)

    def popleft(self):
        found = super().popleft()
        self._append_more()
        return found


def test_no_answer_is_lost_that_another_thread_takes_from_a_shard_meanwhile():
    """As one does that takes sequences up in other processes, or for another engine."""
    follower = Follower(mock.Mock())
    follower._answers = SharedAnswers([4])
    assert follower.take_all() + follower.take_all() == [4, 3, 2, 1]
