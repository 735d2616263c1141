"""A step's plan while it is being made: what its parts add to, one after another."""

from dataclasses import dataclass, field

import numpy as np

from jpaged.engine.interface import NO_PLACE, Chunk, HostCopy, SlotStart, TablePart
from jpaged.engine.sequences.request import Request

NO_BLOCKS = np.zeros((0,), np.int32)


@dataclass(slots=True)
class PlanInProgress:
    """The parts of a plan whose number is not known beforehand.

    budget: tokens that the step has room for yet.
    kinds: numbers of the kinds of dependent rows (`constraints/dependent_rows.py`) that have rows in it.
    table_parts: as of `StepPlan`.
    beams: (slot, parent slot, token) each; for `StepPlan.beams`.
    table_updates: int32 [u, 4] each, as `StepPlan.table_updates`.
    mask_slots, masks, mask_tokens, mask_backs, has_run_ahead, run_ahead: for those of `StepPlan`.
    copies: (block, block) each; besides those that decode rows need.
    state_loads, state_saves: as those of `StepPlan`, a pair each.
    """

    step_id: int
    budget: int
    kinds: set[int] = field(default_factory=set)
    table_parts: list[TablePart] = field(default_factory=list)
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    swap_ins: list[HostCopy] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    table_updates: list[np.ndarray] = field(default_factory=list)
    beams: list[tuple[int, int, int]] = field(default_factory=list)
    mask_slots: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    masks: list[np.ndarray] = field(default_factory=list)
    mask_tokens: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    mask_backs: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    has_run_ahead: bool = False
    run_ahead: np.ndarray = field(default_factory=lambda: NO_BLOCKS)


def slot_start(request: Request, token_ids: np.ndarray, block_ids: np.ndarray, num_computed: int) -> SlotStart:
    """What the device is told of a request that has got a slot. block_ids: int32 [groups, n]; its tables."""
    return SlotStart(
        slot=request.slot,
        token_ids=token_ids,
        prompt_len=request.prompt_len,
        block_ids=block_ids,
        num_computed_tokens=num_computed,
        max_len=request.max_len,
        sampling=request.sampling,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids if request.group.device_tests_stop_tokens else (),
        bad_words_token_ids=request.bad_words_token_ids,
        place=NO_PLACE if request.table is None else request.table.place_after(token_ids[request.prompt_len :]),
    )
