"""That the one-shot all-reduce adds the right rows and ends, however its blocks of threads and devices overtake one
another. The kernel's body runs as it stands, with stand-ins that note what it stores, signals, awaits and reads; the
notes are then replayed in random order over devices whose stores arrive late, and only as ordered as fences make them.
"""

import math
import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.pallas_kernels import all_reduce
from jpaged.pallas_kernels.backends import mosaic_missing

if mosaic_missing() is not None:
    pytest.skip(str(mosaic_missing()), allow_module_level=True)

from jpaged.pallas_kernels import all_reduce_mosaic as mosaic

CTAS, CHUNK, HIDDEN = 3, 2, 2
"""Instead of 264, 4 and thousands, so that few rows make many chunks."""


class Array(np.ndarray):
    """What the body takes for a reference."""

    at = property(lambda self: self)


@pytest.fixture
def steps_of_call(monkeypatch):
    """A function that gives, by block of threads, what a call does in program order: tuples that `Devices` replays."""
    block = SimpleNamespace(number=0, steps=[])

    def push(x, layout, firsts, devices):
        block.steps += [("store", device, first, x[0]) for device, first in zip(devices, firsts, strict=True)]

    def tell(signal, first, devices):
        block.steps += [("signal", device, first, signal) for device in devices]

    def wait(signals, cta, signal, devices):
        block.steps += [("wait", device, cta, signal) for device in devices]

    def read(parts, own, inbox, sent, is_own, layout):
        row = own // HIDDEN
        block.steps.append(("add", row, parts[row, 0], None) if is_own else ("add", row, None, sent))
        return parts[row] if is_own else np.zeros(HIDDEN)

    for name, stand_in in {"_push": push, "_tell_peers": tell, "_wait_for_peers": wait, "_read_part": read}.items():
        monkeypatch.setattr(mosaic, name, stand_in)
    divisions = {"rem": lambda a, b: int(math.fmod(a, b)), "div": lambda a, b: int(a / b)}
    monkeypatch.setattr(mosaic, "lax", SimpleNamespace(axis_index=lambda name: block.number, **divisions))
    monkeypatch.setattr(mosaic, "jnp", np)
    monkeypatch.setattr(mosaic, "_layout", lambda hidden: None)
    monkeypatch.setattr(mosaic, "_address", lambda peers, device, column: device)
    monkeypatch.setattr(mosaic, "MAX_CTAS", CTAS)
    monkeypatch.setattr(all_reduce, "MAX_CTAS", CTAS)
    monkeypatch.setattr(mosaic, "_CHUNK", CHUNK)
    monkeypatch.setattr(mosaic.pl, "loop", lambda start, stop: lambda body: [body(i) for i in range(start, stop)])
    monkeypatch.setattr(mosaic.pl, "when", lambda condition: lambda body: body() if condition else None)
    monkeypatch.setattr(mosaic.plgpu, "load", lambda ref, **how: ref.copy())
    monkeypatch.setattr(mosaic.plgpu, "griddepcontrol_wait", lambda: None)

    def call(me, devices, inbox, signals, parts):
        blocks = []

        def kernel(body, grid, **how):
            def run(*arguments):
                out = np.zeros_like(parts)
                for block.number in range(*grid):
                    block.steps = []
                    body(*arguments, out)
                    blocks.append(block.steps)
                return (out,)

            return run

        peers = np.zeros((devices + 1, 4), int)
        peers[devices, 0] = me
        residual = 0.5 * parts
        with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
            patch.setattr(mosaic.jax, "new_ref", lambda x: x)
            patch.setattr(mosaic.plgpu, "kernel", kernel)
            arguments = inbox, signals, peers, parts, residual, None, None
            _, _, out, _ = mosaic.all_reduce_add_norm.__wrapped__(*arguments, num_devices=devices, norm_eps=0.0)
        np.testing.assert_array_equal(out, residual + parts)  # those of others are not known before the replay
        return blocks

    return call


class Devices:
    """So many devices that reach one another's memory. All make the same `calls`, which are numbers of rows, after
    those up to `generation`, in which every block took part.
    """

    def __init__(self, steps_of_call, number, max_rows, calls, generation):
        self.steps_of_call, self.number, self.calls = steps_of_call, number, calls
        inbox, signals = all_reduce.initial_all_reduce_state(number, max_rows, HIDDEN, np.float32)
        self.inboxes = [np.zeros(inbox.shape).view(Array) for _ in range(number)]
        self.signals = [np.zeros(signals.shape, np.int32) for _ in range(number)]
        most_chunks = math.ceil(math.ceil(max_rows / CTAS) / CHUNK)
        for one in self.signals:
            one[:number] = np.int64(generation * most_chunks).astype(np.int32)
            one[number] = generation
        self.begun = [0] * number
        self.blocks = [[] for _ in range(number)]  # what is left of each block's steps
        self.late = defaultdict(list)  # (device, block) -> what it stored that has not arrived
        self.added = [defaultdict(int) for _ in range(number)]  # devices whose parts are in a row of the call's sum

    def parts(self, device, call):
        """Unlike any other device's, call's or row's."""
        rows = self.calls[call]
        numbers = 1 + (call * self.number + device) * 1000 + np.arange(rows, dtype=float)
        return np.repeat(numbers[:, None], HIDDEN, 1).view(Array)

    def run(self, rng):
        while moves := list(self.moves()):
            move, *arguments = rng.choice(moves)
            move(*arguments)
        assert self.begun == [len(self.calls)] * self.number, "some wait for ever"
        assert not any(map(any, self.blocks)), "some wait for ever"
        for device in range(self.number):
            self.check_sums(device)

    def moves(self):
        """All that may happen next."""
        for device, blocks in enumerate(self.blocks):
            if not any(blocks) and self.begun[device] < len(self.calls):
                yield self.begin, device
            for block, steps in enumerate(blocks):
                if steps and not self.waits(device, *steps[0]):
                    yield self.step, device, block
        for stores in self.late.values():
            for i, (kind, target, *_) in enumerate(stores):
                # A signal comes behind the stores before its fence and behind earlier signals to the same place.
                if kind == "store" or not any(k == "store" or t == target for k, t, *_ in stores[:i]):
                    yield self.arrive, stores, i

    def begin(self, device):
        self.check_sums(device)
        self.added[device].clear()
        parts = self.parts(device, self.begun[device])
        state = self.inboxes[device], self.signals[device]
        self.blocks[device] = self.steps_of_call(device, self.number, *state, parts)
        self.begun[device] += 1

    def check_sums(self, device):
        assert set(self.added[device].values()) <= {self.number}, "a row was added without some device's part"

    def waits(self, device, kind, sender, block, signal):
        with np.errstate(over="ignore"):
            return kind == "wait" and self.signals[device][sender, block] - signal < 0

    def step(self, device, block):
        kind, *what = self.blocks[device][block].pop(0)
        if kind in ("store", "signal"):
            self.late[device, block].append((kind, *what))
        elif kind == "add":
            row, value, sent = what
            if sent is not None:
                value = self.inboxes[device].reshape(-1)[sent]
            sender, call = self.added[device][row], self.begun[device] - 1
            assert value == self.parts(sender, call)[row, 0], "not this device's row of this call"
            self.added[device][row] += 1

    def arrive(self, stores, i):
        kind, target, first, value = stores.pop(i)
        assert first >= 0
        (self.inboxes if kind == "store" else self.signals)[target].reshape(-1)[first] = value


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("max_rows", [2, CTAS, CTAS * CHUNK + 1, CTAS * CHUNK * 4 + 2])
@pytest.mark.parametrize("generation", [0, 2**31 - 3, -2])
def test_each_device_adds_all_devices_rows_of_the_same_call_in_order_and_none_waits_for_ever(
    steps_of_call, devices, max_rows, generation
):
    rng = random.Random(f"{devices} {max_rows} {generation}")
    few = [rows for rows in (1, CTAS, CTAS + 1, CTAS * CHUNK, CTAS * CHUNK + 1, max_rows) if rows <= max_rows]
    calls = [rng.choice(few) if rng.random() < 0.5 else rng.randint(1, max_rows) for _ in range(8)]
    Devices(steps_of_call, devices, max_rows, calls, generation).run(rng)
