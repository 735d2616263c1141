"""The sequences of one request: a prompt and its continuations.

    member 0   prompt computed ----+--> tokens ...        one prefill, by member 0; until it ends the others have
    member 1                       +--> tokens ...        their slots kept for them, and nothing else
    member 2                       +--> tokens ...
                                   fork: all blocks shared, each member samples its own first token

A group is admitted at once, with a slot for each member, and preempted at once. What was computed before the fork is
shared, so a group preempted before it goes back as one; afterwards each member keeps its own tokens.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeVar

from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.sequences.seeds import sample_seed

Group = TypeVar("Group", bound="SequenceGroup")


class SequenceGroup:
    """The members of a request, by index; a request for one sequence is a group of one. `form` makes one.

    A kind of group says by these attributes what the scheduler must know of it:

        runs_together: no member can go on unless all of them run. They are admitted, preempted and resumed as one, and
            the pool must hold them all at once.
        forks_itself: its members take their slots on the device when the group says so, after the prompt, and not in
            the step that ends the prompt.
        device_tests_stop_tokens: a stop token ends a member on the device, which then tells the host.

    Attributes:
        members: as many as the request generates sequences.
        forked: whether the members have started on their own.
    """

    runs_together: ClassVar[bool] = False
    forks_itself: ClassVar[bool] = False
    device_tests_stop_tokens: ClassVar[bool] = True

    def __init__(self, members: list[Request]) -> None:
        self.request_id = members[0].request_id
        self.members = members
        self.forked = len(members) == 1

    @classmethod
    def form(cls: type[Group], request: Request) -> Group:
        """Makes a request's further sequences, and the group of them all, which each of them joins.

        request: becomes member 0. Its arrival number, seed and greatest length are set.
        """
        members = [request]
        for index in range(1, request.num_sequences):
            sibling = request.sibling(index)
            sibling.seed = sample_seed(request.seed, index)
            members.append(sibling)
        group = cls(members)
        for member in members:
            member.join(group)
        return group

    @property
    def leader(self) -> Request:
        """Member 0, which computes the prompt."""
        return self.members[0]

    @property
    def finished(self) -> bool:
        for member in self.members:  # noqa: SIM110  # asked for each token: `all` and a generator take twice as long
            if member.status != RequestStatus.FINISHED:
                return False
        return True

    @property
    def num_together(self) -> int:
        """How many members must have room in the pool at once for any of them to finish."""
        return len(self.members) if self.runs_together else 1

    @property
    def siblings_to_fork(self) -> list[Request]:
        """The members that are still to be forked from the leader."""
        return [] if self.forked else self.members[1:]

    @property
    def can_be_stored(self) -> bool:
        """Whether the members' blocks hold all that is counted as computed, and each has a token left to compute, when
        nothing is in flight: then they can go on from copies of their blocks.
        """
        return True

    def restart(self) -> None:
        """Forgets all that the members have generated, so that the group starts from its prompt again. Only for a group
        that runs together, of which nothing has been reported.
        """
        self.forked = len(self.members) == 1
        for member in self.members:
            member.output_token_ids = []
            member.block_digests = []
            member.num_registered_blocks = 0

    def resume(self, generated: Sequence[Sequence[int] | None]) -> None:
        """Lets a group that has not begun go on where it stood in another engine, as after a preemption that keeps its
        tokens only. Not for a group that runs together.

        generated: by member, the tokens that it has generated; None for one that has ended.
        """
        self.forked = True
        for member, token_ids in zip(self.members, generated, strict=True):
            member.status = RequestStatus.FINISHED if token_ids is None else RequestStatus.PREEMPTED
            member.output_token_ids = list(token_ids or ())

    def running(self) -> list[Request]:
        """The members that have slots."""
        return [member for member in self.members if member.status == RequestStatus.RUNNING]

    def waiting(self) -> Iterator[Request]:
        """The members that stand in the queue; before the fork the leader stands there for all, and of those that are
        swapped out together the first.
        """
        for member in self.members if self.forked else self.members[:1]:
            stands_for_itself = member.swap is None or member.swap.members[0] is member
            if member.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and stands_for_itself:
                yield member
