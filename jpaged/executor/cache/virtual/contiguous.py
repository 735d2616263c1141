"""The virtual layout for attention kernels that know no block tables: keys and values contiguous, in arrays apart.

    two arrays a layer, one of keys, one of values, each [tokens, 1, kv_heads, 1, head_dim]:

    [ homes of the pages, padded to whole stretches | slot 0's stretch | slot 1's | ... ]

A page of the device holds keys, or values, of one layer: 1,024 tokens of an 8B model, so that a sequence's first token
takes a page of each of 64 arrays. A kernel gets an array as it is, [stretches, longest sequence, kv_heads, head_dim],
and a length for each stretch; the homes are stretches of length 0. So no array is ever sliced, which would copy it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.api.errors import UnsupportedModelError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.executor.cache.groups import Place
from jpaged.executor.cache.paged import Layers, Pools, Read, Written, slot_mapping
from jpaged.executor.cache.spec import LayerCache
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.models import row_tiles
from jpaged.pallas_kernels import (
    Addresses,
    contiguous_attention,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    split_qkv,
    write_kv,
)

_MOVES = "xla"
"""Who writes tokens and moves pages: plain XLA, in place. Its own kernels are made for blocks of several tokens."""


_COPIED_AT_ONCE = 8
"""Pages. Of each array, 2 MiB a page, 16 MiB are copied at once: 1 GiB over the 64 arrays of an 8B model."""


@dataclass(frozen=True)
class ContiguousCache(VirtualCache):
    """`VirtualCache` whose attention is `contiguous_attention`, by `config.contiguous_backend`. `geometry` is that of
    keys alone; a kernel's block is one token.

    Raises:
        UnsupportedModelError: the model's layers have windows, keep latents, or do not all keep as much.
    """

    def __post_init__(self) -> None:
        kinds = {(layer.kv_heads, layer.head_dim, layer.source is None) for layer in self.spec}
        if {layer.window for layer in self.spec} != {None}:
            what = "sliding windows"
        elif self.spec[0].value_dim is not None:
            what = "latents"
        else:
            what = "layers that share keys and values, or differ in their heads" if len(kinds) > 1 else ""
        if what:
            raise UnsupportedModelError(
                f"kernel_backend={self.config.contiguous_backend!r} does not serve models with {what}; leave it out."
            )

    @property
    def addresses(self) -> Addresses:
        """How an array is cut: whole stretches of homes, then one for each slot."""
        pages, stride = self.config.max_blocks_per_seq, self.geometry.stride
        return Addresses(self.first_place // pages + self.num_tables, pages, self.geometry.page_tokens, stride)

    @property
    def first_place(self) -> int:
        pages = self.config.max_blocks_per_seq
        return -(-self.config.num_blocks // pages) * pages

    @property
    def num_stretches(self) -> int:
        return self.num_tables + 1  # the homes' padding is shorter than one

    @property
    def page_bytes(self) -> int:
        layer = self.spec[0]
        return self.geometry.stride * layer.kv_heads * layer.head_dim * layer.dtype.itemsize

    @property
    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Keys and values of each layer in turn."""
        layer = self.spec[0]
        token_bytes = self.page_bytes // self.geometry.stride
        tokens = max(self.addresses.num_entries, -(-self.geometry.least_bytes // token_bytes))
        array = jax.ShapeDtypeStruct((tokens, 1, layer.kv_heads, 1, layer.head_dim), layer.dtype)
        return (array,) * (2 * self.grouping.num_arrays)

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * 2 * self.grouping.num_arrays

    @property
    def _layers_type(self) -> type[Layers]:
        return _Pairs

    def _attention(self, place: Place, pools: Pools, written: Written, read: Read, kept: LayerCache) -> Any:
        assert read.shared is None
        addresses = self.addresses
        first = read.tables[:, place.group, 0]  # the place of the first page, from which on the others follow
        return ContiguousAttention(
            (pools[0], pools[1]),
            self._mapping(place, written),
            first // addresses.pages,
            jnp.where(first == NULL_BLOCK, 0, read.kv_lens),
            read.mixed,
            addresses,
            self.config.contiguous_backend,
        )

    def _mapping(self, place: Place, written: Written) -> Int[Array, " tokens"]:
        pages, geometry = written.tables[:, place.group], self.geometry
        return slot_mapping(pages, *written[1:], geometry.page_tokens, geometry.stride)

    def copy(self, pools: Pools, source: Int[Array, " n"], target: Int[Array, " n"]) -> Pools:
        """A few pages at a time: plain XLA holds those that it copies beside the arrays."""
        source, target = (jnp.pad(pages, (0, -len(pages) % _COPIED_AT_ONCE)) for pages in (source, target))

        def some(i: Array, pools: Pools) -> Pools:
            first, second = (
                self._whole(lax.dynamic_slice_in_dim(pages, i * _COPIED_AT_ONCE, _COPIED_AT_ONCE))
                for pages in (source, target)
            )
            return copy_blocks(pools, first, second, backend=_MOVES)

        return lax.fori_loop(0, len(source) // _COPIED_AT_ONCE, some, tuple(pools))

    def gather(self, pools: Pools, block_ids: Int[Array, " chunk"]) -> jax.Array:
        return gather_blocks(pools, self._whole(block_ids), backend=_MOVES)

    def scatter(self, pools: Pools, staging: jax.Array, block_ids: Int[Array, " chunk"]) -> Pools:
        return scatter_blocks(pools, staging, self._whole(block_ids), backend=_MOVES)


@jax.tree_util.register_dataclass
@dataclass
class ContiguousAttention:
    """The `attend` of one layer, as `PagedAttention`, over an array of keys and one of values.

    pool: both. stretches: of each row. kv_lens: of the rows, 0 for those without pages.
    mixed: (query_starts, num_decodes) where rows have several queries.

    Raises, when called:
        ValueError: the layer's attention has something that this has not; it is named.
    """

    pool: tuple[Float[Array, "tokens 1 kv_heads 1 head_dim"], Float[Array, "tokens 1 kv_heads 1 head_dim"]]
    mapping: Int[Array, " tokens"]
    stretches: Int[Array, " rows"]
    kv_lens: Int[Array, " rows"]
    mixed: tuple[Int[Array, " rows+1"], Int[Array, ""]] | None
    addresses: Addresses = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})

    def __call__(
        self,
        qkv: Float[Array, "tokens kv_heads slots head_dim"],
        *,
        rotation: tuple[Array, Array] | None,
        norms: tuple[Array, Array] | None,
        norm_eps: float,
        scale: float | None = None,
        **features: Any,
    ) -> jax.Array:
        for name, value in features.items():
            if value is not None:
                raise ValueError(f"contiguous attention has no {name}; leave kernel_backend out to serve this model")
        q, *kv = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
        keys, values = (
            write_kv(array, new, None, self.mapping, backend=_MOVES) for array, new in zip(self.pool, kv, strict=True)
        )
        self.pool = keys, values
        starts, num_decodes = (None, None) if self.mixed is None else self.mixed
        tokens, _, kv_heads, _, head_dim = keys.shape
        return contiguous_attention(
            q,
            keys.reshape(tokens, kv_heads, head_dim),
            values.reshape(tokens, kv_heads, head_dim),
            self.stretches,
            self.kv_lens,
            self.addresses,
            query_starts=starts,
            num_decodes=num_decodes,
            scale=scale,
            backend=self.backend,
        )

    def attend_rows(self, asked: row_tiles.Attention) -> jax.Array:
        raise ValueError("contiguous attention is not batch-invariant; leave kernel_backend out")


class _Pairs(Layers):
    """`Layers` whose arrays are pairs, of keys and values."""

    def _held(self, pools: Pools) -> Sequence[Any]:
        return [*zip(pools[::2], pools[1::2], strict=True)]

    def _seen(self, pool: Any, layer: SupportsIndex) -> Any:
        return pool

    def _put_back(self, pool: Any, array: Any) -> Any:
        return pool

    @property
    def pools(self) -> Pools:
        pairs: Any = self._pools
        return tuple(array for pair in pairs for array in pair)
