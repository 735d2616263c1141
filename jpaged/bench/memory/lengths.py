"""The lengths of the PagedAttention paper's two traces, as its Figure 11 shows them.

The paper's data sets are not published with it, but the figure's bars are: their heights were read off its vector
graphics and add up to 1.000; their means are 161.4 and 338.0 tokens in and out for ShareGPT (the paper says 161.31 and
337.99) and 19.4 and 58.5 for Alpaca (19.31 and 58.45). How inputs and outputs go together is not known; they are drawn
independently, and evenly within a bar. Unlike log-normal lengths of the same means, ShareGPT's outputs are spread
almost evenly up to 400 tokens and have a long tail, so a running sequence is longer on average.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Histogram:
    """Bars of equal width, in tokens, from `first` on, and their heights."""

    first: int
    width: float
    heights: tuple[int, ...]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Lengths, int64 [count]."""
        weights = np.array(self.heights, np.float64)
        bars = rng.choice(len(weights), count, p=weights / weights.sum())
        return (self.first + self.width * (bars + rng.random(count))).astype(np.int64)


def _bars(first: int, width: float, heights: str) -> Histogram:
    return Histogram(first, width, tuple(map(int, heights.split())))


FIGURE_11 = {
    "sharegpt": (
        _bars(
            1,
            15.836,
            """
            13081 9689 4473 2811 1898 1512 1045 890 706 601 550 495 363 407 393 311 309 253 246 247 265 237 258 258
            217 220 210 207 181 155 139 151 167 157 136 118 106 148 108 102 113 100 93 107 100 86 102 85 79 71 92 89
            100 84 64 45 69 66 75 57 56 62 74 72 73 65 71 77 76 57 74 67 59 53 48 38 41 38 42 31 38 41 32 32 41 36
            27 23 29 27 23 27 20 27 26 24 19 20 13 24 20 17 21 23 14 11 21 13 13 13 13 13 13 13 13 13 10 7 12 6 5 6
            5 2 7 2 1 3
            """,
        ),
        _bars(
            1,
            15.687,
            """
            1897 1676 1498 1179 1365 1469 1386 1431 1311 1203 1193 1310 1272 1363 1365 1377 1365 1405 1308 1221 1196
            1181 1047 1002 984 807 751 715 620 590 620 536 511 523 439 395 410 374 343 360 336 289 284 269 248 233
            257 247 611 358 296 241 261 189 158 155 111 117 116 127 116 111 100 95 105 90 80 75 74 63 70 88 77 61 55
            52 58 51 56 51 46 37 26 25 28 27 16 21 21 16 20 20 25 21 19 11 17 18 7 11 9 9 7 8 7 5 7 5 7 5 2 3 3 5 4
            5 5 2 5 0 2 2 1 1 0 0 1 1
            """,
        ),
    ),
    "alpaca": (
        _bars(
            6,
            3.922,
            """
            2660 13188 12659 7356 4386 2494 1514 975 615 442 311 250 120 162 137 115 83 66 63 60 41 38 33 32 27 11
            19 18 10 15 7 9 6 6 8 5
            """,
        ),
        _bars(
            1,
            11.477,
            """
            3591 2584 1404 977 1085 1056 1165 947 881 622 529 339 259 169 151 90 80 60 66 49 47 34 32 27 19 19 12 18
            8 8 5 7 7 6 4 3 3 4 2 1 1 2 1 2 2 1 1 2 1 2 0 1 1 0 1 0 0 1
            """,
        ),
    ),
}
"""Input and output lengths."""
