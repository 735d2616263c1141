"""The list of units of work that decode attention's kernel gets."""

import jax
import numpy as np
import pytest

from jpaged.pallas_kernels.decode_attention.plan import Cuts, plan


@pytest.mark.parametrize("window", [None, 1, 1500])
@pytest.mark.parametrize("ctas", [1, 132])  # one CTA: whole chunks; many: leaves
def test_the_plan_covers_every_position_once_and_cuts_only_at_fixed_positions(window, ctas):
    lens = np.array([0, 1, 1024, 1025, 5000, 4096], np.int32)
    cuts = Cuts(tile=64, leaf=128, chunk=2048, ctas=ctas)
    work = jax.jit(plan, static_argnums=(1, 2, 3, 4))(lens, 5120, 4, window, cuts)
    units = np.asarray(work.units)[: int(work.num_units[0])]
    assert len(units) == len(np.unique(units, axis=0))
    assert (units[:, 8] > 1).any() == (ctas == 132 and window != 1)
    for row, n in enumerate(lens):
        own = units[units[:, 0] == row]
        own = own[np.lexsort((own[:, 7], own[:, 1]))]
        first = 0 if window is None else max(0, n - window) // 64 * 64
        assert own[0, 3] == first
        assert own[-1, 4] == max(n, first)
        assert (own[1:, 3] == own[:-1, 4]).all(), "every unit begins where the one before it ends"
        assert (own[:, 2] == own[-1, 1] + 1).all()
        assert (own[:, 5] == n).all()
        assert (own[:, 6] * 64 == (128 if n <= 1024 else 256 if n <= 2048 else 512)).all()
        for chunk in range(own[-1, 1] + 1):
            leaves = own[own[:, 1] == chunk]
            assert leaves[0, 3] == first or leaves[0, 3] % 2048 == 0
            assert (leaves[:, 8] == len(leaves)).all(), "as many units as the finisher waits for"
            assert (leaves[:, 7] == np.arange(len(leaves))).all()
            assert len(leaves) <= cuts.most_leaves
            assert (np.diff(leaves[:, 3]) == leaves[0, 6] * 64).all()
            counters = units[(units[:, 9] == leaves[0, 9]) & (units[:, 8] > 1)]
            assert len(leaves) == 1 or len(counters) == len(leaves), "one counter a cut chunk"
