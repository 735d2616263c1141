"""Masks on their way to the device: in one buffer what there is room for, and what is left for others."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jpaged.api.structured_outputs import FEW_TOKENS
from jpaged.engine.interface import NO_TOKEN, SamplingVariant, StepPlan
from jpaged.executor.sampling.records import mask_words
from jpaged.executor.sampling.state import init_masks
from jpaged.executor.step.masks import MaskRoom, take_masks
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.renewals import Renewals

VOCAB, SLOTS = 1000, 24
SETUP = SimpleNamespace(config=SimpleNamespace(null_slot=SLOTS), model=SimpleNamespace(vocab_size=VOCAB))


def drawn_mask(rng: np.random.Generator, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """A mask as plans have it, and which tokens it allows, bool [words * 32]."""
    allowed = np.zeros((32 * mask_words(VOCAB),), np.bool_)
    some = rng.choice(VOCAB, rng.integers(0 if kind == 1 else 1, FEW_TOKENS), replace=False).astype(np.int32)
    allowed[some] = True
    if kind == 0:
        return some, allowed
    if kind == 1:
        return np.append(np.int32(NO_TOKEN), some), ~allowed
    allowed = rng.random(len(allowed)) < 0.5
    return np.packbits(allowed, bitorder="little").view(np.uint32), allowed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("whole", [0, 3])
def test_every_mask_arrives_in_as_many_buffers_as_it_takes_and_other_slots_keep_theirs(seed, whole):
    rng = np.random.default_rng(seed)
    room = MaskRoom(slots=8, listed=2 * FEW_TOKENS, whole=whole)
    layout = PackedLayout(**room.fields(SETUP))
    take = jax.jit(lambda masks, buffer: take_masks(masks, layout.unpack(buffer)))
    held = init_masks(SLOTS, VOCAB)
    expected = np.ones((SLOTS + 1, 32 * mask_words(VOCAB)), np.bool_)
    slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS)].astype(np.int32)
    drawn = [drawn_mask(rng, int(rng.integers(0, 3 if whole else 2))) for _ in slots]
    expected[slots] = [allowed for _, allowed in drawn]
    which, num_calls = list(range(len(slots))), 0
    while which:
        buffer, host = layout.new()
        host["whole"][...] = rng.integers(-(2**31), 2**31, host["whole"].shape)  # what memory happens to hold
        left = room.fill(host, slots, [mask for mask, _ in drawn], which)
        assert set(left) < set(which)
        held, which, num_calls = take(held, buffer), left, num_calls + 1
    found = np.unpackbits(np.asarray(held).view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
    np.testing.assert_array_equal(found, expected)
    assert num_calls >= len(slots) / room.slots


def test_a_buffer_without_masks_changes_nothing():
    layout = PackedLayout(**MaskRoom.of(8, 2).fields(SETUP))
    buffer, host = layout.new()
    host["whole"][...] = -5
    held = init_masks(SLOTS, VOCAB).at[3].set(17)
    np.testing.assert_array_equal(take_masks(held, layout.unpack(jax.numpy.asarray(buffer))), held)


def test_only_fields_behind_which_nothing_has_padding_are_left_unfilled():
    names = list(MaskRoom.of(8, 2).fields(SETUP))
    assert names[-1] == "whole"
    buffer, host = PackedLayout(**MaskRoom.of(8, 2).fields(SETUP)).new()
    assert (host["slots"] == SLOTS).all()
    assert (host["listed"] == NO_TOKEN).all()
    assert buffer.size == 1 + 8 + 8 + 2 * FEW_TOKENS + 2 * mask_words(VOCAB)


def test_slots_that_lose_their_last_tokens_are_found_among_the_rows_of_a_step():
    fields = {
        "mask_slots": np.array([7, 2, 9, 4], np.int32),
        "mask_tokens": np.array([70, NO_TOKEN, 90, 40], np.int32),
        "mask_backs": np.array([1, 0, 0, 2], np.int32),
    }
    renewals = Renewals.of(StepPlan(0, SamplingVariant.MASKED, masks=(np.array([1], np.int32),) * 4, **fields))
    rows, own = renewals.among(np.array([4, 1, 2, 7], np.int32))
    assert sorted(zip(rows.tolist(), *map(np.ndarray.tolist, own), strict=True)) == [(0, 4, 40, 2), (3, 7, 70, 1)]
    assert [field.tolist() for field in renewals.without(np.array([4, 7], np.int32))] == [[9], [90], [0]]
    assert not len(renewals.among(np.zeros((0,), np.int32))[0])
