"""Attention with linear biases (Press et al. 2021, arXiv:2108.12409): a score loses slope times distance."""


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: 2 ** (-bias_max * i / heads) for i from 1 on.

    Of a number of heads that is no power of two, the next power's slopes: those of even i, then as many odd ones as it
    takes.
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * (i + 1) / power) for i in range(power)]
    if power != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]]
    return tuple(slopes[:num_heads])
