"""Where the seeds of sampling come from. All are unsigned 64-bit integers.

    SamplingParams.seed, or one from the engine's seed and the arrival number
        |
        +-- sample 0: the seed itself, so its tokens are those of the same request with n=1
        +-- sample i: mix(mix(seed) + i), a stream of its own

`mix` is the output function of the SplitMix64 generator (Steele, Lea, Flood 2014): a bijection whose outputs for
consecutive inputs are statistically independent.
"""

_UINT64 = 2**64


def request_seed(seed: int | None, engine_seed: int, arrival_number: int) -> int:
    """A request's own seed, or one derived from the engine's."""
    if seed is not None:
        return seed % _UINT64
    return _derive(engine_seed % _UINT64, arrival_number)


def default_seed(engine_seed: int, arrival_number: int) -> int:
    """`request_seed` of a request without a seed, as `SamplingParams.seed` takes it: the same 64 bits, signed."""
    seed = request_seed(None, engine_seed, arrival_number)
    return seed - _UINT64 if seed >= _UINT64 // 2 else seed


def sample_seed(seed: int, index: int) -> int:
    """The seed of one of a request's samples."""
    return seed if index == 0 else _derive(seed, index)


def _derive(seed: int, number: int) -> int:
    return _mix(_mix(seed) + number)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _UINT64
    return x ^ (x >> 31)
