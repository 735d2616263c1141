"""What served before paging: each sequence gets one contiguous range of token slots, reserved when it is admitted.

    policy    slots reserved for a prompt of 20 tokens after which 25 will be generated
    max       2048                       the model's longest sequence
    pow2      20 + 32                    the output's length rounded up to a power of two
    oracle    20 + 25                    what the sequence will really take, as if it were known

    range     [ tokens | reserved, used later | never used ][ rounding ]        [ hole ]
               token states    reservation      internal       external fragmentation

These are the three versions of Orca that the PagedAttention paper compares with (section 6.1): the scheduler is the
same, iteration by iteration, and ranges come from a buddy allocator. `ReservationPool` takes the block pool's place
in the scheduler; a block is one token slot and a block table a contiguous range, so a sequence never asks for more.
"""

from collections.abc import Callable

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.memory.buddy import BuddyAllocator
from jpaged.engine.kv.block_pool import NOBODY, BlockPool

POLICIES: dict[str, Callable[[int, int, int], int]] = {
    "orca-max": lambda prompt_len, max_len, max_model_len: max_model_len,
    "orca-pow2": lambda prompt_len, max_len, max_model_len: min(
        prompt_len + (1 << (max_len - prompt_len - 1).bit_length()), max_model_len
    ),
    "orca-oracle": lambda prompt_len, max_len, max_model_len: max_len,
}
"""Slots to reserve, from the prompt's length, the sequence's final length and the longest that the model allows."""


class ReservationPool(BlockPool):
    """Contiguous ranges of token slots behind the block pool's interface.

    Args:
        num_slots: token slots in all.
        policy: one of `POLICIES`.
        max_model_len: what "orca-max" reserves, and no policy exceeds.

    Raises:
        InvalidParameterError: no such policy, or a sequence of max_model_len would never fit.
    """

    def __init__(self, num_slots: int, policy: str, max_model_len: int) -> None:
        if policy not in POLICIES:
            raise InvalidParameterError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}.")
        super().__init__(num_slots + 1, block_size=1, enable_prefix_caching=False)
        self._buddies = BuddyAllocator(num_slots)
        if max_model_len > self._buddies.largest_free:
            raise InvalidParameterError(
                f"max_model_len={max_model_len} does not fit the largest range, {self._buddies.largest_free} of "
                f"num_slots={num_slots}; shorten it or enlarge the memory."
            )
        self._reserve = POLICIES[policy]
        self._max_model_len = max_model_len

    @property
    def num_free(self) -> int:
        """The longest range that can be allocated now."""
        return self._buddies.largest_free

    @property
    def num_used(self) -> int:
        """Slots in allocated ranges, the rounding to powers of two included."""
        return self._buddies.num_allocated

    def blocks_to_admit(self, num_tokens: int, prompt_len: int, max_len: int) -> int:
        """Slots for all that the sequence may become, as the policy guesses it."""
        return max(num_tokens, self._reserve(prompt_len, max_len, self._max_model_len))

    def allocate(self, n: int, wanted: np.ndarray | None = None, slots: np.ndarray | int = NOBODY) -> np.ndarray:
        """A contiguous range, int32 [n], whatever is wished for.

        Raises:
            OutOfMemoryError: no free range is long enough; nothing is allocated.
        """
        del wanted, slots
        if n == 0:
            return np.zeros((0,), np.int32)
        first = self._buddies.allocate(n) + 1  # block 0 is the null block
        block_ids = np.arange(first, first + n, dtype=np.int32)
        self._free_list.remove(block_ids)
        self._ref_counts[block_ids] = 1
        return block_ids

    def free(self, block_ids: np.ndarray) -> None:
        """Gives back a whole range, as `allocate` returned it."""
        super().free(block_ids)
        if len(block_ids):
            self._buddies.free(int(block_ids[0]) - 1)
