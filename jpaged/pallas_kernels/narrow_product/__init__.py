"""The product of rows in 16 bits with weights in 4 or 8, which `int4_product` and `fp8_product` share."""
