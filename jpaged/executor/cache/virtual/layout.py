"""The virtual layout behind `CacheSpec`: programs as in the paged layout, over tables that count up.

A slot's block table holds the pages of its sequence, as the control plane hands them out, and programs turn each entry
into the place of that slot and index, at which the runner has mapped the page (`memory.py`):

    table of slot 3    [ 7 ][ 2 ][ 9 ][ - ]         pages: for the control plane, copies and swaps
    read through       [ P+3M ][ P+3M+1 ][ P+3M+2 ][ 0 ]     places: contiguous addresses

So nothing of the control plane, and no kernel, knows of the layout.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS
from jpaged.executor.cache.groups import Place
from jpaged.executor.cache.paged import PagedCache, Pools, Tables
from jpaged.executor.cache.spec import kernel_block_bytes
from jpaged.executor.cache.virtual.geometry import Geometry


@dataclass(frozen=True)
class VirtualCache(PagedCache):
    """`PagedCache` whose blocks are pages (`geometry.py`). `config.block_size` is a page's tokens, `config.num_blocks`
    the number of pages, and `config.geometry` says how they are cut.
    """

    @property
    def geometry(self) -> Geometry:
        assert self.config.geometry is not None
        return self.config.geometry

    @property
    def first_place(self) -> int:
        """The first place's number, counted from the first page's home on."""
        return self.config.num_blocks

    @property
    def num_places(self) -> int:
        """Addresses for a page: one for each cache group, slot and index of a block table."""
        return self.num_tables * self.config.max_blocks_per_seq

    @property
    def num_tables(self) -> int:
        """Block tables: one for each cache group and slot."""
        return len(self.groups) * self.config.max_num_seqs

    def longest_sequence(self) -> int:
        """As `PagedCache.longest_sequence`, as far as there are addresses."""
        return min(super().longest_sequence(), self.geometry.longest(self.config.num_blocks, self.num_stretches))

    def check_length(self, max_model_len: int) -> None:
        """Raises InvalidParameterError if there are no addresses for sequences of so many tokens."""
        self.geometry.check_length(self.config.num_blocks, self.num_stretches, max_model_len)

    @property
    def num_stretches(self) -> int:
        """The most addresses besides the homes' that an array has, in longest sequences."""
        return self.num_tables

    @property
    def page_bytes(self) -> int:
        """Of a page in one array."""
        return self.geometry.stride * kernel_block_bytes(self.whole, self.geometry.block_size)

    @property
    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        geometry, layer = self.geometry, self.whole
        block = layer.block(geometry.block_size)
        num_blocks = (self.first_place + self.num_places) * geometry.stride
        num_blocks = max(num_blocks, -(-geometry.least_bytes // kernel_block_bytes(layer, geometry.block_size)))
        num_arrays = self.grouping.num_arrays // geometry.layers
        return (jax.ShapeDtypeStruct((num_blocks, *block), layer.dtype),) * num_arrays

    @property
    def staging(self) -> jax.ShapeDtypeStruct:
        """As `PagedCache.staging`, a page being several blocks: [arrays, SWAP_CHUNK_BLOCKS * blocks of a page, 2,
        kv_heads, block_size, head_dim].
        """
        pools = self.pools
        num_blocks = SWAP_CHUNK_BLOCKS * self.geometry.blocks_of_page
        return jax.ShapeDtypeStruct((len(pools), num_blocks, *pools[0].shape[1:]), pools[0].dtype)

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * (self.grouping.num_arrays // self.geometry.layers)

    def row_tables(self, tables: Int[Array, "slots groups blocks"], slots: Int[Array, " rows"]) -> Tables:
        """Where these slots have pages, the places of these."""
        config = self.config
        first = jnp.arange(len(self.groups)) * config.max_num_seqs + slots[:, None]
        places = first[..., None] * config.max_blocks_per_seq + jnp.arange(config.max_blocks_per_seq)
        return jnp.where(tables[slots] != NULL_BLOCK, self.first_place + places.astype(jnp.int32), NULL_BLOCK)

    def _held(self, tables: Tables, kv_lens: Int[Array, " rows"], first_queries: Int[Array, " rows"]) -> Tables:
        """As `PagedCache._held`: of each row no more pages than hold tokens that its queries see. A table has entries
        of former tenants behind these, and of pages given back before a window. Below their places pages come and go
        while a step runs.
        """
        size = self.config.block_size
        first = jnp.arange(tables.shape[2], dtype=jnp.int32) * size
        held = first < kv_lens[:, None, None]
        windows = [self.config.max_model_len if group.window is None else group.window for group in self.groups]
        if min(windows) < self.config.max_model_len:
            first_seen = first_queries[:, None, None] - (jnp.array(windows, jnp.int32)[:, None] - 1)
            held &= first + size > first_seen
        return jnp.where(held, tables, NULL_BLOCK)

    @property
    def _kernel_block_size(self) -> int:
        return self.geometry.block_size

    def _kernel_table(self, place: Place, tables: Tables) -> Int[Array, "rows blocks"]:
        """In kernels' blocks; the null block's are those of page 0."""
        layer = self._layer(place) * place.parts + place.part
        pages, count = tables[:, place.group], self.geometry.blocks_of_layer
        blocks = self._blocks_of(pages, layer, count, place.parts)
        return blocks.reshape(len(tables), -1)

    def _array(self, place: Place) -> int:
        return place.array // self.geometry.layers

    def _layer(self, place: Place) -> int:
        """Which layer of its array it is."""
        return place.array % self.geometry.layers

    def _blocks_of(self, pages: Int[Array, "*n"], layer: int, count: int, parts: int = 1) -> Int[Array, "*n count"]:
        """So many kernels' blocks of these pages, from those of a layer on. parts: of which a layer has one, in blocks
        that are smaller by as much."""
        geometry = self.geometry
        first = pages * (geometry.stride * parts) + layer * geometry.blocks_of_layer
        return first[..., None] + jnp.arange(count, dtype=jnp.int32)

    def _whole(self, pages: Int[Array, " n"]) -> Int[Array, " n*blocks"]:
        """All kernels' blocks of these pages."""
        return self._blocks_of(pages, 0, self.geometry.blocks_of_page).reshape(-1)

    def copy(self, pools: Pools, source: Int[Array, " n"], target: Int[Array, " n"]) -> Pools:
        return super().copy(pools, self._whole(source), self._whole(target))

    def gather(self, pools: Pools, block_ids: Int[Array, " chunk"]) -> jax.Array:
        return super().gather(pools, self._whole(block_ids))

    def scatter(self, pools: Pools, staging: jax.Array, block_ids: Int[Array, " chunk"]) -> Pools:
        return super().scatter(pools, staging, self._whole(block_ids))
