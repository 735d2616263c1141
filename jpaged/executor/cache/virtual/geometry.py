"""Where tokens are in the arrays of the virtual layout.

    an array     [ page 0 | page 1 | ... | page P-1 |  slot 0: 0 1 2 .. M-1  |  slot 1: 0 1 .. M-1 |  ...   ]
                   homes of the pages, 0 the null     places: addresses of a slot's tokens, in their order
                   block's; whole pages are copied     (of each cache group in turn); attention reads and
                   and swapped there                   writes here

    a page       the memory of a block of the control plane: `page_tokens` tokens, below its home and, at the same time,
                 below any number of places

    "per-layer"  an array a layer      [ block 0 | block 1 | ... ]                          of that layer
    "sliced"     one array             [ layer 0: block 0, 1, ... | layer 1: block 0 | ... ]

Both are made of the blocks that kernels know, [2, kv_heads, block_size, head_dim]. So kernels take an array as their
pool, and a table that counts up as their block table. Pages of 2 MiB hold hundreds of tokens of one layer, but only 16
of all layers of an 8B model (32 layers, 8 key-value heads of 128, 16 bits).
"""

from dataclasses import dataclass
from math import gcd

from jpaged.api.errors import InvalidParameterError


@dataclass(frozen=True)
class Geometry:
    """How arrays are cut into pages.

    page_layout: "per-layer" or "sliced".
    layers: of an array, one or all.
    block_size: tokens of a kernel's block.
    blocks_of_layer: kernels' blocks of a layer in a page.
    stride: kernels' blocks from one page to the next; there may be some to spare.
    least_bytes: of an array.
    most_tokens: of all layers of an array together, homes of pages included.
    read_behind: tokens behind a chunk that kernels may read, so that there must be something below their addresses.
    """

    page_layout: str
    layers: int
    block_size: int
    blocks_of_layer: int
    stride: int
    least_bytes: int = 0
    most_tokens: int = 2**31 - 1
    read_behind: int = 0

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        return self.blocks_of_layer * self.block_size

    @property
    def blocks_of_page(self) -> int:
        """Kernels' blocks of a page in an array, less those to spare."""
        return self.layers * self.blocks_of_layer

    @staticmethod
    def fit(
        page_layout: str, num_layers: int, block_size: int, block_bytes: int, granularity: int, spare_bytes: int = 0
    ) -> "Geometry":
        """The smallest pages that hold whole blocks of the layers they are for.

        Args:
            num_layers: that a cache group has at most. block_bytes: of a kernel's block of one layer.
            granularity: of the device's pages. spare_bytes: that each page has besides its blocks, at the least.
        """
        layers = num_layers if page_layout == "sliced" else 1
        unit = granularity // gcd(granularity, block_bytes)  # blocks whose bytes fill whole pages of the device
        spare = -(-spare_bytes // block_bytes)
        if spare:
            stride = -(-(layers + spare) // unit) * unit
            return Geometry(page_layout, layers, block_size, (stride - spare) // layers, stride)
        blocks = unit // gcd(unit, layers)
        return Geometry(page_layout, layers, block_size, blocks, blocks * layers)

    def longest(self, num_pages: int, num_tables: int) -> int:
        """Tokens of the longest sequence for which so many block tables have addresses."""
        pages = max(0, self.most_tokens // (self.stride * self.block_size) - num_pages) // num_tables
        return max(0, pages * self.page_tokens - self.read_behind)

    def check_length(self, num_pages: int, num_tables: int, max_model_len: int) -> None:
        """Raises InvalidParameterError if there are no addresses for sequences of so many tokens."""
        longest = self.longest(num_pages, num_tables)
        if max_model_len > longest:
            raise InvalidParameterError(
                f"max_model_len={max_model_len} exceeds the {longest:,} tokens that each of max_num_seqs sequences has "
                f"addresses for in the virtual layout (virtual_page_layout={self.page_layout!r}); lower max_model_len "
                f"or max_num_seqs."
            )
