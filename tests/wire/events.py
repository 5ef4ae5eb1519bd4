"""What an engine would say to a call: events written by hand, and random ones."""

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from mlx_worker.records import (
    Call,
    Done,
    FinishReason,
    Notice,
    Progress,
    ReplyEvent,
    Started,
    Text,
    Timing,
    TokenLogprob,
    Usage,
)
from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.openai import Asked
from mlx_worker.wire.parts import CallArguments, CallOpened, Content, Part, Reasoning

BYTES = {0: b"a", 1: b" one", 2: b"\xe2", 3: b"\x82", 4: b"\xac", 5: "é".encode(), 6: b"<eos>"}
CREATED = 1_800_000_000
WORKER = WorkerIdentity("w1", "Mac of Olga", "0.1.0")
STARTED = Started("demo", prompt_tokens=7, queue_wait_ms=2.5)


def asked(n: int = 1, logprobs: int | None = None, **fields: Any) -> Asked:
    sampling = {} if logprobs is None else {"logprobs": logprobs}
    return Asked(Call("r1", prompt="hi", n=n, sampling=sampling), **fields)


def timing(completion_tokens: int = 1, **fields: Any) -> Timing:
    values = {"latency_ms": 0.0, "ttft_ms": 20.0, "decode_ms": 0.0, "rounds": 0}
    counts = {"round_tokens": 0, "target_passes": 0, "drafted": 0, "accepted": 0}
    return Timing(**{**values, **counts, "completion_tokens": completion_tokens, **fields})


def text(
    piece: str,
    *ids: int,
    choice: int = 0,
    rivals: Iterable[int] = (),
    marks: Iterable[int] | None = None,
    is_content: bool = True,
) -> ReplyEvent:
    """Ids with their logprobs: id i has −i/4. marks None: every control character is one."""
    top = tuple((id, -id / 4) for id in rivals)
    logprobs = tuple(TokenLogprob(id, -id / 4, top, is_content) for id in ids)
    places = control_places(piece) if marks is None else tuple(marks)
    return ReplyEvent(choice, Text(ids, piece, logprobs, places), BYTES)


def done(
    completion_tokens: int = 1,
    *,
    choice: int = 0,
    reason: FinishReason = "stop",
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    notice: Notice | None = None,
    **times: Any,
) -> ReplyEvent:
    usage = Usage(7, completion_tokens, cached_tokens, reasoning_tokens)
    return ReplyEvent(choice, Done(reason, usage, timing(completion_tokens, **times), notice))


CONTROL = "⟨⟩‹›"  # open and close thinking, open and close a call


def control_places(piece: str) -> tuple[int, ...]:
    return tuple(i for i, character in enumerate(piece) if character in CONTROL)


class Marked:
    """A parser of one-character markers: ⟨thinking⟩content‹name(arguments›."""

    def __init__(self) -> None:
        self._inside = ""
        self._name = ""
        self._n_calls = 0

    def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]:
        places = control_places(text) if marks is None else marks
        return [
            part
            for i, character in enumerate(text)
            for part in (self._turned(character) if i in places else self._read(character))
        ]

    def finish(self, is_cut: bool = True) -> list[Part]:
        """A call that was not named yet is only text."""
        return [Content(self._name)] if self._inside == "‹" else []

    def _turned(self, marker: str) -> list[Part]:
        held = self.finish()
        self._inside, self._name = marker if marker in "⟨‹" else "", ""
        return held

    def _read(self, character: str) -> list[Part]:
        if self._inside == "‹" and character == "(":
            self._inside = "("
            self._n_calls += 1
            return [CallOpened(self._n_calls - 1, self._name)]
        if self._inside == "‹":
            self._name += character
            return []
        if self._inside == "(":
            return [CallArguments(self._n_calls - 1, character)]
        return [Reasoning(character) if self._inside else Content(character)]


MARKED = ["⟨hm", "⟩", "‹add(", '{"a":', "1}›", "b⟨c⟩d‹e(f", "‹", "⟩‹mul(2›a"]
PIECES = st.sampled_from(["", "", "a", " one", "é€", "\n\n", "data: [DONE]", '"\\', *MARKED])
IDS = st.lists(st.sampled_from(sorted(BYTES)), min_size=1, max_size=4)


@st.composite
def choice_events(draw: st.DrawFn, choice: int) -> list[ReplyEvent]:
    """One choice from its prompt's progress to its Done."""
    rivals = draw(st.sets(st.sampled_from(sorted(BYTES)), max_size=3))
    pieces = draw(st.lists(st.tuples(PIECES, IDS), max_size=6))
    texts = [
        text(piece, *ids, choice=choice, rivals=rivals, is_content=draw(st.booleans()))
        for piece, ids in pieces
    ]
    end = done(
        sum(len(ids) for _, ids in pieces),
        choice=choice,
        reason=draw(st.sampled_from(["stop", "length"])),
        cached_tokens=draw(st.integers(0, 7)),
        reasoning_tokens=draw(st.integers(0, 7)),
        notice=draw(st.none() | st.just(("truncated_during_reasoning", "cut off"))),
        ttft_ms=draw(st.floats(0, 1e4)),
        decode_ms=draw(st.floats(0, 1e4)),
        drafted=draw(st.integers(0, 9)),
    )
    return [ReplyEvent(choice, Progress(7, 7)), *texts, end]


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, list[Started | ReplyEvent]]:
    """A number of choices, and everything an engine says to them, mixed in any order."""
    n = draw(st.integers(1, 3))
    waiting = [draw(choice_events(choice)) for choice in range(n)]
    notice = draw(st.none() | st.just(("speculation_unavailable", "it is off")))
    events: list[Started | ReplyEvent] = [Started("demo", 7, 1.5, 0.5, notice)]
    while waiting:
        chosen = draw(st.sampled_from(waiting))
        events.append(chosen.pop(0))
        waiting = [rest for rest in waiting if rest]
    return n, events
