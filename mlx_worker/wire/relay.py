"""A reply that comes over the link → the same reply, checked and written again.

Owns what a chunk of a stream and a full reply may hold. Nothing is passed through: what is not
known here is dropped, and who answers, under which id and model, is the gateway's own word. What
an honest worker writes with reply.py is all kept. Leaves frames to link.py. Pure; any thread.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import Field, FiniteFloat, StringConstraints, ValidationError

from mlx_worker.wire.account import WorkerIdentity
from mlx_worker.wire.link import (
    MOST_FIGURE,
    Count,
    DoneFrame,
    ErrorFrame,
    Name,
    Part,
    TimingPart,
    Words,
    fault,
)
from mlx_worker.wire.reply import CHAT, COMPLETION, Shape
from mlx_worker.wire.tally import BrokenReply, Tally

Json = dict[str, Any]
Endpoint = Literal["chat", "completion"]
Byte: TypeAlias = Annotated[int, Field(ge=0, le=255)]
Code: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

SHAPES: dict[Endpoint, Shape] = {"chat": CHAT, "completion": COMPLETION}
STATUSES = frozenset({400, 404, 409, 413, 422, 500, 502, 503, 504})  # that a worker may answer with
BAD_GATEWAY = 502
WORKER_FAULT = "worker_fault"  # the code of a reply that was none
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OPENING_KEYS = {"role", "content"}


# --- what a reply may hold ----------------------------------------------------------------------


class TokenPart(Part):
    token: str
    logprob: FiniteFloat
    bytes: list[Byte] | None = None


class ScoredPart(TokenPart):
    top_logprobs: list[TokenPart] = Field(default_factory=list[TokenPart])


class ChatLogprobs(Part):
    content: list[ScoredPart] | None = None


class CompletionLogprobs(Part):
    """Parallel lists."""

    tokens: list[str]
    token_logprobs: list[FiniteFloat | None]
    top_logprobs: list[dict[str, FiniteFloat] | None] | None = None
    text_offset: list[Count]


class FunctionPart(Part):
    name: str
    arguments: str


class CallPart(Part):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionPart


class FunctionDelta(Part):
    name: str | None = None
    arguments: str | None = None


class CallDelta(Part):
    index: Count
    id: Name | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Said(Part):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Message(Said):
    tool_calls: list[CallPart] | None = None


class Delta(Said):
    tool_calls: list[CallDelta] | None = None


class ChoicePart(Part):
    """is_opening: it says that the choice begins."""

    index: Count
    finish_reason: FinishReason | None = None

    @property
    def is_opening(self) -> bool:
        return False


class ChatChoice(ChoicePart):
    message: Message
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(ChoicePart):
    delta: Delta
    logprobs: ChatLogprobs | None = None

    @property
    def is_opening(self) -> bool:
        return self.delta.role is not None


class CompletionChoice(ChoicePart):
    text: str
    logprobs: CompletionLogprobs | None = None


class PromptDetails(Part):
    cached_tokens: Count = 0


class CompletionDetails(Part):
    reasoning_tokens: Count = 0


class UsageFigures(Part):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return details.reasoning_tokens if details else 0


class NoticePart(Part):
    code: Code
    message: Words


class Block(Part):
    """The pendra block, without what the gateway says itself."""

    timing: TimingPart
    notice: NoticePart | None = None


C = TypeVar("C", bound=ChoicePart)


class Object(Part, Generic[C]):
    """A full reply or a chunk. usage null: another chunk has it."""

    choices: list[C]
    usage: UsageFigures | None = None
    pendra: Block | None = None


ChatObject: TypeAlias = Object[ChatChoice]
ChatChunk: TypeAlias = Object[ChatChunkChoice]
CompletionObject: TypeAlias = Object[CompletionChoice]
Written: TypeAlias = ChatObject | ChatChunk | CompletionObject

# --- checked and written again ------------------------------------------------------------------


@dataclass(frozen=True)
class Stamp:
    """What the gateway says of a reply, whatever the worker wrote.

    n        choices that were asked for
    created  Unix time in seconds
    wait_ms  that the request waited here before the worker had it
    """

    endpoint: Endpoint
    request_id: str
    model: str
    worker: WorkerIdentity
    n: int
    created: int
    wait_ms: float = 0.0


class Relay:
    """The objects of one reply, one after the other."""

    full: ClassVar[dict[Endpoint, type[Written]]] = {
        "chat": ChatObject,
        "completion": CompletionObject,
    }
    chunk: ClassVar[dict[Endpoint, type[Written]]] = {
        "chat": ChatChunk,
        "completion": CompletionObject,
    }

    def __init__(self, stamp: Stamp, *, is_streamed: bool) -> None:
        shape = SHAPES[stamp.endpoint]
        self._stamp = stamp
        self._is_streamed = is_streamed
        self._tally = Tally(stamp.n)
        self._kind = (self.chunk if is_streamed else self.full)[stamp.endpoint]
        self._head: Json = {
            "id": f"{shape.id_prefix}{stamp.request_id}",
            "object": shape.chunk_object if is_streamed else shape.full_object,
            "created": stamp.created,
            "model": stamp.model,
        }

    def checked(self, data: Sequence[Json]) -> list[Json]:
        """The objects of a frame as the client gets them. Raises BrokenReply."""
        return [self._checked(item) for item in data]

    def end(self, done: DoneFrame) -> None:
        """Raises BrokenReply: what came is no whole reply, or another one than it says."""
        self._tally.end(done)

    def _checked(self, item: Json) -> Json:
        try:
            found = self._kind.model_validate(item)
        except ValidationError as invalid:
            raise BrokenReply(fault(invalid).replace("frame", "reply", 1)) from None
        self._check_choices(found)
        self._tally.take(found.choices, found.usage, found.pendra and found.pendra.timing)
        values = found.model_dump(exclude_unset=True)
        block = values.pop("pendra", None)
        written = self._head | values
        return written if block is None else written | {"pendra": self._block(block)}

    def _check_choices(self, found: Written) -> None:
        n = self._stamp.n
        for choice in found.choices:
            if choice.index >= n:
                raise BrokenReply(f"no reply: choice {choice.index}, of {n} that were asked for")
        if not self._is_streamed:
            if [choice.index for choice in found.choices] != list(range(n)):
                raise BrokenReply(f"no reply: it has not the {n} choices that were asked for")
            if found.usage is None or found.pendra is None:
                raise BrokenReply("no reply: it says nothing of its usage or its timing")
        if found.usage and found.usage.total_tokens != sum_of(found.usage):
            raise BrokenReply("no reply: its usage doesn't add up")

    def _block(self, block: Json) -> Json:
        timing = waited(block["timing"], self._stamp.wait_ms)
        who = {"request_id": self._stamp.request_id, "worker": asdict(self._stamp.worker)}
        notice = block.get("notice")
        return who | {"timing": timing} | ({} if notice is None else {"notice": notice})


def sum_of(usage: UsageFigures) -> int:
    return usage.prompt_tokens + usage.completion_tokens


def waited(timing: Json, wait_ms: float) -> Json:
    """A worker's timing with the wait before it; without a rate where nothing was drafted."""
    worker_wait_ms = timing.get("worker_queue_wait_ms", 0.0)
    found = timing | {
        "ttft_ms": round(wait_ms + timing["ttft_ms"], 3),
        "queue_wait_ms": round(wait_ms + worker_wait_ms, 3),
        "worker_queue_wait_ms": worker_wait_ms,
    }
    if found.get("draft_acceptance_rate") is None:
        found.pop("draft_acceptance_rate", None)
    return found


def is_opening(chunk: Json) -> bool:
    """Whether a chunk only begins choices: nothing of the reply itself is in it yet."""
    choices = chunk["choices"]
    return bool(choices) and all(
        choice.get("finish_reason") is None
        and choice.get("logprobs") is None
        and "delta" in choice
        and choice["delta"].keys() <= _OPENING_KEYS
        and not choice["delta"].get("content")
        for choice in choices
    )


def server_timing(done: DoneFrame, wait_ms: float) -> str:
    """The value of the Server-Timing header: spans that add up, in milliseconds."""
    timing, n_later = done.timing, max(0, done.usage.completion_tokens - 1)
    rate = timing.tokens_per_second
    spans = {
        "gateway": wait_ms,
        "queue": max(0.0, timing.worker_queue_wait_ms - timing.model_load_ms),
        "load": timing.model_load_ms,
        "prefill": max(0.0, timing.ttft_ms - timing.worker_queue_wait_ms),
        "decode": min(1000 * n_later / rate, MOST_FIGURE) if rate else 0.0,
    }
    return ", ".join(f"{name};dur={ms:.1f}" for name, ms in spans.items())


def error_of(frame: ErrorFrame) -> tuple[int, str, str]:
    """Status, code and message of a worker's error, each of a form that a client may be shown."""
    status = frame.status if frame.status in STATUSES else BAD_GATEWAY
    code = frame.code if _CODE.fullmatch(frame.code) else "worker_error"
    return status, code, shown_words(frame.message) or "the worker could not answer"


def shown_words(text: str) -> str:
    """One line of it, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text).strip()
