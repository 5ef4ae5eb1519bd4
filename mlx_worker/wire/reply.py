"""Events of one call → its reply in the OpenAI shape: one object, or the chunks of a stream.

Owns what is in which object. Joined, the chunks of a stream are the full reply. Leaves what a
message says to said.py, the figures to account.py and framing to sse.py; the time of creation is an
argument. Pure; any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mlx_worker.records import (
    Done,
    ReplyEvent,
    Started,
    Text,
    TextProtocol,
    TokenLogprob,
    Tools,
)
from mlx_worker.wire.account import Account, WorkerIdentity
from mlx_worker.wire.logprobs import Scored, Scorer, chat_logprobs, completion_logprobs
from mlx_worker.wire.openai import Asked
from mlx_worker.wire.parser import reply_parser
from mlx_worker.wire.parts import CallOpened, Part, ReplyParser
from mlx_worker.wire.raw import Raw
from mlx_worker.wire.said import Naming, Said, call_id, deltas, is_empty, message

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How the objects of one endpoint look.

    full      all of a choice → what a full reply holds of it
    deltas    the next of a choice → what each of its chunks does; at least one
    opening   what begins each choice of a stream; None: nothing does
    parser    tells content from thinking and calls; None: all text is content, and so are all ids
    """

    id_prefix: str
    full_object: str
    chunk_object: str
    full: Callable[[Sequence[Part], Naming], Json]
    deltas: Callable[[Sequence[Part], Naming], list[Json]]
    logprobs: Callable[[Sequence[Scored]], Json]
    opening: Json | None = None
    parser: Callable[[TextProtocol, str, Tools | None], ReplyParser] | None = None


CHAT = Shape(
    id_prefix="chatcmpl-",
    full_object="chat.completion",
    chunk_object="chat.completion.chunk",
    full=lambda parts, naming: {"message": message(parts, naming)},
    deltas=lambda parts, naming: [{"delta": delta} for delta in deltas(parts, naming)],
    logprobs=chat_logprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
    parser=reply_parser,
)
COMPLETION = Shape(
    id_prefix="cmpl-",
    full_object="text_completion",
    chunk_object="text_completion",
    full=lambda parts, _: {"text": Said(parts).content},
    deltas=lambda parts, _: [{"text": Said(parts).content}],
    logprobs=completion_logprobs,
)


class Choice:
    """What one choice has written that nobody has taken yet.

    parser        of its text; None: it is not parsed
    are_ids       its control tokens are ids of their own, so a text's marks are all of them
    has_logprobs  they are wanted
    has_calls     it has called a tool
    """

    def __init__(self, parser: ReplyParser | None, are_ids: bool, has_logprobs: bool) -> None:
        self.has_calls = False
        self._parser = parser or Raw()
        self._is_parsed = parser is not None
        self._are_ids = are_ids
        self._has_logprobs = has_logprobs
        self._parts: list[Part] = []
        self._scored: list[Scored] = []
        self._scorer = Scorer()

    @property
    def is_seen(self) -> bool:
        """Whether a client would see anything of what was not taken."""
        return bool(self._parts)

    def add(self, event: ReplyEvent) -> None:
        match event.event:
            case Text() as text:
                self._say(self._parser.push(text.text, text.marks if self._are_ids else None))
                self._score(text.logprobs or (), event.tokens)
            case Done() as done:
                self._say(self._parser.finish(done.finish_reason == "length"))
            case _:
                pass

    def take(self) -> tuple[list[Part], list[Scored]]:
        taken = self._parts, self._scored
        self._parts, self._scored = [], []
        return taken

    def _say(self, parts: Sequence[Part]) -> None:
        self._parts += [part for part in parts if not is_empty(part)]
        self.has_calls |= any(isinstance(part, CallOpened) for part in parts)

    def _score(self, logprobs: Sequence[TokenLogprob], tokens: Mapping[int, bytes]) -> None:
        if self._has_logprobs:
            wanted = [one for one in logprobs if one.is_content or not self._is_parsed]
            self._scored += self._scorer.read(wanted, tokens)


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
        self._choices: list[Choice] = []

    @property
    def is_closed(self) -> bool:
        """Every choice has ended."""
        return self._account.is_closed

    def _add(self, event: Started | ReplyEvent) -> None:
        self._account.add(event)
        if isinstance(event, Started):
            self._choices = [self._opened(event) for _ in range(self._asked.call.n)]
        else:
            self._choices[event.choice].add(event)

    def _opened(self, started: Started) -> Choice:
        make, tools = self.shape.parser, self._asked.call.tools
        parser = make(started.protocol, started.opening, tools) if make else None
        return Choice(parser, started.protocol.are_ids, self._asked.has_logprobs)

    def _naming(self, index: int) -> Naming:
        # A client may give every turn of a conversation one X-Request-Id.
        return partial(call_id, f"{self._asked.call.id}/{self._created}", index)

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
            "finish_reason": self._reason(index, done) if done else None,
        }

    def _reason(self, index: int, done: Done) -> str:
        """A reply that called and came to its end has ended for its calls."""
        has_calls = self._choices[index].has_calls
        return "tool_calls" if has_calls and done.finish_reason == "stop" else done.finish_reason

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
        parts, scored = self._choices[index].take()
        content = self.shape.full(parts, self._naming(index))
        return self._choice(index, content, scored, self._account.ends[index])


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
        if isinstance(event.event, Done):
            return self._ending(event.choice, event.event)
        # Ids whose text lags, or is a marker: their logprobs wait for the next chunk.
        return self._pieces(event.choice) if self._choices[event.choice].is_seen else []

    def _openings(self) -> list[Json]:
        if self.shape.opening is None:
            return []
        choices = range(self._asked.call.n)
        return [self._chunk([self._choice(index, self.shape.opening)]) for index in choices]

    def _pieces(self, index: int, done: Done | None = None) -> list[Json]:
        """A chunk for each delta: the first has the logprobs, the last the finish."""
        parts, scored = self._choices[index].take()
        found = self.shape.deltas(parts, self._naming(index))
        last = len(found) - 1
        choices = [
            self._choice(
                index, delta, (scored or None) if i == 0 else None, done if i == last else None
            )
            for i, delta in enumerate(found)
        ]
        return [self._chunk([choice]) for choice in choices]

    def _ending(self, index: int, done: Done) -> list[Json]:
        """The choice's last chunks, and with the last choice what the call took."""
        *chunks, last = self._pieces(index, done)
        if not self.is_closed:
            return [*chunks, last]
        if self._asked.include_usage:
            return [*chunks, last, self._chunk([]) | self._figures()]
        return [*chunks, last | self._figures()]

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
