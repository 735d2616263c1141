"""Who may queue how much: room in the queue is taken when it is checked, not when a request gets there.

    enter --> Ticket: room for its prompts, and for their tokens once they are known
                opened, prompt by prompt: the engine counts it from then on
                close: gives back what is left, and the client's share

Between the check and the queue a prompt is tokenized, and thousands of others may be checked meanwhile.

    clients, int32 [workers, cells], in shared memory     a client's cell is picked by the hash of its key or address

A worker writes only into its own row and reads the sum over all, as on the board.
"""

import hashlib
import mmap
import os
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

import numpy as np
from starlette.requests import Request

from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.errors import ApiError
from jpaged.serving.limits import RETRY_AFTER_S, ServerLimits
from jpaged.serving.middleware import key_of

_CELLS = 1 << 16
_NETWORK_BITS = 64
"""An IPv6 network of this size has one owner, who may take any address of it."""


class ClientCounts:
    """Prompts of each client that wait or run, over all API processes.

    num_workers: processes. worker: which of them this is. fd: of memory that `shared` made; by default it is this
    process's own.
    """

    def __init__(self, num_workers: int = 1, worker: int = 0, fd: int = -1) -> None:
        memory = mmap.mmap(fd, 4 * num_workers * _CELLS)
        self._cells = np.frombuffer(memory, np.int32).reshape(num_workers, _CELLS)
        self._own = self._cells[worker]
        self._own[:] = 0  # a process that has ended had this row

    @staticmethod
    def shared(num_workers: int) -> int:
        """Allocates zeroed memory for several processes. Returns its file descriptor, which they inherit."""
        fd = os.memfd_create("jpaged-clients")
        os.ftruncate(fd, 4 * num_workers * _CELLS)
        return fd

    def add(self, client: bytes, amount: int) -> int:
        """Adds to a client's count. Returns the count over all processes."""
        cell = int.from_bytes(hashlib.blake2b(client, digest_size=4).digest()) % _CELLS
        self._own[cell] += amount
        return int(self._cells[:, cell].sum())


class Ticket:
    """A request's place: what it holds of the queue and of its client's share. Closing it twice does nothing more."""

    def __init__(self, engine: AsyncLLMEngine, clients: ClientCounts | None, client: bytes, num_prompts: int) -> None:
        self._engine = engine
        self._clients = clients
        self._client = client
        self._num_prompts = self._num_reserved = num_prompts
        self._num_tokens = 0
        engine.reserve(num_prompts)

    def take_tokens(self, num_tokens: int) -> None:
        """Takes room for the tokens of all prompts."""
        self._num_tokens += num_tokens
        self._engine.reserve(0, num_tokens)

    def opened(self, num_tokens: int) -> None:
        """The engine is about to count a prompt of so many tokens itself."""
        self._num_reserved -= 1
        self._num_tokens -= num_tokens
        self._engine.reserve(-1, -num_tokens)

    def close(self) -> None:
        self._engine.reserve(-self._num_reserved, -self._num_tokens)
        self._num_reserved = self._num_tokens = 0
        if self._clients is not None:
            self._clients.add(self._client, -self._num_prompts)
        self._clients = None


class Admission:
    """Checks requests against the queue and their client's share.

    clients: None: clients are not told apart.
    """

    def __init__(self, engine: AsyncLLMEngine, limits: ServerLimits, clients: ClientCounts | None = None) -> None:
        self._engine = engine
        self._limits = limits
        self._clients = None
        if limits.max_requests_per_client is not None:
            self._clients = clients or ClientCounts()

    def enter(self, client: bytes, num_prompts: int) -> Ticket:
        """Takes room for prompts.

        Raises:
            OverloadedError: the queue has none. ApiError: the client has too many already.
        """
        most = self._limits.max_requests_per_client
        if self._clients is not None and most is not None:
            num_own = self._clients.add(client, num_prompts)
            if num_own > most:
                self._clients.add(client, -num_prompts)
                raise ApiError(
                    429,
                    f"{num_own - num_prompts} requests of this client wait or run already, of at most {most}; try again"
                    f" later.",
                    code="too_many_requests",
                    kind="rate_limit_error",
                    headers={"retry-after": str(RETRY_AFTER_S)},
                )
        ticket = Ticket(self._engine, self._clients, client, num_prompts)
        try:
            self._limits.check_queue(self._engine.num_queued - num_prompts, num_prompts)
        except BaseException:
            ticket.close()
            raise
        return ticket

    def take_tokens(self, ticket: Ticket, num_tokens: int) -> None:
        """Takes room for the tokens of a ticket's prompts. Raises OverloadedError."""
        ticket.take_tokens(num_tokens)
        self._limits.check_queued_tokens(self._engine.num_queued_tokens - num_tokens, num_tokens)


def client_of(request: Request, keys: Sequence[str]) -> bytes:
    """What a client is told by: the key that it sends where there are keys, else its address or IPv6 network."""
    if keys:
        return key_of(request.scope)
    return _owner_of("" if request.client is None else request.client.host)


@lru_cache(4096)
def _owner_of(host: str) -> bytes:
    """What clients at an address are counted as."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host.encode()
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return (int(address) >> (128 - _NETWORK_BITS)).to_bytes(16)
    return host.encode()
