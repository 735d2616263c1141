"""The sequences of one request: a prompt and its continuations.

    member 0   prompt computed ----+--> tokens ...        one prefill, by member 0; until it ends the others have
    member 1                       +--> tokens ...        their slots kept for them, and nothing else
    member 2                       +--> tokens ...
                                   fork: all blocks shared, each member samples its own first token

A group is admitted at once, with a slot for each member, and preempted at once. What was computed before the fork is
shared, so a group preempted before it goes back as one; afterwards each member keeps its own tokens.
"""

from collections.abc import Iterator

from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.sequences.seeds import sample_seed


class SequenceGroup:
    """The members of a request, by index; a request for one sequence is a group of one.

    Args:
        request: member 0. Its arrival number, seed and greatest length are set.

    Attributes:
        members: as many as the request generates sequences.
        forked: whether the members have started on their own.
    """

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.members = [request]
        for index in range(1, request.num_sequences):
            sibling = request.sibling(index)
            sibling.seed = sample_seed(request.seed, index)
            self.members.append(sibling)
        self.forked = len(self.members) == 1
        for member in self.members:
            member.group = self

    @property
    def leader(self) -> Request:
        """Member 0, which computes the prompt."""
        return self.members[0]

    @property
    def finished(self) -> bool:
        return all(member.finished for member in self.members)

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
