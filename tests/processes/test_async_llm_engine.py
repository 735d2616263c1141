"""`AsyncLLMEngine` with an engine process that the test plays: what it does for each message, and when."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from array import array
from unittest.mock import Mock

import numpy as np
import pytest

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import (
    EngineDeadError,
    EngineRestartingError,
    InvalidParameterError,
    InvalidPromptError,
    OutOfMemoryError,
)
from jpaged.api.sampling_params import SamplingParams
from jpaged.assets import demo_model_path
from jpaged.engine.limits import RequestLimits
from jpaged.processes import handover
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.board import Board
from jpaged.processes.launch import Link
from jpaged.processes.request_metrics import NUM_COLUMNS
from jpaged.processes.shared_weights import map_arrays
from jpaged.processes.tokenizing import INLINE_CHARACTERS
from jpaged.processes.wire import (
    Abort,
    Add,
    Answer,
    Call,
    Changed,
    Error,
    FrameReader,
    GetRequests,
    GiveBackWeights,
    Ready,
    Refused,
    Requests,
    SetPaused,
    Sleep,
    Step,
    ToEngine,
    Unreachable,
    Update,
    UpdateWeights,
    UpdateWeightsOnDevice,
    WakeUp,
    frame,
)
from jpaged.serving.admission import Admission
from jpaged.serving.jobs import JobMaker
from jpaged.serving.limits import ServerLimits
from jpaged.serving.metrics import exposition
from jpaged.serving.options import AppOptions
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest
from jpaged.text.tokenizer import Tokenizer
from tests.support.fake_cuda import on_device

LIMITS = RequestLimits(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=64, block_size=16, num_blocks=256)
READY = Ready(1, "played", 2816, LIMITS, (2,), SamplingParams(), {})


def test_the_processes_of_the_api_do_without_jax():
    """Which the engine's process has; it takes a second or two to import, and memory."""
    code = """if True:
        import sys
        from jpaged.api.config import EngineArgs
        from jpaged.serving import api_process
        from jpaged.processes.async_llm_engine import load_tokenizer
        api_process.keep_torch_out()
        load_tokenizer(EngineArgs()).encode("A snail")
        print("jax" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


class PlayedProcess:
    """An engine process as the test plays it. other_end: of its socket."""

    def __init__(self):
        self.other_end, self.sock = socket.socketpair()
        self.sock.settimeout(60)
        self._reader, self._messages = FrameReader(ToEngine), []
        self.send(READY)

    def send(self, message):
        self.sock.sendall(frame(message))

    async def receive(self):
        """The next message."""
        while not self._messages:
            data = await asyncio.to_thread(self.sock.recv, 65536)
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    async def answer(self, kind, value):
        """Answers the next message, which must be a question of this kind."""
        call = await self.receive()
        assert isinstance(call, Call), call
        assert isinstance(call.question, kind), call.question
        self.send(Answer(call.call_id, value))


class Played(PlayedProcess):
    """The same, and the `AsyncLLMEngine` at the other end."""

    def __init__(self, channel=None):
        super().__init__()
        link = Link([self.other_end], Board(1, 1, NUM_COLUMNS), channel)
        self.engine = AsyncLLMEngine(EngineArgs(), link=link)

    def finished(self):
        """How many requests the metrics have seen end."""
        lines = exposition(self.engine.metrics, "jpaged", "model", {}).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("jpaged:request_success_total"))

    def open(self):
        return self.engine.num_unfinished, self.engine.num_queued, self.engine.num_queued_tokens


def play(scene, channel=None):
    async def run():
        played = Played(channel)
        try:
            async with asyncio.timeout(120):
                await scene(played)
        finally:
            await played.engine.shutdown()
            played.sock.close()

    asyncio.run(run())


async def last(outputs):
    async for output in outputs:
        latest = output
    return latest


def update(handle, token_ids, finish_reason=None):
    return Update(handle, 0, token_ids, finish_reason, None, 0, None, None, None, None, None)


def step(updates=(), handles=(), tokens=(), started=()):
    return Step(
        array("q", handles).tobytes(), array("i", tokens).tobytes(), list(updates), array("q", started).tobytes()
    )


def test_a_request_is_open_until_its_last_token_and_queued_until_its_start():
    async def scene(played):
        asked = asyncio.ensure_future(last(played.engine.generate([5, 6, 7], SamplingParams(max_tokens=3))))
        add = await played.receive()
        assert isinstance(add, Add)
        assert played.open() == (1, 1, 3)
        played.send(step([update(add.handle, [8])], started=[add.handle]))
        played.send(step(handles=[add.handle], tokens=[9]))
        played.send(step([update(add.handle, [10], "length")]))
        output = await asked
        assert output.outputs[0].token_ids == [8, 9, 10]
        assert played.open() == (0, 0, 0)
        assert played.finished() == 1

    play(scene)


def test_a_first_token_is_not_kept_waiting_by_the_next_ones_of_others():
    async def scene(played):
        came = []

        async def listen(name):
            async for output in played.engine.generate([5, 6, 7], SamplingParams(max_tokens=9)):
                came.append((name, len(output.outputs[0].token_ids)))

        async def until(count):
            while len(came) < count:
                await asyncio.sleep(0.001)

        tasks, handles = [], []
        for name in "abc":
            tasks.append(asyncio.ensure_future(listen(name)))
            handles.append((await played.receive()).handle)
        played.send(step([update(handle, [8]) for handle in handles[:2]], started=handles[:2]))
        await until(2)
        played.send(step([update(handles[2], [8])], handles[:2], [9, 9], started=handles[2:]))
        await until(5)
        assert came[2:] == [("c", 1), ("a", 2), ("b", 2)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_who_stops_listening_aborts_the_request_before_or_after_its_start(num_tokens):
    async def scene(played):
        asked = asyncio.ensure_future(last(played.engine.generate([5, 6, 7], SamplingParams(max_tokens=3))))
        add = await played.receive()
        if num_tokens:
            played.send(step([update(add.handle, [8])], started=[add.handle]))
            while played.engine.num_queued:
                await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        aborted = await played.receive()
        assert isinstance(aborted, Abort)
        assert aborted.handles == [add.handle]
        assert played.open() == (0, 0, 0)
        played.send(step([update(add.handle, [9])]))  # was under way
        other = asyncio.ensure_future(last(played.engine.generate([5], SamplingParams(max_tokens=1))))
        add = await played.receive()
        played.send(step([update(add.handle, [9], "length")], started=[add.handle]))
        await other  # so what came before has been taken, too
        assert played.finished() == 2

    play(scene)


def test_a_request_that_the_engine_refuses_is_over_and_counts_as_none_that_ended():
    async def scene(played):
        asked = asyncio.ensure_future(last(played.engine.generate([5], SamplingParams(n=16))))
        add = await played.receive()
        played.send(Refused(add.handle, "InvalidParameterError", "n=16 is too much."))
        with pytest.raises(InvalidParameterError, match="n=16 is too much"):
            await asked
        assert played.open() == (0, 0, 0)
        assert played.finished() == 0

    play(scene)


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "says"),
    [
        ([5], SamplingParams(n=17), {}, InvalidParameterError, "^n=17 exceeds max_num_seqs=16"),
        ([5], SamplingParams(best_of=17), {}, InvalidParameterError, "^best_of=17 exceeds max_num_seqs=16"),
        ([5] * 500, SamplingParams(n=10**9), {}, InvalidParameterError, "^n=1000000000 exceeds"),
        ([5] * 1024, SamplingParams(), {}, InvalidPromptError, "^The prompt has 1024 tokens; with max_model_len=1024"),
        ([5], BeamSearchParams(beam_width=5, max_tokens=1000), {}, OutOfMemoryError, "^beam_width=5 may need 315 blo"),
        ([5], "greedy", {}, InvalidParameterError, "^params must be"),
        ([5], SamplingParams(), {"request_id": ""}, InvalidParameterError, "^request_id must be"),
        ([5], SamplingParams(), {"request_id": 5}, InvalidParameterError, "^request_id must be"),
        ([5], SamplingParams(), {"priority": "high"}, InvalidParameterError, "^priority must be"),
        ([5], SamplingParams(), {"cache_salt": ""}, InvalidParameterError, "^cache_salt must be"),
        ([5], BeamSearchParams(beam_width=12, max_tokens=1, stop_token_ids=range(3, 12)), {}, InvalidParameterError,
         "^beam_width=12 and 10 stop tokens"),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_serve_is_refused_before_it_hears_of_it(prompt, params, options, error, says):
    async def scene(played):
        with pytest.raises(error, match=says):
            await last(played.engine.generate(prompt, params, **options))
        assert played.open() == (0, 0, 0)
        asked = asyncio.ensure_future(last(played.engine.generate([6, 7], SamplingParams(max_tokens=1))))
        add = await played.receive()  # the first that comes
        assert isinstance(add, Add)
        assert array("i", add.prompt).tolist() == [6, 7]
        played.send(step([update(add.handle, [8], "length")], started=[add.handle]))
        await asked

    play(scene)


def test_a_job_of_prompts_that_cannot_all_be_served_is_refused_in_the_words_of_its_request():
    async def scene(played):
        jobs = JobMaker(played.engine, AppOptions(), Admission(played.engine, ServerLimits()))
        search = CompletionRequest(prompt=[[5], [6]], use_beam_search=True, n=1, best_of=17, max_tokens=4)
        with pytest.raises(InvalidParameterError, match=r"^best_of=17 exceeds max_num_seqs=16; .* so lower best_of"):
            await jobs.completion(search, b"")
        with pytest.raises(InvalidParameterError, match=r"^n=17 exceeds max_num_seqs=16"):
            await jobs.completion(CompletionRequest(prompt=[[5], [6]], n=17), b"")
        search = ChatCompletionRequest(
            messages=[{"role": "user", "content": "a"}], use_beam_search=True, n=5, max_completion_tokens=1000
        )
        with pytest.raises(OutOfMemoryError, match=r"^n=5 may need .*; lower n or max_completion_tokens or"):
            await jobs.chat(search, b"")
        assert played.open() == (0, 0, 0)

    play(scene)


def test_what_an_engine_answers_an_error_to_is_raised_as_that_error():
    async def scene(played):
        woken = asyncio.ensure_future(played.engine.wake_up())
        call = await played.receive()
        played.send(Answer(call.call_id, Error("OutOfMemoryError", "There is no room.")))
        with pytest.raises(OutOfMemoryError, match=r"There is no room"):
            await woken
        assert played.engine.is_alive

    play(scene)


@pytest.mark.parametrize(
    "end", [b"", b"\x05\x00\x00\x00what?", b"\xff\xff\xff\xff"], ids=["closed", "nonsense", "huge"]
)
def test_an_engine_that_is_gone_or_talks_nonsense_fails_what_is_open_and_what_comes_later(end):
    async def scene(played):
        asked = asyncio.ensure_future(last(played.engine.generate([5], SamplingParams())))
        await played.receive()
        called = asyncio.ensure_future(played.engine.get_metrics())
        await played.receive()
        if end:
            played.sock.sendall(end)
        else:
            played.sock.close()
        for task in (asked, called):
            with pytest.raises(EngineDeadError):
                await task
        with pytest.raises(EngineDeadError):
            await played.engine.check_health()
        with pytest.raises(EngineDeadError):
            await last(played.engine.generate([5], SamplingParams()))
        assert played.open() == (0, 0, 0)

    play(scene)


def test_the_event_loop_goes_on_while_another_thread_has_the_tokenizer():
    """As with a long prompt: short ones wait in a thread, not in the loop."""

    async def scene(played):
        await played.engine.ready()
        tokenizer = played.engine.tokenizer
        expected = tokenizer.encode("Once upon a time")
        tokenizer._lock.acquire()
        release = threading.Timer(10, tokenizer._lock.release)  # only if the loop stands still
        release.start()
        waiting = [
            asyncio.ensure_future(played.engine.encode("Once upon a time")),
            asyncio.ensure_future(played.engine.process("Once upon a time", SamplingParams())),
            asyncio.ensure_future(played.engine.process([5], SamplingParams(bad_words=["snail"]))),
        ]
        assert (await played.engine.process([5], SamplingParams())).prompt_token_ids == [5]  # takes no tokenizer
        assert not release.finished.is_set()
        release.cancel()
        tokenizer._lock.release()
        encoded, processed, _ = await asyncio.gather(*waiting)
        assert encoded == processed.prompt_token_ids == expected

    play(scene)


def test_text_is_refused_by_its_length_before_it_is_tokenized(monkeypatch):
    longest = Tokenizer.load(demo_model_path()).max_token_characters
    text = "a" * (LIMITS.max_model_len * longest + 1)
    assert len(text) > INLINE_CHARACTERS

    async def scene(played):
        monkeypatch.setattr(played.engine.tokenizer, "encode", None)
        with pytest.raises(ValueError, match=f"has {len(text)} characters; max_model_len=1024"):
            await played.engine.encode(text)
        with pytest.raises(ValueError, match=f"has {len(text)} characters"):
            await played.engine.process(text, SamplingParams())

    play(scene)


def test_an_engine_that_ends_when_it_is_to_sleep_does_not_count_as_asleep():
    async def scene(played):
        asked = asyncio.ensure_future(played.engine.sleep())
        call = await played.receive()
        played.send(Answer(call.call_id, Requests([])))
        assert isinstance((await played.receive()).question, Sleep)
        played.sock.close()
        with pytest.raises(EngineRestartingError, match="ended when it was to sleep"):
            await asked
        assert played.engine.is_restarting

    ours, theirs = handover.socket_pair()
    with ours, theirs:
        play(scene, ours)


class PlayedReplicas:
    """Two replicas whose processes the test plays, and replaces.

    processes: by replica. killed: replicas whose process was found to be of no more use.
    """

    def __init__(self):
        self.processes, self.killed = [PlayedProcess(), PlayedProcess()], []
        sockets = [process.other_end for process in self.processes]
        self.engine = AsyncLLMEngine(EngineArgs(), link=Link(sockets, Board(1, 2, NUM_COLUMNS)))
        keeper = Mock(last_words={}, kill=self.killed.append)
        self.engine._fleet.keeper = keeper

    async def replace(self, replica):
        """Another process takes a replica's place, and serves."""
        before, self.processes[replica] = self.processes[replica], PlayedProcess()
        before.sock.close()
        self.engine._fleet._replaced(replica, self.processes[replica].other_end)
        while self.engine.is_restarting:
            await asyncio.sleep(0)


def play_replicas(scene):
    async def run():
        played = PlayedReplicas()
        try:
            async with asyncio.timeout(120):
                await scene(played)
        finally:
            await played.engine.shutdown()
            for process in played.processes:
                process.sock.close()

    asyncio.run(run())


WEIGHTS = {"a": np.ones(3, np.float32)}
TAKEN = Changed(1, LIMITS)
NO_MEMORY = Error("OutOfMemoryError", "no memory for them")


def test_a_process_that_took_new_weights_and_ended_before_the_others_had_them_leaves_them_to_the_next():
    async def scene(played):
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        await played.processes[0].answer(UpdateWeights, TAKEN)
        while len(played.engine._fleet._calls) > 1:  # until that has come
            await asyncio.sleep(0)
        await played.replace(0)
        await played.processes[1].answer(UpdateWeights, TAKEN)
        await update
        paused = asyncio.ensure_future(played.engine.pause())
        await played.processes[0].answer(UpdateWeights, TAKEN)
        await played.processes[0].answer(SetPaused, TAKEN)
        await played.processes[1].answer(SetPaused, TAKEN)
        await paused

    play_replicas(scene)


def test_replicas_that_sleep_give_weights_back_for_which_another_one_has_no_memory():
    async def scene(played):
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        await played.processes[0].answer(UpdateWeights, TAKEN)
        await played.processes[1].answer(UpdateWeights, NO_MEMORY)
        await played.processes[0].answer(GiveBackWeights, TAKEN)
        with pytest.raises(OutOfMemoryError, match="no memory for them"):
            await update
        assert played.killed == []
        paused = asyncio.ensure_future(played.engine.pause())
        for process in played.processes:
            await process.answer(SetPaused, TAKEN)  # who refused has nothing to give back
        await paused

    play_replicas(scene)


def test_a_refusal_is_raised_though_who_took_the_weights_ends_before_it_gave_them_back():
    async def scene(played):
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        await played.processes[0].answer(UpdateWeights, TAKEN)
        await played.processes[1].answer(UpdateWeights, NO_MEMORY)
        assert isinstance((await played.processes[0].receive()).question, GiveBackWeights)
        played.engine._fleet._die(played.engine._fleet.replicas[0], EngineDeadError("it is not started again"))
        with pytest.raises(OutOfMemoryError, match="no memory for them"):
            await update
        assert played.killed == []

    play_replicas(scene)


def test_weights_that_one_replica_refuses_no_replica_keeps():
    async def scene(played):
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        await played.processes[0].answer(UpdateWeights, TAKEN)
        await played.processes[1].answer(UpdateWeights, Error("InvalidParameterError", "cannot be mapped"))
        await played.processes[0].answer(GiveBackWeights, Changed(0, LIMITS))  # it did not sleep
        with pytest.raises(InvalidParameterError, match="cannot be mapped"):
            await update
        assert played.killed == [0]
        assert "another replica did not take" in played.engine._fleet.keeper.last_words[0]
        await played.replace(0)
        paused = asyncio.ensure_future(played.engine.pause())
        for process in played.processes:
            await process.answer(SetPaused, TAKEN)  # no weights come before it
        await paused

    play_replicas(scene)


def test_a_replica_that_cannot_map_device_memory_gets_the_weights_through_the_host(cuda):
    async def scene(played):
        weights = on_device(cuda, WEIGHTS)
        update = asyncio.ensure_future(played.engine.update_weights(weights, partial=True, keep=False))
        await played.processes[0].answer(UpdateWeightsOnDevice, Changed(1, LIMITS, {"open": 0.5, "write": 2.0}))
        await played.processes[1].answer(UpdateWeightsOnDevice, Unreachable("it does not see it"))
        call = await played.processes[1].receive()
        [shared] = map_arrays(call.question.path, call.question.arrays).items()
        np.testing.assert_equal(shared, ("a", WEIGHTS["a"]))
        played.processes[1].send(Answer(call.call_id, Changed(1, LIMITS, {"open": 0.25, "write": 3.0})))
        await update
        seconds = played.engine.update_seconds
        assert seconds.keys() == {"ready", "export", "copy", "open", "write"}
        assert (seconds["open"], seconds["write"]) == (0.5, 3.0), "of the slowest"
        assert not os.path.exists(call.question.path), "keep=False keeps nothing"

    play_replicas(scene)


def test_weights_that_cannot_get_to_one_replica_either_way_no_replica_keeps(cuda):
    async def scene(played):
        weights = on_device(cuda, WEIGHTS)
        update = asyncio.ensure_future(played.engine.update_weights(weights, keep=False))
        await played.processes[0].answer(UpdateWeightsOnDevice, TAKEN)
        weights["a"].delete()
        await played.processes[1].answer(UpdateWeightsOnDevice, Unreachable("it does not see it"))
        await played.processes[0].answer(GiveBackWeights, Changed(0, LIMITS))
        with pytest.raises(InvalidParameterError, match="'a' cannot be copied to the host"):
            await update
        assert played.killed == [0]

    play_replicas(scene)


def test_an_update_that_comes_while_another_one_goes_both_ways_waits_for_it(cuda):
    async def scene(played):
        given = [on_device(cuda, {name: WEIGHTS["a"]}) for name in "ab"]
        both = asyncio.gather(*(played.engine.update_weights(one, partial=True, keep=False) for one in given))
        for _ in given:
            await played.processes[0].answer(UpdateWeightsOnDevice, TAKEN)
            await played.processes[1].answer(UpdateWeightsOnDevice, Unreachable("it does not see it"))
            await played.processes[1].answer(UpdateWeights, TAKEN)
        await both

    play_replicas(scene)


def test_a_process_started_again_ends_if_weights_were_not_kept_until_all_of_them_were_given_anew():
    async def scene(played):
        async def give(names, **options):
            given = dict.fromkeys(names, WEIGHTS["a"])
            new_weights = asyncio.ensure_future(played.engine.update_weights(given, **options))
            for process in played.processes:
                await process.answer(UpdateWeights, TAKEN)
            await new_weights

        keeper = played.engine._fleet.keeper
        await give("ab")
        await give("b", partial=True, keep=False)
        assert "keep=False" in keeper.why_not_again
        await give("a", partial=True)
        assert keeper.why_not_again
        await give("b", partial=True)
        assert not keeper.why_not_again
        await played.replace(0)
        for _ in ("ab", "a", "b"):
            await played.processes[0].answer(UpdateWeights, TAKEN)
        await give("ab", keep=False)
        before, played.processes[0] = played.processes[0], PlayedProcess()
        before.sock.close()
        played.engine._fleet._replaced(0, played.processes[0].other_end)
        while not played.killed:
            await asyncio.sleep(0)
        assert played.killed == [0]
        assert "no copy was kept" in keeper.last_words[0]

    play_replicas(scene)


def test_an_engine_that_ends_while_it_takes_weights_and_is_not_started_again_says_so():
    async def scene(played):
        played.engine._may_restart = False
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        for process in played.processes:
            await process.receive()
        for replica in played.engine._fleet.replicas:
            played.engine._fleet._lose(replica)
        with pytest.raises(EngineDeadError, match="ended while it took the weights; start it anew"):
            await update

    play_replicas(scene)


def test_weights_that_both_replicas_refuse_cost_no_process():
    async def scene(played):
        update = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        for process in played.processes:
            await process.answer(UpdateWeights, NO_MEMORY)
        with pytest.raises(OutOfMemoryError, match="no memory for them"):
            await update
        assert played.killed == []

    play_replicas(scene)


def test_a_process_that_cannot_have_the_weights_of_the_one_before_it_is_replaced_and_its_tokens_are_not_taken():
    async def scene(played):
        new_weights = asyncio.ensure_future(played.engine.update_weights(WEIGHTS))
        for process in played.processes:
            await process.answer(UpdateWeights, TAKEN)
        await new_weights
        asked = asyncio.ensure_future(last(played.engine.generate([5, 6, 7], SamplingParams(max_tokens=1))))
        add = await played.processes[0].receive()
        await played.replace(0)
        again = await played.processes[1].receive()
        assert (again.handle, again.prompt) == (add.handle, add.prompt)
        call = await played.processes[0].receive()
        assert isinstance(call.question, UpdateWeights)
        wrong = step([update(add.handle, [9], "length")], started=[add.handle])
        played.processes[0].sock.sendall(frame(Answer(call.call_id, NO_MEMORY)) + frame(wrong))
        while not played.killed:
            await asyncio.sleep(0)
        played.processes[1].send(step([update(add.handle, [8], "length")], started=[add.handle]))
        assert (await asked).outputs[0].token_ids == [8]
        assert played.killed == [0]

    play_replicas(scene)


def test_a_replica_that_ended_after_it_fell_asleep_does_not_count_as_asleep():
    async def scene(played):
        asked = asyncio.ensure_future(played.engine.sleep())
        for process in played.processes:
            await process.answer(GetRequests, Requests([]))
        await played.processes[0].answer(Sleep, TAKEN)
        while len(played.engine._fleet._calls) > 1:
            await asyncio.sleep(0)
        await played.replace(0)
        await played.processes[1].answer(Sleep, TAKEN)
        for process in played.processes:
            await process.answer(WakeUp, TAKEN)
        with pytest.raises(EngineRestartingError, match="ended when it was to sleep"):
            await asked

    play_replicas(scene)


@pytest.mark.parametrize("level", [True, "1", 0, 3, 1.0, None])
def test_a_level_of_sleep_that_there_is_not_is_refused_before_an_engine_process_hears_of_it(level):
    """To one that cannot read a message nothing else is left but to end."""

    async def scene(played):
        with pytest.raises(InvalidParameterError, match="level must be"):
            await played.engine.sleep(level)
        assert not played.engine._fleet._calls

    play_replicas(scene)


def test_when_one_replica_refuses_to_sleep_none_does():
    async def scene(played):
        asked = asyncio.ensure_future(played.engine.sleep(2))
        for process in played.processes:
            await process.answer(GetRequests, Requests([]))
        await played.processes[0].answer(Sleep, TAKEN)
        await played.processes[1].answer(Sleep, Error("InvalidParameterError", "not now"))
        for process in played.processes:
            await process.answer(WakeUp, TAKEN)
        with pytest.raises(InvalidParameterError, match="not now"):
            await asked

    play_replicas(scene)


def test_a_socket_that_is_lost_for_want_of_descriptors_ends_the_api_process_with_words():
    ours, theirs = handover.socket_pair()

    async def scene(played):
        await played.engine.ready()
        waiting = asyncio.ensure_future(last(played.engine.generate([5, 6], SamplingParams())))
        await played.receive()
        handover.send(theirs, handover.Replaced(0))  # as it arrives where the kernel could not install the socket
        assert "No descriptor was left" in str(await played.engine.failed())
        with pytest.raises(EngineDeadError, match="raise `ulimit -n`"):
            await waiting

    with ours, theirs:
        play(scene, ours)
