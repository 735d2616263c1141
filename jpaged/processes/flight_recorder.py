"""The last steps of an engine process, in memory that outlives it.

    record   | step id | dispatched at | read at | length | msgpack: rows, chunks, variant, ... |    NUM_RECORDS of them

The engine process writes a record when it dispatches a step and notes when it has read it; both take some
microseconds. The process that started it reads the memory when it has ended, however it ended: a step that was
dispatched and not read is what it may have ended of. Records have sizes and times, and no tokens.
"""

import contextlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jpaged.engine.interface import SamplingVariant, StepPlan
from jpaged.engine.sequences.slots import Slots
from jpaged.processes.pulse import PULSE_BYTES, Pulse

log = logging.getLogger("jpaged.engine")

NUM_RECORDS = 1000
MOST_FILES = 10
_HEADER = struct.Struct("<qddI")
_TIME, _READ_AT = struct.Struct("<d"), 16
"""Of the header alone: a time, such as when a step's results were read, which is at byte 16."""
_SIZES = struct.Struct("<qq")
"""Bytes of a record, and how many there are: at the end of the page of the pulse."""
_SIZES_AT = PULSE_BYTES - _SIZES.size
_MOST_CHUNKS = 256
_CHUNK_BYTES = 24
"""More than a chunk takes as msgpack."""


class _Content(msgspec.Struct, array_like=True):
    """A step. contexts: int32 as bytes; of each decode row, the tokens that are computed once it has run. chunks: slot,
    first position, tokens, and whether a token is sampled after them; only the first `_MOST_CHUNKS`.
    """

    variant: int
    contexts: bytes
    chunks: list[tuple[int, int, int, bool]]
    num_chunks: int
    num_starts: int
    num_ends: int
    num_copies: int
    num_swaps: int
    num_beams: int
    shared_len: int
    num_running: int


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Content)


class FlightRecorder:
    """Writes a record for each step (`StepObserver`), and counts those that were read in the pulse.

    pulse: whose memory it is; it grows. slots: the scheduler's.
    """

    def __init__(self, pulse: Pulse, slots: Slots) -> None:
        self._pulse = pulse
        self._slots = slots
        most = _HEADER.size + 128 + 4 * len(slots.requests) + _MOST_CHUNKS * _CHUNK_BYTES
        self._record_bytes = -(-most // 64) * 64
        os.ftruncate(pulse.fd, PULSE_BYTES + NUM_RECORDS * self._record_bytes)
        self._memory = mmap.mmap(pulse.fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._record = bytearray()
        _SIZES.pack_into(self._memory, _SIZES_AT, self._record_bytes, NUM_RECORDS)

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be dispatched."""
        content = _Content(  # by position: with names it takes longer, in every step
            int(plan.variant),
            self._slots.num_computed.take(plan.decode_slots).tobytes(),
            [(c.slot, c.start, len(c.token_ids), c.samples) for c in plan.chunks[:_MOST_CHUNKS]] if plan.chunks else [],
            len(plan.chunks),
            len(plan.starts),
            len(plan.ends),
            len(plan.copies),
            len(plan.swap_outs) + len(plan.swap_ins),
            len(plan.beams),
            plan.shared_len,
            self._slots.num_used,
        )
        at, record = self._place(plan.step_id), self._record
        _encoder.encode_into(content, record, _HEADER.size)
        _HEADER.pack_into(record, 0, plan.step_id, time.monotonic(), 0.0, len(record) - _HEADER.size)
        self._memory[at : at + len(record)] = record

    def read(self, plan: StepPlan) -> None:
        """A step's results have come. Readers ignore the record if the step's dispatch was not recorded."""
        _TIME.pack_into(self._memory, self._place(plan.step_id) + _READ_AT, time.monotonic())
        self._pulse.count_step()

    def _place(self, step_id: int) -> int:
        return PULSE_BYTES + step_id % NUM_RECORDS * self._record_bytes


def last_steps(pulse: Pulse) -> list[dict[str, Any]]:
    """The steps that are recorded in the memory of a pulse, oldest first; times in seconds before the last dispatch."""
    size = os.fstat(pulse.fd).st_size
    if size <= PULSE_BYTES:
        return []
    with mmap.mmap(pulse.fd, size, prot=mmap.PROT_READ) as memory:
        record_bytes, num_records = _SIZES.unpack_from(memory, _SIZES_AT)
        records = []
        for number in range(num_records):
            at = PULSE_BYTES + number * record_bytes
            step_id, dispatched_at, read_at, length = _HEADER.unpack_from(memory, at)
            if dispatched_at and length <= record_bytes - _HEADER.size:
                content = memory[at + _HEADER.size : at + _HEADER.size + length]
                records.append((step_id, dispatched_at, read_at, content))
    records.sort()
    end = max((dispatched_at for _, dispatched_at, _, _ in records), default=0.0)
    steps = []
    for step_id, dispatched_at, read_at, content in records:
        try:
            step = _decoder.decode(content)
            described = {name: getattr(step, name) for name in step.__struct_fields__}
            described["variant"] = SamplingVariant(step.variant).name.lower()
            described["contexts"] = np.frombuffer(step.contexts, np.int32).tolist()
        except ValueError:  # the process ended in the middle of writing it; msgspec's errors are ValueErrors too
            continue
        times = {"dispatched_s": dispatched_at - end, "read_s": read_at - end if read_at else None}
        steps.append({"step": step_id} | times | described)
    return steps


def write_last_steps(pulse: Pulse, cause: str, args: Mapping[str, Any], number: int) -> Path | None:
    """Writes them to a file among the temporary files, which only this user can read; None if there are none, or they
    cannot be read or written, for want of descriptors or room.

    cause: why the process ended. args: of its engine. number: of this file among those of this process; the latest
    `MOST_FILES` are kept.
    """
    name = f"jpaged-steps-{os.getpid()}-{number % MOST_FILES}.json"
    try:
        steps = last_steps(pulse)
        if not steps:
            return None
        path = Path(tempfile.gettempdir()) / name  # which fails where no directory has room
    except OSError as error:
        log.warning("%s cannot be written: %s", name, error.strerror)
        return None
    written = time.time()  # noqa: TID251  # a date
    content = json.dumps({"cause": cause, "written": written, "args": args, "steps": steps}, default=str)
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()  # a part of it says nothing, and takes room that others need
        log.warning("%s cannot be written: %s", path, error.strerror)
        return None
    return path
