"""Which layers share block tables, and what a sequence takes of the pool."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged.api.errors import UnsupportedModelError
from jpaged.engine.interface import CacheGroup
from jpaged.executor.cache.groups import group_layers
from jpaged.executor.cache.paged import PagedCache
from jpaged.executor.cache.spec import LayerCache, cache_spec
from jpaged.executor.config import ExecutorConfig
from jpaged.models import ModelConfig, build
from tests.tiny_models import WINDOW, tiny_model

FULL = LayerCache(kv_heads=2, head_dim=64, dtype=np.dtype("float16"))
WINDOWED = replace(FULL, window=WINDOW)
CONFIG = ExecutorConfig(
    max_num_seqs=4, max_model_len=1024, block_size=16, num_blocks=41, decode_buckets=(4,), token_buckets=(32, 64)
)
BLOCK_BYTES = 2 * 2 * 16 * 64 * 2  # of one array: K and V, heads, tokens, head_dim, bytes


def test_layers_that_are_all_alike_form_one_group_with_an_array_each():
    for layer in (FULL, WINDOWED):
        groups, places, num_arrays = group_layers((layer,) * 3)
        assert groups == (CacheGroup(layer.window),)
        assert [place[:2] for place in places] == [(0, 0), (0, 1), (0, 2)]
        assert num_arrays == 3


def test_two_kinds_of_layers_share_the_arrays():
    groups, places, num_arrays = group_layers((FULL, WINDOWED, FULL, WINDOWED))
    assert groups == (CacheGroup(), CacheGroup(WINDOW))
    assert [place[:2] for place in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert num_arrays == 2


def test_kinds_of_unequal_numbers_are_cut_into_groups_of_the_smallest():
    """As of Gemma 3: five layers with a window for each without one, and some more at the end."""
    layers = 2 * (5 * (WINDOWED,) + (FULL,)) + 3 * (WINDOWED,)
    groups, places, num_arrays = group_layers(layers)
    assert num_arrays == 2
    assert [group.window for group in groups].count(WINDOW) == 7
    assert [group.window for group in groups].count(None) == 1
    assert len(set(places)) == len(layers), "no two layers of a group share an array"
    assert [groups[place.group].window for place in places] == [layer.window for layer in layers]


def test_layers_with_smaller_tokens_have_parts_of_the_others_blocks():
    """As of Gemma 4: heads of twice the size without a window, or half as much in all."""
    large = replace(FULL, kv_heads=2, head_dim=128)
    groups, places, num_arrays = group_layers(2 * (4 * (WINDOWED,) + (large,)))
    assert num_arrays == 2
    assert [group.window for group in groups] == [WINDOW, None, WINDOW]
    assert places[:5] == ((0, 0, 0, 2), (0, 0, 1, 2), (0, 1, 0, 2), (0, 1, 1, 2), (1, 0, 0, 1))
    assert places[5:] == ((2, 0, 0, 2), (2, 0, 1, 2), (2, 1, 0, 2), (2, 1, 1, 2), (1, 1, 0, 1))
    cache = PagedCache((WINDOWED, WINDOWED, large), CONFIG)
    assert [pool.shape for pool in cache.pools] == [(41, *large.block(16))]
    assert cache.block_bytes == 2 * BLOCK_BYTES


def test_an_array_is_as_large_as_the_least_that_kinds_divide():
    """Sizes of 2 to 3: two layers of one, or three of the other."""
    groups, places, num_arrays = group_layers((FULL, replace(FULL, kv_heads=3)) * 3)
    assert (len(groups), num_arrays) == (3, 1)
    assert [place[2:] for place in places] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3), (0, 2)]


def test_a_layer_that_reads_anothers_tokens_is_in_its_place():
    groups, places, num_arrays = group_layers((FULL, WINDOWED, replace(FULL, source=0), replace(WINDOWED, source=1)))
    assert (len(groups), num_arrays) == (2, 1)
    assert places[2:] == places[:2]


def test_layers_that_no_block_fits_are_refused():
    for other in (replace(FULL, dtype=np.dtype("float32")), replace(FULL, kv_heads=97, head_dim=67)):
        with pytest.raises(UnsupportedModelError, match="cannot share a pool"):
            group_layers((FULL, other))


def test_the_spec_is_what_the_models_layers_keep():
    model = build(ModelConfig.from_dict(tiny_model("qwen3-layer-types").config), "float16")
    assert cache_spec(model) == (WINDOWED, FULL)


def test_a_block_is_a_place_in_every_array():
    assert PagedCache((FULL,) * 3, CONFIG).block_bytes == 3 * BLOCK_BYTES
    assert PagedCache((FULL, WINDOWED, FULL, WINDOWED), CONFIG).block_bytes == 2 * BLOCK_BYTES


def test_a_sequence_holds_all_its_blocks_of_a_full_group_and_a_window_and_a_chunk_of_another():
    spanned = -(-(WINDOW + 64 + 16) // 16)
    for tokens in (1, 16, 17, 500):
        blocks = -(-tokens // 16)
        assert PagedCache((FULL,), CONFIG).sequence_blocks(tokens) == blocks
        assert PagedCache((WINDOWED,), CONFIG).sequence_blocks(tokens) == min(blocks, spanned)
        assert PagedCache((FULL, WINDOWED), CONFIG).sequence_blocks(tokens) == blocks + min(blocks, spanned)


def test_the_longest_sequence_is_what_the_pool_holds_or_the_model_takes():
    spanned = -(-(WINDOW + 64 + 16) // 16)
    assert PagedCache((FULL,), CONFIG).longest_sequence() == 40 * 16
    assert PagedCache((FULL, WINDOWED), CONFIG).longest_sequence() == (40 - spanned) * 16
    assert PagedCache((WINDOWED,), CONFIG).longest_sequence() == 1024
    assert PagedCache((FULL,), replace(CONFIG, max_model_len=100)).longest_sequence() == 100
