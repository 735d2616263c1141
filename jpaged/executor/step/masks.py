"""Masks, which say what constrained slots may sample from now on, in the packed input of a program (`sample` of masked
rows, or `set_masks`).

    num_whole              how many slots, the first ones, have their mask in `whole`
    slots      [N]         the null slot in unused places
    ends       [N]         where in `listed` the tokens of each slot end; they begin where those of the slot before end
    listed     [L]         tokens that a slot may sample; where NO_TOKEN comes first, tokens that it may not sample
    whole      [W, words]  a bit for each token

Most masks are short lists, so the slots share the places for listed tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt

from jpaged.api.structured_outputs import FEW_TOKENS
from jpaged.engine.interface import NO_TOKEN
from jpaged.executor.sampling.records import mask_words
from jpaged.executor.sampling.state import set_masks
from jpaged.executor.step.packing import Field
from jpaged.executor.step.program import Setup

_LISTED_TOKENS_A_SLOT = 16
"""Places for listed tokens, on average over a program's slots. With a random model, half of the lists have one token
(those of rows that guess), and the others some ten."""


class MaskRoom(NamedTuple):
    """How much a program takes at once: slots, listed tokens of all slots together, and whole masks (a bit a token)."""

    slots: int
    listed: int
    whole: int

    @classmethod
    def of(cls, slots: int, whole: int) -> "MaskRoom":
        """For so many slots, and so many whole masks. Any one list fits."""
        return cls(slots, max(FEW_TOKENS, _LISTED_TOKENS_A_SLOT * slots), whole)

    def fields(self, setup: Setup) -> dict[str, Field]:
        """The fields, for the end of a packed layout: `whole` has no padding, as only the first num_whole are read."""
        return {
            "num_whole": Field((), 0),
            "slots": Field((self.slots,), setup.config.null_slot),
            "ends": Field((self.slots,), self.listed),
            "listed": Field((self.listed,), NO_TOKEN),
            "whole": Field((self.whole, mask_words(setup.model.vocab_size)), None),
        }

    def fill(
        self, host: Mapping[str, np.ndarray], slots: np.ndarray, masks: Sequence[np.ndarray], which: Sequence[int]
    ) -> list[int]:
        """Writes masks into a new buffer, as many as fit.

        host: views of the buffer's fields. slots, masks: `StepPlan.mask_slots` and `masks`. which: the indices of the
        masks to write. Returns those of the masks that did not fit.
        """
        whole = [i for i in which if masks[i].dtype != np.int32]
        listed = [i for i in which if masks[i].dtype == np.int32] if whole else list(which)
        num_whole = min(len(whole), self.whole)
        ends = np.cumsum([len(masks[i]) for i in listed[: self.slots - num_whole]], dtype=np.int64)
        num_listed = int(np.searchsorted(ends, self.listed, side="right"))
        host["num_whole"][...] = num_whole
        host["slots"][: num_whole + num_listed] = slots[whole[:num_whole] + listed[:num_listed]]
        for row, i in enumerate(whole[:num_whole]):
            host["whole"][row] = masks[i].view(np.int32)
        host["ends"][:num_whole] = 0
        host["ends"][num_whole : num_whole + num_listed] = ends[:num_listed]
        if num_listed:
            np.concatenate([masks[i] for i in listed[:num_listed]], out=host["listed"][: ends[num_listed - 1]])
        return whole[num_whole:] + listed[num_listed:]


def take_masks(masks: UInt[Array, "slots words"], host: Mapping[str, Array]) -> UInt[Array, "slots words"]:
    """Replaces the masks of the slots that the host names.

    masks: a bit for each token, of all slots and the null slot. host: the fields of a `MaskRoom`, unpacked.
    """
    slots, ends, listed, words = host["slots"], host["ends"], host["listed"], masks.shape[1]
    begins = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    row = (jnp.arange(len(listed))[:, None] >= ends).sum(axis=1)
    word = jnp.where(listed == NO_TOKEN, words, listed // 32)  # beyond the last one: dropped
    bit = jnp.left_shift(jnp.uint32(1), (listed % 32).astype(jnp.uint32))
    rows = jnp.zeros((len(slots), words), jnp.uint32).at[row, word].add(bit, mode="drop")
    refuses = (begins < ends) & (listed[jnp.minimum(begins, len(listed) - 1)] == NO_TOKEN)
    rows = jnp.where(refuses[:, None], ~rows, rows)
    if count := len(host["whole"]):
        whole = lax.bitcast_convert_type(host["whole"], jnp.uint32)
        is_whole = jnp.arange(count)[:, None] < host["num_whole"]
        rows = rows.at[:count].set(jnp.where(is_whole, whole, rows[:count]))
    return set_masks(masks, slots, rows)
