"""The paged layout: keys and values live in fixed-size blocks of a pool, which sequences find through block tables.

    pool    num_arrays arrays, each [num_blocks, 2 (K, V), kv_heads, block_size, head_dim]; block 0 is the null block.
            Of latents, whose values are columns of their keys: [num_blocks, 1, kv_heads, block_size, head_dim]
            A layer with smaller tokens has a part of each block: for it the array is [num_blocks * parts, 2, ...]
    tables  [slots, groups, max_blocks_per_seq]: where a slot's tokens are, for each group of layers (`groups.py`)

Whoever needs to know how the cache is laid out asks here: programs for the attention of each layer, the memory plan for
a block's bytes, the mesh for how arrays are split, swaps and copies for the blocks, the scheduler for the groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jpaged.api.errors import UnsupportedModelError
from jpaged.engine.footprint import Footprint
from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS, CacheGroup
from jpaged.executor.cache.chunks import decode_chunks, mixed_chunks
from jpaged.executor.cache.groups import Grouping, Place, group_layers
from jpaged.executor.cache.spec import LayerCache, TokenSpec
from jpaged.executor.config import ExecutorConfig
from jpaged.models import row_tiles
from jpaged.models.linear import times
from jpaged.models.sharding import MODEL_AXIS
from jpaged.pallas_kernels import (
    Expansion,
    Sums,
    copy_blocks,
    decode_attention,
    expanded_attention,
    gather_blocks,
    invariant_attention,
    mixed_attention,
    rope_and_write,
    scatter_blocks,
    shared_prefix_attention,
    split_latents,
    split_queries,
    write_kv,
)

Pools = tuple[Float[Array, "blocks arrays kv_heads block_size head_dim"], ...]
Tables = Int[Array, "rows groups blocks"]


class Written(NamedTuple):
    """The tokens that a step writes: the tables through which it does, and the tokens' rows, positions and validity."""

    tables: Tables
    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    valid: Bool[Array, " tokens"]


class Read(NamedTuple):
    """What a step's rows read.

    tables: block tables of all groups; for one layer, that of its group, with blocks as kernels number them.
    kv_lens: tokens of each row. mixed, shared: as of `PagedAttention`.
    """

    tables: Tables | Int[Array, "rows blocks"]
    kv_lens: Int[Array, " rows"]
    mixed: tuple[Int[Array, " rows+1"], Int[Array, ""]] | None
    shared: tuple[Int[Array, ""], Int[Array, ""]] | None


@dataclass(frozen=True)
class PagedCache:
    """The pool of one device, for layers that keep `spec`.

    pools_spec, staging_spec: how `pools` and `staging` are split over a mesh: each device has its heads' part of every
        block.

    Raises:
        UnsupportedModelError: the layers cannot share a pool (`group_layers`).
    """

    spec: TokenSpec
    config: ExecutorConfig

    pools_spec: ClassVar[PartitionSpec] = PartitionSpec(None, None, MODEL_AXIS)
    staging_spec: ClassVar[PartitionSpec] = PartitionSpec(None, None, None, MODEL_AXIS)

    @cached_property
    def grouping(self) -> Grouping:
        return group_layers(self.spec)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return self.grouping.groups

    @cached_property
    def whole(self) -> LayerCache:
        """What an array keeps, as if that were one layer's."""
        places = zip(self.grouping.places, self.spec, strict=True)
        place, layer = min(places, key=lambda both: both[0].parts)
        return replace(layer, kv_heads=layer.kv_heads * place.parts)

    @property
    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the arrays."""
        layer, config = self.whole, self.config
        shape = (config.num_blocks, *layer.block(config.block_size))
        return (jax.ShapeDtypeStruct(shape, layer.dtype),) * self.grouping.num_arrays

    @property
    def staging(self) -> jax.ShapeDtypeStruct:
        """The shape of what `gather` collects: [arrays, SWAP_CHUNK_BLOCKS, 2 or 1, kv_heads, block_size, head_dim]."""
        pools = self.pools
        return jax.ShapeDtypeStruct((len(pools), SWAP_CHUNK_BLOCKS, *pools[0].shape[1:]), pools[0].dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all arrays together: keys and values of `block_size` tokens in a group's layers."""
        return sum(prod(pool.shape[1:]) * pool.dtype.itemsize for pool in self.pools)

    @property
    def footprint(self) -> Footprint:
        """What sequences need of the pool."""
        windows = tuple(group.window for group in self.groups)
        return Footprint(self.config.block_size, windows, self.config.token_buckets[-1])

    def sequence_blocks(self, tokens: int) -> int:
        """The most blocks that a sequence of so many tokens holds at a time, in all groups together."""
        return self.footprint.alone(tokens, tokens)

    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits the pool, up to max_model_len."""
        longest = self.config.max_model_len
        return min(longest, self.footprint.longest(self.config.num_blocks - 1, longest))

    def empty_tables(self) -> Int[Array, "slots groups blocks"]:
        """Block tables without blocks, of all slots and the null slot."""
        shape = (self.config.max_num_seqs + 1, len(self.groups), self.config.max_blocks_per_seq)
        return jnp.full(shape, NULL_BLOCK, jnp.int32)

    def decode_layers(
        self,
        pools: Pools,
        tables: Tables,
        positions: Int[Array, " rows"],
        active: Bool[Array, " rows"],
        shared: tuple[Int[Array, ""], Int[Array, ""]] | None = None,
    ) -> "Layers":
        """The attention of each layer in a step where each row has one query.

        tables: of the rows (`row_tables`).
        positions: of the queries. active: rows that are not write to the null block and see nothing.
        shared: (num_sharing, shared_len) of `StepPlan`, where what rows share is to be read once for all of them.
        """
        batch = positions.shape[0]
        tables = self._held(tables, jnp.where(active, positions + 1, 0), positions)
        written = Written(tables, jnp.arange(batch), positions, active)
        mixed = None
        if self.config.batch_invariant:  # which attends in one way alone
            mixed = jnp.arange(batch + 1, dtype=jnp.int32), jnp.int32(batch)
        return self._layers(pools, written, Read(tables, jnp.where(active, positions + 1, 0), mixed, shared))

    def mixed_layers(
        self,
        pools: Pools,
        tables: Tables,
        active: Bool[Array, " rows"],
        kv_lens: Int[Array, " rows"],
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        valid: Bool[Array, " tokens"],
        query_starts: Int[Array, " rows+1"],
        num_decodes: Int[Array, ""],
    ) -> "Layers":
        """The attention of each layer in a step where rows have any number of queries.

        tables: of the rows (`row_tables`).
        active, kv_lens: of the rows; tokens that each has when the step is done.
        rows, positions, valid: of the tokens. One that is not valid goes to the null block.
        query_starts, num_decodes: as of `mixed_attention`.
        """
        tables = self._held(tables, kv_lens, kv_lens - (query_starts[1:] - query_starts[:-1]))
        written = Written(tables, rows, positions, valid)
        tables = jnp.where(active[:, None, None], tables, NULL_BLOCK)  # a row that stopped reads what it wrote there
        return self._layers(pools, written, Read(tables, kv_lens, (query_starts, num_decodes), None))

    def _held(self, tables: Tables, kv_lens: Int[Array, " rows"], first_queries: Int[Array, " rows"]) -> Tables:
        """The tables of a step's rows as kernels may follow them: entries here are of blocks that the rows hold.

        kv_lens: tokens that each has when the step is done. first_queries: the position of each row's first query.
        """
        return tables

    def row_tables(self, tables: Int[Array, "slots groups blocks"], slots: Int[Array, " rows"]) -> Tables:
        """Block tables of these slots, as `decode_layers` and `mixed_layers` take them."""
        return tables[slots]

    def _layers(self, pools: Pools, written: Written, read: Read) -> "Layers":
        @cache  # layers that keep their tokens alike share what is computed for it
        def attention(place: Place, kept: LayerCache) -> PagedAttention:
            return self._attention(place, pools, written, read, kept)

        of_layers, arrays, shapes = [], [], []
        for place, kept in zip(self.grouping.places, self.spec, strict=True):
            of_layers.append(attention(place._replace(array=self._layer(place)), kept))
            arrays.append(self._array(place))
            shapes.append((pools[0].shape[0] * place.parts, *kept.block(self._kernel_block_size)))
        return self._layers_type(pools, of_layers, arrays, shapes)

    @property
    def _layers_type(self) -> "type[Layers]":
        return Layers

    def _attention(
        self, place: Place, pools: Pools, written: Written, read: Read, kept: LayerCache
    ) -> "PagedAttention":
        """The attention of a layer, with any `pool`. place: its group, and which layer of its array it is. kept: its
        entry in `spec`."""
        window = self.groups[place.group].window
        read = read._replace(tables=self._kernel_table(place, read.tables))
        if kept.chunked and window is not None:
            read = self._of_chunks(read, window, written.rows.shape[0])
        return PagedAttention(
            pools[0],
            self._mapping(place, written),
            *read,
            window,
            self.config.kernel_backend,
            kept.scales,
            kept.chunked,
            kept.source is not None,
        )

    def _of_chunks(self, read: Read, chunk: int, tokens: int) -> Read:
        """`read` with rows cut at chunks (`chunks.py`). chunk: in tokens. tokens: how many the step has."""
        block_size = self._kernel_block_size
        if read.mixed is None:
            return Read(*decode_chunks(read.tables, read.kv_lens, chunk, block_size), None, None)
        starts, num_decodes = read.mixed
        tables, kv_lens, starts = mixed_chunks(
            read.tables, read.kv_lens, starts, num_decodes, chunk, block_size, tokens
        )
        return Read(tables, kv_lens, (starts, num_decodes), None)

    def _mapping(self, place: Place, written: Written) -> Int[Array, " tokens"]:
        """Where a layer writes the tokens."""
        return slot_mapping(self._kernel_table(place, written.tables), *written[1:], self._kernel_block_size)

    @property
    def _kernel_block_size(self) -> int:
        """Tokens of a block, as kernels number them."""
        return self.config.block_size

    def _kernel_table(self, place: Place, tables: Tables) -> Int[Array, "rows blocks"]:
        """A layer's blocks, as kernels number them; the null block's part is of the null block."""
        return tables[:, place.group] * place.parts + place.part

    def _array(self, place: Place) -> int:
        """Which array a layer uses."""
        return place.array

    def _layer(self, place: Place) -> int:
        """Which layer of its array it is."""
        return 0

    def copy(self, pools: Pools, source: Int[Array, " n"], target: Int[Array, " n"]) -> Pools:
        """Copies whole blocks, source[i] to target[i]; pairs of null blocks are padding."""
        return copy_blocks(pools, source, target, backend=self.config.kernel_backend)

    def gather(self, pools: Pools, block_ids: Int[Array, " chunk"]) -> jax.Array:
        """A chunk of blocks in one array, of the shape `staging`."""
        return gather_blocks(pools, block_ids, backend=self.config.kernel_backend)

    def scatter(self, pools: Pools, staging: jax.Array, block_ids: Int[Array, " chunk"]) -> Pools:
        """Puts gathered blocks into the pool; places of no interest name the null block."""
        return scatter_blocks(pools, staging, block_ids, backend=self.config.kernel_backend)


@jax.tree_util.register_dataclass
@dataclass
class PagedAttention:
    """The `attend` of one layer: writes K and V into the layer's array, then attends through its group's block tables.

    A call replaces `pool` by the written one.

    mixed: (query_starts, num_decodes) of `mixed_attention` where rows have several queries, None where each has one
        (`decode_attention`).
    shared: (num_sharing, shared_len) of `shared_prefix_attention`, in a decode step whose rows may share a prefix; a
        layer with a sliding window does without, since it reads no more than its window.
    window: of the layer's group, by which blocks are given back.
    scales: what keys and what values are divided by before they are rounded to e4m3.
    chunked: queries see their own chunk alone, of `window` tokens; `block_tables`, `kv_lens` and `mixed` are those of
        rows that were cut at chunks (`chunks.py`).
    reads_only: the layer reads what another wrote; a call gets queries alone, and writes nothing.

    Raises, when called:
        UnsupportedModelError: the layer attends by another window than its entry in `layer_windows`, or by chunks
            where `chunked_windows` does not say so, or the other way round.
    """

    pool: Float[Array, "blocks arrays kv_heads block_size head_dim"]
    mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "rows blocks_per_seq"]
    kv_lens: Int[Array, " rows"]
    mixed: tuple[Int[Array, " rows+1"], Int[Array, ""]] | None
    shared: tuple[Int[Array, ""], Int[Array, ""]] | None
    window: int | None = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})
    scales: tuple[float, float] = field(default=(1.0, 1.0), metadata={"static": True})
    chunked: bool = field(default=False, metadata={"static": True})
    reads_only: bool = field(default=False, metadata={"static": True})

    def __call__(
        self,
        qkv: Float[Array, "tokens kv_heads slots head_dim"] | Sums,
        *,
        rotation: tuple[Array, Array] | None,
        norms: tuple[Array, Array] | None,
        norm_eps: float,
        sliding_window: int | None = None,
        chunked: bool = False,
        **features: Any,
    ) -> Any:
        self._check_window(sliding_window, chunked)
        backend = self.backend
        if features.get("value_dim") is not None:
            assert not isinstance(qkv, Sums)
            q, latents = split_latents(qkv, rotation=rotation, norms=norms)
            self.pool = write_kv(self.pool, latents, None, self.mapping, backend=backend)
            if (expansion := features.pop("expansion", None)) is not None:
                return self._attend_expanded(q, latents[:, 0], expansion, features["scale"])
            return self._attend(q, sliding_window, features)
        scaled = self.scales != (1.0, 1.0)
        if self.reads_only:
            assert not isinstance(qkv, Sums)
            assert norms is None
            q = split_queries(qkv, rotation=rotation)
        else:
            q, self.pool = rope_and_write(
                self.pool,
                qkv,
                self.mapping,
                rotation=rotation,
                norms=norms,
                norm_eps=norm_eps,
                kv_scales=jnp.asarray(self.scales, jnp.float32) if scaled else None,
                backend=backend,
            )
        if not scaled:
            return self._attend(q, sliding_window, features)
        of_keys, of_values = self.scales  # of all keys and values alike, so that queries and outputs take them
        return times(self._attend(times(q, of_keys), sliding_window, features), of_values)

    def _attend(self, q: Float[Array, "tokens heads head_dim"], window: int | None, features: dict[str, Any]) -> Any:
        paged, backend = (self.pool, self.block_tables, self.kv_lens), self.backend
        if self.chunked:  # rows have no more tokens than their queries see
            window = None
        if self.shared is not None and window is None:
            return shared_prefix_attention(q, *paged, *self.shared, backend=backend, **features)
        if self.mixed is None:
            return decode_attention(q, *paged, sliding_window=window, backend=backend, **features)
        return mixed_attention(q, *paged, *self.mixed, sliding_window=window, backend=backend, **features)

    takes_sums: ClassVar[bool] = True
    """The kernel that rotates and writes multiplies the scales of an FP8 product, too."""

    @property
    def takes_expansion(self) -> bool:
        """Whether a call may have an expansion (`Attend`): where rows have several queries."""
        return self.mixed is not None

    def _attend_expanded(
        self,
        q: Float[Array, "tokens heads columns"],
        latents: Float[Array, "tokens columns"],
        expansion: Expansion,
        scale: float,
    ) -> Any:
        assert self.mixed is not None
        paged = self.pool, self.block_tables, self.kv_lens, *self.mixed
        return expanded_attention(q, latents, expansion, *paged, scale=scale, backend=self.backend)

    def attend_rows(self, asked: row_tiles.Attention) -> jax.Array:
        """The same for queries, keys and values that are made already; each query's result by itself."""
        assert self.mixed is not None
        features = dict(asked.features)
        self._check_window(features.get("sliding_window"), features.pop("chunked", False))
        if self.chunked:
            features["sliding_window"] = None
        if not self.reads_only:
            self.pool = write_kv(self.pool, asked.k, asked.v, self.mapping, backend=self.backend)
        paged = (self.pool, self.block_tables, self.kv_lens)
        return invariant_attention(asked.q, *paged, self.mixed[0], backend=self.backend, **features)

    def _check_window(self, sliding_window: int | None, chunked: bool) -> None:
        if sliding_window != self.window or chunked != self.chunked:
            raise UnsupportedModelError(
                f"A layer calls attend with sliding_window={sliding_window}, chunked={chunked}, but the configuration's"
                f" layer_windows and chunked_windows say {self.window}, {self.chunked}; make them equal."
            )


class Layers(list[PagedAttention]):
    """The attention of each layer, for `Model.forward`, which takes a layer's out and puts it back as its call left it.

    Layers that share an array of the pool get it as the one before left it.

    Attributes:
        pools: the arrays, as of the last layer that was put back.
    """

    def __init__(
        self,
        pools: Pools,
        of_layers: Sequence[PagedAttention],
        arrays: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        """of_layers: the attention of each layer, with any `pool`. arrays: of `pools`, the one that each layer uses.
        shapes: of that array, as each layer sees it."""
        super().__init__(of_layers)
        self._arrays, self._shapes = list(arrays), list(shapes)
        self._pools = list(self._held(pools))

    @property
    def pools(self) -> Pools:
        return tuple(self._pools)

    def _held(self, pools: Pools) -> Sequence[Any]:
        """What each of `arrays` numbers."""
        return pools

    def __getitem__(self, layer: SupportsIndex) -> PagedAttention:  # type: ignore[override]  # one layer at a time
        return replace(super().__getitem__(layer), pool=self._seen(self._pools[self._arrays[layer]], layer))

    def __setitem__(self, layer: SupportsIndex, attention: PagedAttention) -> None:  # type: ignore[override]
        array = self._arrays[layer]
        self._pools[array] = self._put_back(attention.pool, self._pools[array])

    def _seen(self, pool: Any, layer: SupportsIndex) -> Any:
        """An array as a layer sees it; in memory it is the same."""
        return pool.reshape(self._shapes[layer])

    def _put_back(self, pool: Any, array: Any) -> Any:
        """Undoes `_seen`. array: what it was made of."""
        return pool.reshape(array.shape)

    def attend_rows(self, asked: row_tiles.Attention) -> jax.Array:
        """For `row_tiles.forward_in_row_tiles`."""
        attention = self[asked.layer]
        out = attention.attend_rows(asked)
        self[asked.layer] = attention
        return out


def slot_mapping(
    block_tables: Int[Array, "rows blocks"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    valid: Bool[Array, " tokens"],
    block_size: int,
    stride: int | None = None,
) -> Int[Array, " tokens"]:
    """Where in the pool the token of row `rows[t]` at `positions[t]` goes: block * stride + offset.

    Tokens that are not valid go to the null block. stride: entries from one block to the next; block_size if None.
    """
    stride = block_size if stride is None else stride
    blocks = block_tables[rows, positions // block_size]
    spread = jnp.arange(rows.shape[0], dtype=jnp.int32) % block_size
    return jnp.where(valid, blocks * stride + positions % block_size, NULL_BLOCK * stride + spread)
