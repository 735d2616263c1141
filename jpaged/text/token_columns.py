"""Where the tokens of a vocabulary lead from the states of a table, a column for each class of them."""

import numpy as np

from jpaged.text.regular.automata import NotCovered
from jpaged.text.token_moves import Moves
from jpaged.text.token_walk import Place, Walk

MOST_CLASSES = 32_768
"""Their numbers are int16 on the device."""
MOST_ENTRIES = 4_194_304
"""8 MB. The schema of `jpaged/bench/structured.py` has 3.4 million."""


def columns(moves: Moves, walk: Walk) -> tuple[np.ndarray, np.ndarray]:
    """Each token's class, int32 [vocab_size], and where classes lead, int16 [nodes, classes]; -1: nowhere, as class 0
    does from all nodes.

    Raises:
        NotCovered: there are too many.
    """
    # Tokens of a group lead to the same nodes; so do some groups, which are then one class.
    _, tokens, group_of = np.unique(_groups(moves, walk), return_index=True, return_inverse=True)
    following = _following(tokens, moves, walk)
    nowhere = np.full((1, len(walk.nodes)), -1, np.int32)
    numbers = {nowhere.tobytes(): 0}
    classes = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in following], np.int32)
    if len(numbers) > MOST_CLASSES:
        raise NotCovered(f"it has more than {MOST_CLASSES} classes of tokens")
    if len(numbers) * len(walk.nodes) > MOST_ENTRIES:
        raise NotCovered(f"it has more than {MOST_ENTRIES} entries")
    _, first = np.unique(classes, return_index=True)
    rows = following[first] if 0 in classes else np.concatenate([nowhere, following[first]])
    return classes[group_of], np.ascontiguousarray(rows.T, np.int16)


def _groups(moves: Moves, walk: Walk) -> np.ndarray:
    """A group for each token, int64 [vocab_size]: tokens of a function, apart where other tokens are forced behind
    them, or where they are forced themselves.
    """
    groups = moves.going_on.astype(np.int64)
    for forced in {id(one): one for one in walk.forced.values() if one is not None}.values():
        for function, chains in forced.chains.items():
            if (chains != chains[0]).any():
                some = moves.tokens_of[function]
                keys = groups[some] * len(walk.chains) + chains
                groups[some] = groups.max() + 1 + np.unique(keys, return_inverse=True)[1]
    singles = np.array(sorted({token for place in walk.nodes for token in place.forced}), np.int64)
    groups[singles] = groups.max() + 1 + np.arange(len(singles))
    return groups


def _following(tokens: np.ndarray, moves: Moves, walk: Walk) -> np.ndarray:
    """Where these tokens, one of each group, lead: int32 [tokens, nodes]; -1 where one may not follow."""
    following = np.full((len(tokens), len(walk.nodes)), -1, np.int32)
    plain = [place for place in walk.nodes if not place.forced]
    states = np.array([place.state for place in plain])
    nodes = np.array([walk.nodes[place] for place in plain])
    node_of = np.full((moves.dead + 1,), -1, np.int32)  # by state; none where bytes are forced
    node_of[states] = nodes
    behind = moves.behind[moves.going_on[tokens]][:, states]
    following[:, nodes] = node_of[behind]
    forced_at = {state: forced for state, forced in walk.forced.items() if forced is not None}
    for i, k in np.argwhere(np.isin(behind, list(forced_at))).tolist():
        state, token = int(behind[i, k]), tokens[i]
        chain = int(forced_at[state].chains[moves.going_on[token]][moves.rank[token]])
        following[i, nodes[k]] = walk.nodes[walk.places[state, chain]]
    row_of = {int(token): i for i, token in enumerate(tokens.tolist())}
    for place, node in walk.nodes.items():
        if place.forced:
            following[row_of[place.forced[0]], node] = walk.nodes[Place(place.state, place.forced[1:])]
    return following
