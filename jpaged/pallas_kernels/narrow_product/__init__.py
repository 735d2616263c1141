"""No op: the Mosaic kernel that the "hopper" implementations of `int4_product` and `fp8_product` share."""
