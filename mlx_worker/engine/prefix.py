"""Prefix cache: what earlier requests left in their caches, for the requests that begin alike.

Owns the conversations that are kept, how much of one a new prompt may go on from, and the byte
budget. Leaves keys and values to cache.py, and when to keep and to mark to session.py. Engine
thread only.

A prompt goes on from the longest prefix that it shares with a kept conversation, its last id left
out: the pass over that one chooses the first new id. Layers that see everything can be cut back to
any length. A sliding layer has forgotten what left its window, so past the window a conversation
can be gone on from near its end, and near its *marks*: copies of the sliding layers as they were
when a prompt ended. Most templates write the last reply again without its thinking, so the next
prompt usually leaves the conversation there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_worker.engine.cache import Held, Timelines

TARGET, DRAFT = "target", "draft"
Scope = tuple[str, str]  # whose a conversation is, and which network's
BUDGET_BYTES = 1 << 30
MAX_MARKS = 4  # of one conversation, the latest; a client seldom goes back further than that
LEAST_SHARED_TOKENS = 16  # fewer are prefilled sooner than a copy is made


@dataclass(frozen=True)
class Mark:
    """The layers that can't be cut back as they were after n_tokens; None for the others."""

    n_tokens: int
    layers: Sequence[Held | None]

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.layers if held)

    def reaches(self, n_tokens: int) -> bool:
        """Whether the conversation can be gone on from after its first n_tokens."""
        n_back = self.n_tokens - n_tokens
        return n_back >= 0 and all(held.can_rewind(n_back) for held in self.layers if held)


@dataclass
class Conversation:
    """Caches that belong to one scope; another's are never looked at.

    timelines  `committed` is the ids that they hold
    marks      oldest first
    """

    scope: Scope
    timelines: Timelines
    marks: list[Mark] = field(default_factory=list[Mark])

    @property
    def nbytes(self) -> int:
        return self.timelines.nbytes + sum(mark.nbytes for mark in self.marks)

    def mark(self) -> None:
        """Remember this length as one to go on from; the caches hold the committed ids only."""
        if self.timelines.unrewindable:
            return
        mark = Mark(len(self.timelines.committed), self.timelines.held_windows())
        self.marks = [*self.marks, mark][-MAX_MARKS:]

    def holds(self, other: "Conversation") -> bool:
        """Whether this one begins with all of another, which is of no use then."""
        ids, theirs = self.timelines.committed, other.timelines.committed
        return self.scope == other.scope and ids[: len(theirs)] == theirs

    def n_reusable(self, n_shared: int) -> int:
        """How many of its first n_shared ids a prompt that shares them may go on from."""
        if self.timelines.can_rewind(len(self.timelines.committed) - n_shared):
            return n_shared
        return max((self._n_from(mark, n_shared) for mark in self.marks), default=0)

    def _n_from(self, mark: Mark, n_shared: int) -> int:
        n_tokens = min(mark.n_tokens, n_shared)
        return n_tokens if mark.reaches(n_tokens) else 0

    def cut(self, n_tokens: int) -> "Conversation":
        """Another one that holds the first n_tokens ids, which must be reusable; this one stays."""
        n_back = len(self.timelines.committed) - n_tokens
        held: Sequence[Held | None] = [None] * len(self.timelines.layers)
        if not self.timelines.can_rewind(n_back):
            held = next(mark.layers for mark in self.marks if mark.reaches(n_tokens))
        marks = [mark for mark in self.marks if mark.n_tokens <= n_tokens]
        return Conversation(self.scope, self.timelines.cut(n_tokens, held), marks)


class PrefixCache:
    """The conversations of one loaded pair, the least recently used first.

    budget_bytes  what all of them may hold; the least recently used ones go beyond it
    n_hits, n_tokens  prompts that went on from one, and their ids that were not prefilled again
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self.n_requests = self.n_hits = self.n_tokens = 0
        self._conversations: list[Conversation] = []

    @property
    def nbytes(self) -> int:
        return sum(conversation.nbytes for conversation in self._conversations)

    def __len__(self) -> int:
        return len(self._conversations)

    def begin(self, scope: Scope, prompt_ids: Sequence[int], empty: Timelines) -> Conversation:
        """A conversation that holds as much of the prompt as was kept, never its last id.

        It is the caller's until it is given back by `keep`. empty: the caches where none was.
        """
        counts = scope[1] == TARGET  # a draft's own caches are a part of the same request
        self.n_requests += counts
        wanted = list(prompt_ids[:-1])
        found, n_tokens = None, LEAST_SHARED_TOKENS - 1
        for conversation in self._conversations:
            if conversation.scope == scope:
                n_shared = _n_shared(conversation.timelines.committed, wanted)
                n = conversation.n_reusable(n_shared)
                if n > n_tokens:
                    found, n_tokens = conversation, n
        if found is None:
            return Conversation(scope, empty)
        self.n_hits += counts
        self.n_tokens += n_tokens * counts
        self._conversations.remove(found)
        if n_tokens == len(found.timelines.committed):
            return found
        self._conversations.append(found)
        return found.cut(n_tokens)

    def keep(self, conversation: Conversation) -> None:
        """Give back what `begin` gave, longer by now; what is over the budget goes.

        One that is over it alone is not kept: it would drive out all the others first.
        """
        timelines = conversation.timelines
        if timelines.unrewindable or not timelines.committed:
            return
        if conversation.nbytes > self.budget_bytes:
            return
        timelines.rest()
        known = [one for one in self._conversations if not conversation.holds(one)]
        self._conversations = [*known, conversation]
        while self.nbytes > self.budget_bytes:
            del self._conversations[0]

    def let_go(self, n_bytes: int) -> None:
        """Forget conversations, the least recently used first, until so much is free, or all."""
        goal = self.nbytes - n_bytes
        while self._conversations and self.nbytes > goal:
            del self._conversations[0]

    def clear(self) -> None:
        self._conversations.clear()


def _n_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix, by halving: lists are compared fast."""
    low, high = 0, min(len(ids), len(others))
    if ids[:high] == others[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if ids[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle
    return low
