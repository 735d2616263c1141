"""Drawn shapes, options and steps for tests of attention ops."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.pallas_kernels.paged import make_world

few = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Shapes come from short lists, since each new one is compiled; lengths and contents are what is drawn.
shapes = st.sampled_from([(4, 4, 16), (8, 2, 64), (4, 1, 80), (6, 2, 96), (4, 2, 128), (2, 1, 256)])
block_sizes = st.sampled_from([16, 32, 64, 128])
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
seeds = st.integers(0, 2**31)


@st.composite
def options(draw: st.DrawFn, heads: int) -> dict:
    chosen: dict = {}
    if draw(st.booleans()):
        chosen["sliding_window"] = draw(st.sampled_from([1, 7, 16, 100]))
    if draw(st.booleans()):
        chosen["logit_softcap"] = draw(st.sampled_from([1.5, 30.0]))
    if draw(st.booleans()):
        chosen["alibi_slopes"] = np.linspace(0.02, 0.5, heads, dtype=np.float32)
    if draw(st.booleans()):
        chosen["sinks"] = np.linspace(-2.0, 6.0, heads, dtype=np.float32)
    if draw(st.booleans()):
        chosen["scale"] = draw(st.sampled_from([0.05, 0.3]))
    return chosen


def lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths with an eye on what breaks: nothing, one, and either side of a block's end."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, longest]
    return st.one_of(st.sampled_from(edges), st.integers(0, longest))


def world_of_a_step(data, queries, seed, kv_heads, head_dim, block_size, dtype):
    """Rows with so many queries each behind drawn numbers of cached tokens, and where their queries start."""
    cached = data.draw(st.lists(lengths(block_size, 200), min_size=len(queries), max_size=len(queries)))
    lens = [n + c if n else c for n, c in zip(queries, cached, strict=True)]
    shape = {"kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    world = make_world(seed, lens, **shape, dtype=dtype, width=-(-270 // block_size))
    return world, np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
