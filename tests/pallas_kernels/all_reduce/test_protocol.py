"""That the one-shot all-reduce adds the right rows and ends, however its threads and devices overtake one another. The
kernel's body runs as it stands, with stand-ins that note which words it sends and awaits; the notes are then replayed
in random order over devices, where every word that was sent arrives when it likes.
"""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.pallas_kernels.all_reduce import inbox as state
from jpaged.pallas_kernels.all_reduce.operands import Operands
from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jpaged.pallas_kernels.all_reduce import hopper as kernel

CTAS, AHEAD, WORDS = 3, 2, 2
"""Instead of 264, 4 and thousands, so that few rows go through all of the loop. A thread has one word of a row."""
GENERATIONS = (0, 2**31 - 3, -2)
SIZES = [(devices, rows) for rows in (2, CTAS, CTAS * AHEAD + 1, CTAS * AHEAD * 4 + 2) for devices in (2, 3, 4, 8)]
CASES = [(*sizes, GENERATIONS[i % len(GENERATIONS)]) for i, sizes in enumerate(SIZES)]
"""Devices, most rows of a call, and the number of the first call, which meets every count of devices and of rows."""


class Array(np.ndarray):
    """What the body takes for a reference."""

    at = property(lambda self: self)


@pytest.fixture
def steps_of_call(monkeypatch):
    """A function that gives, by block of threads and thread, what a call does in program order: ("send", device, word
    of its inbox, value) and ("receive", word of the own inbox, value that has to be there).
    """
    block = SimpleNamespace(number=0, steps=[], after_predecessor=False)

    def load(ref, **how):
        assert block.after_predecessor
        return ref.copy()

    lax = SimpleNamespace(axis_index=lambda name: block.number, div=lambda a, b: int(a / b))
    monkeypatch.setattr(kernel, "lax", lax)
    monkeypatch.setattr(kernel, "jnp", np)
    monkeypatch.setattr(kernel, "_layout", lambda hidden: None)
    monkeypatch.setattr(kernel, "_THREADS", WORDS)
    monkeypatch.setattr(kernel, "_WORDS", AHEAD)
    monkeypatch.setattr(kernel, "MAX_CTAS", CTAS)
    monkeypatch.setattr(state, "MAX_CTAS", CTAS)
    monkeypatch.setattr(kernel.pl, "loop", lambda start, stop: lambda body: [body(i) for i in range(start, stop)])
    monkeypatch.setattr(kernel.pl, "when", lambda condition: lambda body: body() if condition else None)
    monkeypatch.setattr(kernel.plgpu, "load", load)
    monkeypatch.setattr(kernel.plgpu, "griddepcontrol_wait", lambda: setattr(block, "after_predecessor", True))

    def call(rng, me, inbox, generations, parts):
        """parts: of all devices."""
        devices, (rows, hidden), max_rows = len(parts), parts[me].shape, inbox.shape[2]
        blocks = []

        def send(x, layout, first, inboxes):
            for device, base in inboxes:
                for word, steps in enumerate(block.steps):
                    steps.append(("send", device, base + first + word, x[word]))

        def receive(inbox, firsts, layout, dtype):
            received = []
            for first in firsts:
                number, row = divmod(first // WORDS, max_rows)
                sender = number % (devices - 1)
                received.append(parts[sender + (sender >= me)][row])
                for word, steps in enumerate(block.steps):
                    steps.append(("receive", first + word, received[-1][word]))
            return received

        def launch(body, grid, **how):
            def run(*arguments):
                out = np.full_like(parts[me], np.nan)
                for block.number in rng.sample(range(*grid), *grid):
                    block.steps, block.after_predecessor = [[] for _ in range(WORDS)], False
                    body(*arguments, out)
                    blocks.extend(block.steps)
                return (out,)

            return run

        peers = np.zeros((devices, 2), int)  # instead of an address: which device, and where there
        for ahead in range(1, devices):
            device = (me + ahead) % devices
            peers[ahead - 1] = device, (me - (me > device)) * max_rows * WORDS
        peers[-1, 0] = me
        residual = np.arange(rows * hidden, dtype=np.float32).reshape(rows, hidden).view(Array)
        with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
            patch.setattr(kernel, "_send", send)
            patch.setattr(kernel, "_receive", receive)
            patch.setattr(kernel.jax, "new_ref", lambda x: x)
            patch.setattr(kernel.plgpu, "kernel", launch)
            operands = Operands(inbox, generations, peers, parts[me], residual, None, None)
            _, _, out, _ = kernel.all_reduce_add_norm.__wrapped__(
                operands, axis="model", num_devices=devices, norm_eps=0.0
            )
        total = np.zeros_like(residual)
        for part in parts:  # one after the other, so that rounding is the same everywhere
            total = total + part
        np.testing.assert_array_equal(out, residual + total)
        return blocks

    return call


class Devices:
    """So many devices that reach one another's memory. All make the same `calls`, which are numbers of rows, after
    those up to `generation`, in which every block took part.
    """

    def __init__(self, steps_of_call, rng, number, max_rows, calls, generation):
        self.steps_of_call, self.rng, self.number, self.calls = steps_of_call, rng, number, calls
        inbox, generations = state.initial_all_reduce_state(number, max_rows, 2 * WORDS, np.float16)
        assert inbox.shape[3] == WORDS
        self.inboxes = [np.full(inbox.shape, np.nan).view(Array) for _ in range(number)]  # NaN: empty
        self.generations = [np.full(generations.shape, generation, np.int32) for _ in range(number)]
        self.begun = [0] * number
        self.threads = [[] for _ in range(number)]  # what is left of each thread's steps
        self.sent = []  # (device, word, value) that have not arrived
        self.emptied = defaultdict(list)  # device -> words that it has emptied, which nobody sees before its call ends

    def parts(self, call):
        """Of each device; sums of them depend on the order."""
        shape = self.number, self.calls[call], WORDS
        return list(np.random.default_rng(call).standard_normal(shape, np.float32).view(Array))

    def run(self):
        while moves := list(self.moves()):
            move, *arguments = self.rng.choice(moves)
            move(*arguments)
        assert self.begun == [len(self.calls)] * self.number, "some wait for ever"
        assert not any(map(any, self.threads)), "some wait for ever"
        assert not self.sent
        assert all(np.isnan(inbox).all() for inbox in self.inboxes), "a row was left"

    def moves(self):
        """All that may happen next."""
        for device, threads in enumerate(self.threads):
            if any(threads):
                for steps in threads:
                    if steps and not self.waits(device, *steps[0]):
                        yield self.step, device, steps
            elif self.emptied[device]:
                yield self.end, device
            elif self.begun[device] < len(self.calls):
                yield self.begin, device
        for i in range(len(self.sent)):
            yield self.arrive, i

    def begin(self, device):
        state = self.inboxes[device], self.generations[device]
        self.threads[device] = self.steps_of_call(self.rng, device, *state, self.parts(self.begun[device]))
        self.begun[device] += 1

    def waits(self, device, kind, *what):
        if kind != "receive":
            return False
        word = what[0]
        return np.isnan(self.inboxes[device].reshape(-1)[word]) or word in self.emptied[device]

    def step(self, device, steps):
        kind, *what = steps.pop(0)
        if kind == "send":
            self.sent.append(what)
        else:
            word, value = what
            assert self.inboxes[device].reshape(-1)[word] == value, "not that device's row of this call"
            self.emptied[device].append(word)

    def end(self, device):
        self.inboxes[device].reshape(-1)[self.emptied.pop(device)] = np.nan

    def arrive(self, i):
        device, word, value = self.sent.pop(i)
        assert word >= 0
        assert np.isnan(self.inboxes[device].reshape(-1)[word]), "over a word that was not emptied"
        self.inboxes[device].reshape(-1)[word] = value


@pytest.mark.parametrize(("devices", "max_rows", "generation"), CASES)
def test_each_device_adds_all_devices_rows_of_the_same_call_in_order_and_none_waits_for_ever(
    steps_of_call, devices, max_rows, generation
):
    rng = random.Random(f"{devices} {max_rows} {generation}")
    few = [rows for rows in (1, CTAS, CTAS + 1, CTAS * AHEAD, CTAS * AHEAD + 1, max_rows) if rows <= max_rows]
    calls = [rng.choice(few) if rng.random() < 0.5 else rng.randint(1, max_rows) for _ in range(8)]
    Devices(steps_of_call, rng, devices, max_rows, calls, generation).run()
