"""Picks the replica that serves a request: the one with the least to compute before the request is done.

    cost of a replica = tokens it still owes others + this prompt's tokens that its prefix cache lacks

So requests spread evenly, and those that begin alike stay together as long as that saves more than it costs in
waiting. What a replica has cached is remembered from what was sent there, by hashes of prompt beginnings, the most
recent first to stay; nobody asks the replicas.
"""

from collections import OrderedDict
from collections.abc import Sequence

CHUNK_TOKENS = 64
"""Prompt beginnings are compared at multiples of this."""

REMEMBERED_CHUNKS = 1 << 18
"""Beginnings remembered. At 64 tokens each they cover 16 M tokens, more than the replicas' pools hold."""


class Router:
    """Counts what each replica owes. Not thread-safe.

    num_replicas: at least 1. match_prefixes: False where replicas keep no prefix cache.

    Attributes:
        outstanding: for each replica the tokens it has been asked for and has not finished, prompts and answers.
    """

    def __init__(self, num_replicas: int, *, match_prefixes: bool = True) -> None:
        self.outstanding = [0] * num_replicas
        self.match_prefixes = match_prefixes
        self._requests: dict[str, tuple[int, int]] = {}  # id -> replica, tokens
        self._seen: OrderedDict[int, int] = OrderedDict()  # hash of a beginning -> bit set of replicas

    def route(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        salt: str | None = None,
        elsewhere: Sequence[float] | None = None,
    ) -> int:
        """Picks a replica and counts the request as its own until `finish`.

        prompt: token ids. max_new_tokens: most that the answer may have. salt: prefixes are shared only within one.
        elsewhere: for each replica the tokens that it owes to requests which other routers sent; infinity for one that
            is to get none.
        """
        beginnings = self._beginnings(prompt, salt)
        known = self._known_tokens(beginnings)
        others = [0] * len(known) if elsewhere is None else elsewhere
        costs = [own + other - saved for own, other, saved in zip(self.outstanding, others, known, strict=True)]
        replica = costs.index(min(costs))
        self._count(request_id, replica, beginnings, len(prompt) - known[replica] + max_new_tokens)
        return replica

    def assign(
        self, request_id: str, replica: int, prompt: Sequence[int], max_new_tokens: int, salt: str | None = None
    ) -> None:
        """As `route`, but the caller names the replica."""
        beginnings = self._beginnings(prompt, salt)
        known = self._known_tokens(beginnings)[replica]
        self._count(request_id, replica, beginnings, len(prompt) - known + max_new_tokens)

    def replica_of(self, request_id: str) -> int | None:
        """The replica of an unfinished request; None for any other id."""
        found = self._requests.get(request_id)
        return None if found is None else found[0]

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def finish(self, request_id: str) -> None:
        """The request is done: its replica owes it nothing more. Unknown ids are ignored."""
        if request_id in self._requests:
            replica, tokens = self._requests.pop(request_id)
            self.outstanding[replica] -= tokens

    def forget_prefixes(self) -> None:
        """The replicas' prefix caches were reset."""
        self._seen.clear()

    def forget_replica(self, replica: int) -> None:
        """A replica's prefix cache is gone."""
        for beginning in self._seen:
            self._seen[beginning] &= ~(1 << replica)

    def _count(self, request_id: str, replica: int, beginnings: Sequence[int], tokens: int) -> None:
        self.outstanding[replica] += tokens
        self._requests[request_id] = replica, tokens
        for beginning in beginnings:
            self._seen[beginning] = self._seen.pop(beginning, 0) | 1 << replica
        while len(self._seen) > REMEMBERED_CHUNKS:
            self._seen.popitem(last=False)

    def _beginnings(self, prompt: Sequence[int], salt: str | None) -> list[int]:
        """A hash of each whole number of chunks, the shortest first. Equal hashes of unequal prompts cost only time."""
        if not self.match_prefixes:
            return []
        hashes, state = [], hash(salt)
        for start in range(0, len(prompt) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            state = hash((state, *prompt[start : start + CHUNK_TOKENS]))
            hashes.append(state)
        return hashes

    def _known_tokens(self, beginnings: Sequence[int]) -> list[int]:
        """For each replica the tokens of the longest beginning that was sent to it before."""
        known = [0] * len(self.outstanding)
        for count, beginning in enumerate(beginnings, start=1):
            replicas = self._seen.get(beginning, 0)
            if not replicas:
                break
            for replica in range(len(known)):
                if replicas >> replica & 1:
                    known[replica] = count * CHUNK_TOKENS
        return known
