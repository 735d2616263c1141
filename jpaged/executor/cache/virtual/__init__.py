"""The virtual layout: each sequence's keys and values are contiguous in addresses, and memory is mapped below them."""
