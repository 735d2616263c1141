"""What the PagedAttention paper reports (Kwon et al., SOSP 2023, arXiv 2309.06180), to stand beside what we simulate.

Numbers that the paper prints are exact. Curves were read off the coordinates of its vector graphics, and are as exact
as those: to 0.01 requests/s and 0.001 s/token. A curve is ((request rate in requests/s, normalized latency in
s/token), ...); where it leaves the plot at 1 s/token, its last point is beyond or missing.
"""

Curve = tuple[tuple[float, float], ...]

MEAN_LENGTHS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
"""Figure 11: mean tokens in and out."""

FIGURE_1_THROUGHPUT = {
    4: 146.9,
    8: 267.3,
    12: 378.9,
    16: 482.6,
    20: 577.1,
    24: 659.5,
    28: 740.8,
    32: 811.0,
    36: 881.8,
    40: 921.9,
}
"""Figure 1, bottom right: tokens/s by sequences in the batch; a 13B model (26 GB) on an A100 of 40 GB."""

FIGURE_2 = {
    "orca-max": {"token_states": 0.204, "reserved": 0.133, "internal": 0.573, "external": 0.089},
    "orca-pow2": {"token_states": 0.268, "reserved": 0.179, "internal": 0.136, "external": 0.416},
    "orca-oracle": {"token_states": 0.382, "reserved": 0.252, "internal": 0.0, "external": 0.366},
    "paged": {"token_states": 0.963},
}
"""Shares of the memory for the cache. The paper prints one number for the paged system."""

FIGURE_2_RATE = 4.0
"""Requests/s, of ShareGPT: in the experiments published with the paper, github.com/sosp-ae-39/sosp-ae-astra."""

FIGURE_13 = {
    "sharegpt": {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "paged": 30.42},
    "alpaca": {"orca-max": 7.00, "orca-pow2": 43.24, "orca-oracle": 72.75, "paged": 132.44},
}
"""Mean batched requests of OPT-13B: ShareGPT at 2 requests/s, Alpaca at 30."""

FIGURE_13_RATES = {"sharegpt": 2.0, "alpaca": 30.0}

FIGURE_15 = {
    "alpaca": {"parallel": {2: 0.0609, 4: 0.0853, 6: 0.0979}, "beam": {2: 0.3756, 4: 0.5313, 6: 0.5516}},
    "sharegpt": {"parallel": {2: 0.162, 6: 0.305}, "beam": {2: 0.443, 6: 0.663}},
}
"""Blocks saved by sharing, of those needed without; by outputs or beam width. For ShareGPT the text gives the ends."""

FIGURE_12: dict[str, dict[str, dict[str, Curve]]] = {
    "sharegpt": {
        "opt-13b": {
            "orca-max": ((0.2, 0.03), (0.3, 0.031), (0.4, 0.06), (0.5, 0.082)),
            "orca-pow2": ((0.25, 0.03), (0.5, 0.04), (0.6, 0.04), (0.75, 0.117)),
            "orca-oracle": ((0.25, 0.03), (0.5, 0.033), (0.75, 0.041), (0.9, 0.085), (1.0, 0.192), (1.1, 0.502)),
            "paged": ((1.0, 0.037), (1.25, 0.04), (1.5, 0.042), (1.75, 0.113), (1.8, 0.131), (1.9, 0.24), (2.0, 1.125)),
        },
        "opt-66b": {
            "orca-max": ((0.1, 0.061), (0.2, 0.272)),
            "orca-pow2": ((0.1, 0.055), (0.2, 0.083), (0.25, 0.247), (0.3, 0.922)),
            "orca-oracle": ((0.2, 0.061), (0.3, 0.131), (0.4, 0.386)),
            "paged": ((0.4, 0.058), (0.6, 0.058), (0.8, 0.103), (0.9, 0.211), (1.0, 0.948)),
        },
        "opt-175b": {
            "orca-max": ((0.25, 0.088), (0.5, 0.09), (0.75, 0.116), (1.0, 0.689)),
            "orca-pow2": ((0.5, 0.086), (0.75, 0.09), (1.0, 0.128), (1.25, 0.346)),
            "orca-oracle": ((0.8, 0.091), (1.0, 0.096), (1.2, 0.102), (1.4, 0.319), (1.6, 0.383), (1.8, 1.468)),
            "paged": ((1.5, 0.113), (1.75, 0.12), (2.0, 0.136), (2.25, 0.253), (2.5, 0.738), (2.6, 0.967)),
        },
    },
    "alpaca": {
        "opt-13b": {
            "orca-max": ((2.0, 0.031), (3.0, 0.049), (4.0, 0.578)),
            "orca-pow2": ((7.5, 0.034), (10.0, 0.036), (12.5, 0.04), (15.0, 0.067), (16.0, 0.163)),
            "orca-oracle": ((15.0, 0.042), (17.5, 0.046), (20.0, 0.066), (21.0, 0.158)),
            "paged": ((20.0, 0.052), (22.5, 0.065), (25.0, 0.072), (27.5, 0.104), (28.0, 0.208)),
        },
        "opt-66b": {
            "orca-max": ((0.05, 0.053), (0.1, 0.051), (1.0, 0.145), (1.25, 0.408)),
            "orca-pow2": ((3.0, 0.058), (5.0, 0.06), (6.0, 0.091)),
            "orca-oracle": ((5.0, 0.061), (6.0, 0.062), (8.0, 0.067), (10.0, 0.122), (11.0, 0.882)),
            "paged": (
                (11.0, 0.069),
                (13.0, 0.077),
                (15.0, 0.082),
                (17.5, 0.093),
                (18.0, 0.115),
                (18.5, 0.204),
                (19.0, 0.894),
            ),
        },
        "opt-175b": {
            "orca-max": ((1.25, 0.088), (2.5, 0.09), (4.0, 0.105), (5.0, 0.228)),
            "orca-pow2": ((10.0, 0.118), (15.0, 0.144), (16.0, 0.198), (17.0, 0.312)),
            "orca-oracle": ((15.0, 0.14), (17.5, 0.181), (19.0, 0.253)),
            "paged": ((15.0, 0.139), (17.5, 0.175), (19.0, 0.239), (20.0, 0.38), (21.0, 1.081)),
        },
    },
}

FIGURE_14: dict[int, dict[str, Curve]] = {
    4: {
        "orca-max": ((0.1, 0.046), (0.25, 0.078), (0.5, 0.265)),
        "orca-pow2": ((2.0, 0.033), (3.0, 0.055), (4.0, 0.115), (4.5, 0.3), (5.0, 0.795)),
        "orca-oracle": ((4.0, 0.035), (5.0, 0.043), (6.0, 0.062), (7.0, 0.339)),
        "paged": ((6.0, 0.039), (7.0, 0.042), (8.0, 0.047), (9.0, 0.057), (10.0, 0.071), (10.5, 0.725)),
    },
    6: {
        "orca-max": ((0.1, 0.047), (0.25, 0.082), (0.5, 0.301)),
        "orca-pow2": ((1.0, 0.03), (1.5, 0.035), (2.0, 0.09), (2.5, 0.125), (3.0, 0.287)),
        "orca-oracle": ((2.0, 0.032), (3.0, 0.044), (4.0, 0.096), (4.5, 0.251), (5.0, 1.201)),
        "paged": ((4.0, 0.037), (5.0, 0.042), (6.0, 0.048), (7.0, 0.097)),
    },
}
"""OPT-13B, Alpaca, parallel sampling; by samples. (The figure has a panel for two as well, and three for beams.)"""

FIGURE_16: dict[int, dict[str, Curve]] = {
    80: {
        "orca-oracle": (
            (1.0, 0.026),
            (24.0, 0.045),
            (26.0, 0.05),
            (28.0, 0.058),
            (29.0, 0.07),
            (30.0, 0.405),
            (31.0, 1.206),
        ),
        "paged": (
            (1.0, 0.027),
            (24.0, 0.041),
            (32.0, 0.048),
            (40.0, 0.061),
            (48.0, 0.105),
            (50.0, 0.227),
            (51.0, 0.53),
            (52.0, 1.214),
        ),
    },
    341: {
        "orca-oracle": (
            (1.0, 0.029),
            (4.0, 0.034),
            (8.0, 0.046),
            (9.0, 0.051),
            (10.0, 0.058),
            (11.0, 0.075),
            (12.0, 0.396),
        ),
        "paged": (
            (1.0, 0.027),
            (24.0, 0.044),
            (36.0, 0.072),
            (38.0, 0.086),
            (40.0, 0.106),
            (41.0, 0.155),
            (42.0, 0.242),
            (43.0, 0.627),
            (44.0, 1.171),
        ),
    },
}
"""LLaMA-13B, translation; by the tokens of the shared prefix."""

FIGURE_17: dict[str, Curve] = {
    "orca-max": ((0.1, 0.031), (0.2, 0.032), (0.3, 0.036), (0.35, 0.04), (0.4, 0.049), (0.45, 0.09), (0.55, 0.45)),
    "orca-pow2": (
        (0.1, 0.031),
        (0.2, 0.033),
        (0.3, 0.035),
        (0.35, 0.039),
        (0.4, 0.045),
        (0.45, 0.075),
        (0.55, 0.275),
        (0.6, 0.964),
    ),
    "orca-oracle": (
        (0.1, 0.031),
        (0.2, 0.033),
        (0.3, 0.035),
        (0.35, 0.038),
        (0.4, 0.044),
        (0.45, 0.069),
        (0.55, 0.241),
        (0.6, 0.837),
        (0.65, 1.218),
    ),
    "paged": (
        (0.1, 0.031),
        (0.2, 0.033),
        (0.3, 0.034),
        (0.4, 0.036),
        (0.55, 0.053),
        (0.6, 0.071),
        (0.7, 0.108),
        (0.8, 0.2),
        (0.85, 0.428),
    ),
}
"""OPT-13B, chatbot."""
