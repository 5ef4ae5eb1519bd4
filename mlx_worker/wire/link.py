"""The link between a worker and its gateway: frames, and what one connection knows. No sockets.

Owns every frame's form and limits, the numbers by which a lost or doubled frame is found, and when
a silent peer counts as dead. Leaves dialling to link/, routing to gateway/, and what a chunk of a
reply may hold to relay.py. Pure: the clock is an argument. Any thread.

    worker → gateway   hello, then status · accepted · rejected · chunk · done · error ·
                       settings_ack · draining
    gateway → worker   welcome, then request · cancel · received · settings · platform
    both ways          ping, answered by pong

Each frame is a JSON object with its `type` and `n`, its number on this connection: 0, 1, 2, … A
number that was there before is a frame that came twice, and is dropped; one too high means that
frames were lost, which ends the connection. After the next hello, requests go on where they were.
"""

from collections.abc import Mapping
from dataclasses import asdict
from enum import IntEnum
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from mlx_worker.config import LINK_PATH
from mlx_worker.errors import LinkLost, shown
from mlx_worker.records import MAX_REVISION, Settings, State, Status
from mlx_worker.wire.sse import json_bytes

PROTOCOL = 1
PATH = LINK_PATH
MAX_FRAME = 16 * 1024**2  # bytes, either way
PING_S = 15.0  # between two of our own pings; a proxy may answer the WebSocket's for a dead peer
SILENCE_S = 45.0  # without a frame, after which a peer is dead
HELLO_S = 10.0  # that a peer may take for hello or welcome
GRACE_S = 30.0  # that both sides keep what was begun while the connection is lost
SLOWEST_BYTES_S = 512 * 1024  # over which the longest frame passes before silence counts as death
ALREADY_DONE = "already_done"  # of an error: the worker had the request, and has given it up
MAX_MODELS = 1000
MOST_FIGURE = 1e12  # of anything that is measured: what is computed of it stays finite
MOST_WAIT_MS = 24 * 3600 * 1000  # before a client is to ask again

DECIDES = "speculation.decides"  # measures, and reports a verdict
SETTING = "speculation.setting"  # takes Automatic or Off
KV_PREFIX_CACHE = "settings.kv_prefix_cache"
RUN_TOGETHER = "settings.run_requests_together"


class Close(IntEnum):
    """Why a connection was closed, as the WebSocket says it."""

    GOING_AWAY = 1001
    BAD_FRAME = 4400  # it was none, or came out of turn
    KEY_REFUSED = 4401  # or it belongs to another worker
    DISABLED = 4403
    REPLACED = 4409  # by another connection of this worker
    UPDATE_NEEDED = 4426
    SLOW_DOWN = 4429


class BrokenLink(LinkLost):
    """The peer said what it may not. close: the code to close with; `message` is the reason."""

    def __init__(self, message: str, close: Close = Close.BAD_FRAME):
        super().__init__(message)
        self.close = close


# No control character, nor one that turns the direction of what is shown after it.
VISIBLE = r"^[^\p{Cc}\p{Zl}\p{Zp}\p{Bidi_Control}]+$"
Name: TypeAlias = Annotated[str, StringConstraints(max_length=256, pattern=VISIBLE)]
Words: TypeAlias = Annotated[str, StringConstraints(max_length=4000)]
RequestId: TypeAlias = Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**53)]
Revision: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_REVISION)]  # another one follows it
Figure: TypeAlias = Annotated[FiniteFloat, Field(ge=-MOST_FIGURE, le=MOST_FIGURE)]
Ms: TypeAlias = Annotated[FiniteFloat, Field(ge=0, le=MOST_FIGURE)]
Wait: TypeAlias = Annotated[int, Field(ge=0, le=MOST_WAIT_MS)]
Share: TypeAlias = Annotated[FiniteFloat, Field(ge=0, le=1)]
Seq: TypeAlias = Annotated[int, Field(ge=-1, le=2**53)]


class Part(BaseModel):
    """Of a frame. What a newer peer adds is ignored; numbers aren't texts, nor the other way."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class SettingsPart(Part):
    """records.Settings on the wire."""

    speculative_decoding: Literal["auto", "off"] = "auto"
    kv_prefix_cache: bool = True
    run_requests_together: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(**self.model_dump())


class PlatformPart(Part):
    """records.Platform on the wire."""

    revision: Count = 0
    speculative_decoding: Literal["auto", "off", "unavailable"] = "auto"
    display_name: Name = "Pendra"


class Speculation(Part):
    """records.Status on the wire."""

    state: State
    speedup: Figure | None = None
    low: Figure | None = None
    high: Figure | None = None
    depth: Count | None = None
    acceptance: Share | None = None
    tokens_per_round: Figure | None = None
    cost: Figure | None = None
    spread: Figure | None = None
    requests: Count = 0
    tokens: Count = 0
    loss: Figure = 0.0
    loss_share: Figure = 0.0
    since_s: Figure = 0.0
    why: Words = ""

    @property
    def status(self) -> Status:
        return Status(**self.model_dump())


class ModelReport(Part):
    """A model that a worker serves.

    speculation  what its draft does; None: nothing to say, as of a model that isn't loaded
    """

    id: Name
    is_loaded: bool = False
    context_tokens: Count | None = None
    model_bytes: Count | None = None
    draft: Name | None = None
    draft_bytes: Count | None = None
    draft_problem: Words | None = None
    speculation: Speculation | None = None


class Memory(Part):
    active_bytes: Count = 0
    peak_bytes: Count = 0
    budget_bytes: Count | None = None


class Queue(Part):
    """limit: requests that may wait; running and waiting are of all doors."""

    running: Count = 0
    waiting: Count = 0
    limit: Count = 0
    slots: Count = 1


class UsagePart(Part):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0


class TimingPart(Part):
    """As in a reply's pendra block; draft_acceptance_rate None: nothing was drafted."""

    ttft_ms: Ms
    tokens_per_second: Ms | None = None
    queue_wait_ms: Ms = 0.0
    worker_queue_wait_ms: Ms = 0.0
    model_load_ms: Ms = 0.0
    cold_start: bool = False
    draft_acceptance_rate: Share | None = None


class Held(Part):
    """A request that the worker still has. seq: of its last frame so far; −1: none yet."""

    id: RequestId
    seq: Seq = -1


# --- from either side -------------------------------------------------------------------------


class Ping(Part):
    type: Literal["ping"] = "ping"


class Pong(Part):
    type: Literal["pong"] = "pong"


# --- from the worker --------------------------------------------------------------------------


class Hello(Part):
    """The first frame. epoch: of this start of the worker; another one has none of its requests."""

    type: Literal["hello"] = "hello"
    worker_id: Name
    epoch: Name
    version: Name
    protocol: Count = PROTOCOL
    capabilities: Annotated[tuple[Name, ...], Field(max_length=100)] = ()
    models: Annotated[tuple[ModelReport, ...], Field(max_length=MAX_MODELS)] = ()
    settings: SettingsPart | None = None
    settings_revision: Revision = 0
    settings_problem: Words | None = None
    resume: Annotated[tuple[Held, ...], Field(max_length=10_000)] = ()


class StatusReport(Part):
    """On change and every heartbeat; the latest holds."""

    type: Literal["status"] = "status"
    models: Annotated[tuple[ModelReport, ...], Field(max_length=MAX_MODELS)] = ()
    settings: SettingsPart | None = None
    settings_revision: Revision = 0
    settings_problem: Words | None = None
    platform_revision: Count = 0
    memory: Memory = Memory()
    queue: Queue = Queue()
    is_on_battery: bool | None = None
    thermal: Name | None = None  # nominal, fair, serious, critical; older workers: throttled
    is_low_power: bool | None = None


class Accepted(Part):
    """The engine has taken the request up. Whatever was wrong with it was said before."""

    type: Literal["accepted"] = "accepted"
    id: RequestId


class Rejected(Part):
    """No room, or the worker goes: nothing was begun, another may do it."""

    type: Literal["rejected"] = "rejected"
    id: RequestId
    code: Name
    message: Words = ""
    retry_after_ms: Wait = 0


class Chunk(Part):
    """The next of a reply: chunks of a stream, or the one object of a full reply (relay.py)."""

    type: Literal["chunk"] = "chunk"
    id: RequestId
    seq: Seq
    data: Annotated[list[dict[str, Any]], Field(max_length=10_000)]


class DoneFrame(Part):
    type: Literal["done"] = "done"
    id: RequestId
    seq: Seq
    finish_reason: Literal["stop", "length", "tool_calls"]
    usage: UsagePart
    timing: TimingPart


class ErrorFrame(Part):
    """The request ended without its reply. status, param: as the worker's own API has them."""

    type: Literal["error"] = "error"
    id: RequestId
    seq: Seq
    code: Name
    message: Words
    retryable: bool = False
    status: Annotated[int, Field(ge=400, le=599)] = 500
    param: Annotated[str, StringConstraints(max_length=256)] | None = None
    retry_after_ms: Wait = 0


class SettingsAck(Part):
    """problem: why they could not be kept; settings are those in force either way."""

    type: Literal["settings_ack"] = "settings_ack"
    revision: Count
    settings: SettingsPart
    problem: Words | None = None


class Draining(Part):
    """Takes no more requests, and finishes those that it has."""

    type: Literal["draining"] = "draining"


# --- from the gateway -------------------------------------------------------------------------


class Welcome(Part):
    """Answers hello. resume: for each request that goes on, the last seq that came; −1: none.

    name, organisation  what the worker goes by there, and whose it is
    """

    type: Literal["welcome"] = "welcome"
    heartbeat_s: Annotated[FiniteFloat, Field(gt=0, le=3600)] = PING_S
    max_frame: Count = MAX_FRAME
    name: Name
    organisation: Name = "default"
    platform: PlatformPart = PlatformPart()
    resume: dict[RequestId, Seq] = Field(default_factory=dict[str, int])


class Request(Part):
    """after: send again what came after this seq; a request that is there is never begun anew."""

    type: Literal["request"] = "request"
    id: RequestId
    endpoint: Literal["chat", "completion"]
    body: dict[str, Any]
    deadline_ms: Count | None = None
    cache_scope: Name
    after: Seq = -1


class Cancel(Part):
    type: Literal["cancel"] = "cancel"
    id: RequestId


class Received(Part):
    """All of the request's frames came; the worker may forget it."""

    type: Literal["received"] = "received"
    id: RequestId


class SettingsFrame(Part):
    """Replaces those that are given. A revision that isn't above the worker's own is not obeyed."""

    type: Literal["settings"] = "settings"
    revision: Count
    speculative_decoding: Literal["auto", "off"] | None = None
    kv_prefix_cache: bool | None = None
    run_requests_together: bool | None = None

    @property
    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude={"type", "revision"}, exclude_none=True)


class PlatformFrame(PlatformPart):
    type: Literal["platform"] = "platform"


WorkerFrame: TypeAlias = (
    Hello | StatusReport | Accepted | Rejected | Chunk | DoneFrame | ErrorFrame | SettingsAck
    | Draining | Ping | Pong
)  # fmt: skip
GatewayFrame: TypeAlias = (
    Welcome | Request | Cancel | Received | SettingsFrame | PlatformFrame | Ping | Pong
)
Frame: TypeAlias = WorkerFrame | GatewayFrame
EndFrame: TypeAlias = DoneFrame | ErrorFrame  # of a request that was begun

FROM_WORKER: TypeAdapter[WorkerFrame] = TypeAdapter(
    Annotated[WorkerFrame, Field(discriminator="type")]
)
FROM_GATEWAY: TypeAdapter[GatewayFrame] = TypeAdapter(
    Annotated[GatewayFrame, Field(discriminator="type")]
)


class Numbered(BaseModel):
    """What every frame has beside its own parts."""

    model_config = ConfigDict(strict=True, extra="ignore")
    n: Count


F = TypeVar("F", bound=Frame)


class Connection(Generic[F]):
    """One end of one connection, from its opening to its close.

    frames     those that the peer may send: FROM_WORKER or FROM_GATEWAY
    now_s      a clock that only ever grows, in every method

    The first frame of each side is hello or welcome; who owns the connection looks for it, within
    HELLO_S. Next: write what `due` gives, at the latest ping_s after it gave something.
    """

    def __init__(
        self,
        frames: TypeAdapter[F],
        now_s: float,
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._frames = frames
        self._ping_s = ping_s
        self._silence_s = silence_s
        self._n_written = self._n_read = 0
        self._heard_s = self._pinged_s = now_s

    def write(self, frame: Frame) -> str:
        """The text to send, in the order in which it was asked for."""
        text = written(frame, self._n_written)
        self._n_written += 1
        return text

    def read(self, text: str | bytes, now_s: float) -> F | None:
        """The frame; None: it came twice. A Ping is to be answered with a Pong.

        Raises BrokenLink: no frame, or one is missing before it.
        """
        self._heard_s = now_s
        try:
            n = Numbered.model_validate_json(text).n
            if n < self._n_read:
                return None
            if n > self._n_read:
                raise BrokenLink(f"frame {self._n_read} was lost: {n} came")
            frame = self._frames.validate_json(text)
        except ValidationError as invalid:
            raise BrokenLink(fault(invalid)) from None
        self._n_read += 1
        return frame

    def due(self, now_s: float) -> Ping | None:
        """A ping, if it is time for one. Raises LinkLost for a peer that is silent."""
        if now_s - self._heard_s > self._silence_s:
            raise LinkLost(f"nothing came for {now_s - self._heard_s:.0f} s")
        if now_s - self._pinged_s < self._ping_s:
            return None
        self._pinged_s = now_s
        return Ping()

    @property
    def wait_s(self) -> float:
        """Between two looks at `due` that find what is due soon enough."""
        return min(self._ping_s, self._silence_s) / 3


def written(frame: Frame, n: int) -> str:
    """The text of a frame with this number. Raises ValueError for a number that isn't finite."""
    # Those that hold a client's JSON have nothing but plain values, which needn't be copied.
    values = vars(frame) if isinstance(frame, Chunk | Request) else frame.model_dump()
    return json_bytes({"n": n, **values}).decode("utf-8")


def fault(invalid: ValidationError) -> str:
    """What is wrong with a frame, in one line that shows no text of it: there may be a prompt."""
    first = invalid.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "no frame: it is not JSON"
    if first["type"] == "union_tag_invalid":
        return "no frame: its type is none that this side may send"
    known = {"n", *names_of(Part)}
    path = ".".join(str(one) if type(one) is int or one in known else "…" for one in first["loc"])
    value = first["input"]
    found = shown(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
    return f"no frame: {path[:100]}: {found}, {first['msg'].lower()}"


def names_of(kind: type[BaseModel]) -> set[str]:
    """All that we ourselves call the fields and the types of frames: any other key is a peer's."""
    own = {name for name in kind.model_fields}
    if "type" in own:
        own.add(str(kind.model_fields["type"].default))
    return own.union(*map(names_of, kind.__subclasses__()))


def crossing_s(n_bytes: int) -> float:
    """How long so many bytes may take over the slowest link that is still served."""
    return n_bytes / SLOWEST_BYTES_S


def settings_part(settings: Settings) -> SettingsPart:
    return SettingsPart(**asdict(settings))


def speculation_part(status: Status | Mapping[str, Any] | None) -> Speculation | None:
    """Of a Status, or of its fields as /status shows them."""
    if status is None:
        return None
    values = asdict(status) if isinstance(status, Status) else status
    return Speculation.model_validate({k: values[k] for k in Speculation.model_fields})
