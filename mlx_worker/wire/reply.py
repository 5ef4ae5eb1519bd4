"""Events of one call → its reply in the OpenAI shape: one object, or the chunks of a stream.

Owns what is in which object. Joined, the chunks of a stream are the full reply. Leaves the figures
to account.py and framing to sse.py; the time of creation is an argument. Pure; any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mlx_worker.records import Done, ReplyEvent, Started, Text
from mlx_worker.wire.account import Account, WorkerIdentity
from mlx_worker.wire.logprobs import Scored, Scorer, chat_logprobs, completion_logprobs
from mlx_worker.wire.openai import Asked

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How the objects of one endpoint look.

    full, delta  a text → what a choice holds of it, in a full reply and in a chunk
    opening      what begins each choice of a stream; None: nothing does
    """

    id_prefix: str
    full_object: str
    chunk_object: str
    full: Callable[[str], Json]
    delta: Callable[[str], Json]
    logprobs: Callable[[Sequence[Scored]], Json]
    opening: Json | None = None


CHAT = Shape(
    id_prefix="chatcmpl-",
    full_object="chat.completion",
    chunk_object="chat.completion.chunk",
    full=lambda text: {"message": {"role": "assistant", "content": text}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=chat_logprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
)
COMPLETION = Shape(
    id_prefix="cmpl-",
    full_object="text_completion",
    chunk_object="text_completion",
    full=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    logprobs=completion_logprobs,
)


class Choice:
    """What one choice has written that nobody has taken yet."""

    def __init__(self, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self._text: list[str] = []
        self._scored: list[Scored] = []
        self._scorer = Scorer()

    def add(self, event: ReplyEvent, text: Text) -> None:
        self._text.append(text.text)
        if self._has_logprobs:
            self._scored += self._scorer.read(text.logprobs or (), event.tokens)

    def take(self) -> tuple[str, list[Scored]]:
        taken = "".join(self._text), self._scored
        self._text, self._scored = [], []
        return taken


class Writer:
    """What a full reply and a stream have in common.

    asked    the parsed body
    created  Unix time in seconds
    """

    shape: ClassVar[Shape]

    def __init__(self, asked: Asked, created: int, worker: WorkerIdentity) -> None:
        self._asked = asked
        self._created = created
        self._account = Account(asked.call.id, worker, asked.call.n)
        self._choices = [Choice(asked.has_logprobs) for _ in range(asked.call.n)]

    @property
    def is_closed(self) -> bool:
        """Every choice has ended."""
        return self._account.is_closed

    def _add(self, event: Started | ReplyEvent) -> None:
        self._account.add(event)
        if isinstance(event, ReplyEvent) and isinstance(event.event, Text):
            self._choices[event.choice].add(event, event.event)

    def _choice(
        self,
        index: int,
        content: Json,
        scored: Sequence[Scored] | None = None,
        done: Done | None = None,
    ) -> Json:
        logprobs = None
        if scored is not None and self._asked.has_logprobs:
            logprobs = self.shape.logprobs(scored)
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": done.finish_reason if done else None,
        }

    def _object(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": f"{self.shape.id_prefix}{self._asked.call.id}",
            "object": name,
            "created": self._created,
            "model": self._account.model,
            "choices": choices,
        }

    def _figures(self) -> Json:
        return {"usage": self._account.usage(), "pendra": self._account.pendra()}


class FullReply(Writer):
    """One object for the whole call.

    Next: feed it every event of Engine.submit, then take finish() and server_timing().
    """

    def feed(self, event: Started | ReplyEvent) -> None:
        self._add(event)

    @property
    def is_large(self) -> bool:
        """Whether writing it takes long enough to do that beside the event loop."""
        return self._asked.has_logprobs

    def finish(self) -> Json:
        """The reply; once, after the last choice's Done."""
        assert self.is_closed, "a choice has no Done"
        choices = [self._full(index) for index in range(self._asked.call.n)]
        return self._object(self.shape.full_object, choices) | self._figures()

    def server_timing(self) -> str:
        """The value of the Server-Timing header."""
        return self._account.server_timing()

    def _full(self, index: int) -> Json:
        text, scored = self._choices[index].take()
        return self._choice(index, self.shape.full(text), scored, self._account.ends[index])


class ReplyStream(Writer):
    """The chunks of one call.

    Next: feed it every event of Engine.submit and send what each gives, then sse.DONE. An error
    on the way is sent as one more event, failure.error_body, before sse.DONE.
    """

    def feed(self, event: Started | ReplyEvent) -> list[Json]:
        """The chunks that this event completes; often none."""
        self._add(event)
        if isinstance(event, Started):
            return self._openings()
        match event.event:
            case Text(text=text) if text:
                return [self._piece(event.choice)]
            case Done() as done:
                return self._ending(event.choice, done)
            case _:  # ids whose text lags: their logprobs wait for the next chunk
                return []

    def _openings(self) -> list[Json]:
        if self.shape.opening is None:
            return []
        choices = range(self._asked.call.n)
        return [self._chunk([self._choice(index, self.shape.opening)]) for index in choices]

    def _piece(self, index: int, done: Done | None = None) -> Json:
        text, scored = self._choices[index].take()
        return self._chunk([self._choice(index, self.shape.delta(text), scored or None, done)])

    def _ending(self, index: int, done: Done) -> list[Json]:
        """The choice's last chunk, and with the last choice what the call took."""
        chunk = self._piece(index, done)
        if not self.is_closed:
            return [chunk]
        if self._asked.include_usage:
            return [chunk, self._chunk([]) | self._figures()]
        return [chunk | self._figures()]

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._object(self.shape.chunk_object, choices)
        return chunk | {"usage": None} if self._asked.include_usage else chunk


class ChatReply(FullReply):
    shape = CHAT


class ChatStream(ReplyStream):
    shape = CHAT


class CompletionReply(FullReply):
    shape = COMPLETION


class CompletionStream(ReplyStream):
    shape = COMPLETION
