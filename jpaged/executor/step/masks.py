"""What constrained slots may sample from now on, in the packed input of a program that takes it in (`sample`, of masked
rows, or `set_masks`).

    slots      [N]         the null slot where there is no further one
    num_whole              so many slots, the first ones, have a mask in `whole`
    ends       [N]         where in `listed` the tokens of each slot end; they begin where those of the slot before end
    listed     [L]         tokens that a slot may sample, or behind NO_TOKEN those that it may not
    whole      [W, words]  a bit for each token

Most masks are short lists, so that places for their tokens are shared between the slots.
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
"""For which there is room. Half of the rows of a random model guess, whose lists are of one; a list of the others has
some ten."""


class MaskRoom(NamedTuple):
    """How much of it a program takes at once: slots, listed tokens of all together, and masks of bits."""

    slots: int
    listed: int
    whole: int

    @classmethod
    def of(cls, slots: int, whole: int) -> "MaskRoom":
        """For so many slots, and so many masks of bits. There is room for any one list."""
        return cls(slots, max(FEW_TOKENS, _LISTED_TOKENS_A_SLOT * slots), whole)

    def fields(self, setup: Setup) -> dict[str, Field]:
        """For the end of a packed layout: nobody reads masks behind those that there are, so they have no padding."""
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
        """Writes those masks that there is room for. Returns the others.

        slots, masks: as of `StepPlan`. which: of them, by place; so are the others.
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
    """The masks of all slots, with what the host has sent. host: the fields of a `MaskRoom`, unpacked."""
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
