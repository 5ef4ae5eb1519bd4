"""The plain records that cross between threads and folders, and the protocols they are used with.

Owns the vocabulary of the program: what a request is, what comes back, what a round measured and
what to do next. Nothing here computes on arrays, reads a clock or opens a socket, so every folder
and every thread may use it. Token ids are plain ints; times are milliseconds unless a name ends
in `_s`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

Speculation = Literal["auto", "on", "off"]
Acceptance = Literal["coupled", "standard"]
FinishReason = Literal["stop", "length"]
Notice = tuple[str, str]  # (code, message): what a client should know beside its reply

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified")  # model_type of Gemma 4's configs
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # and of its drafts'
DEFAULT_DEPTH = 3  # drafted ids a round where drafting is asked for without a depth
PLATFORM = "Pendra"  # who "Off (by …)" names unless the gateway is told otherwise
LOCAL = "local"  # the scope of whoever has no key
MAX_DEPTH = 8  # drafted ids a round; also bounds what a cache must be able to rewind
LEAST_SPAN_MS = 1e-6  # a nanosecond: a clock that counts them measured nothing below


def per_second(n: int, span_ms: float) -> float | None:
    """A rate; None where there is nothing to divide, or no time that was measured."""
    return n / (span_ms / 1000) if n > 0 and span_ms >= LEAST_SPAN_MS else None


@dataclass(frozen=True)
class Source:
    """A model on this machine: what it goes by, and where its files are.

    draft          the one that belongs to it, where there is one here
    draft_problem  why there is none although one was looked for
    """

    name: str
    folder: Path
    draft: Source | None = None
    draft_problem: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen from the target's logits, in the order the fields are applied.

    The defaults are greedy decoding with nothing else: `temperature` 0 means argmax.
    `seed` None means a random one; the code path is the same.
    `logprobs` None means none, 0 means the chosen id's alone, n means its n best rivals too.
    """

    suppress_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class TextProtocol:
    """How a model's replies say what is thinking and what is a tool call: its control tokens.

    family    gemma4: wire/gemma.py reads its calls; marked: read_call does; plain: no markers
    thinking  (opens, closes), as they stand in text; None: it has no such marker
    call      (opens, closes) of a tool call; closes may be "": the reply's end does
    others    further control tokens, which no client is shown
    are_ids   each of them is one id of its own, so that text which spells one is only text
    read_call  one call's text without its markers, and the tools → {"name", "arguments"}, or a list
              of such; raises for what is none. mlx-lm's parser of the family
    """

    family: Literal["gemma4", "marked", "plain"] = "plain"
    thinking: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    others: tuple[str, ...] = ()
    are_ids: bool = True
    read_call: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True)
class Structure:
    """The form that the text of a reply must have: a JSON document.

    schema  JSON Schema as JSON text, which the document must satisfy
    """

    schema: str


@dataclass(frozen=True)
class Tools:
    """The tools of one call.

    offered      as OpenAI has them: {"type": "function", "function": {"name", "description",
                 "parameters", "strict"}}
    is_required  the reply must call one of them
    only         the name of the one that it must call; None: any
    is_parallel  it may call several
    """

    offered: tuple[Mapping[str, Any], ...]
    is_required: bool = False
    only: str | None = None
    is_parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether calls are to satisfy their parameters' schemas although none has to come."""
        return any(tool["function"].get("strict") for tool in self.offered)


@dataclass(frozen=True)
class Grammar:
    """Which texts a reply may be, once its thinking is over.

    text     of the grammar, as llguidance reads it
    is_call  it writes tool calls, markers included
    may_call  a tool call may stand in its place
    calls     the grammar of such calls; None: nothing holds them
    is_optional  it writes tool calls, and holds from the marker that opens the first, if one comes
    """

    text: str
    is_call: bool = False
    may_call: bool = False
    calls: str | None = None
    is_optional: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One reply to write: ids in, ids and text out.

    speculation  on: draft in every round; off: never; auto: as the pacer plans
    depth        drafted ids a round when drafting, 0..MAX_DEPTH; None: the pacer's choice
    choice       index of this reply among the `n` of one call; part of the noise key
    grammar      what the reply may be; None: anything
    reads_markers  its text is read by its markers: stop strings count in its content alone, and
                 what is thinking is counted
    may_think    the reply may open its thinking before the grammar holds
    may_call     tools were offered, so that the marker of a call opens one
    max_calls    tool calls after which it ends; None: its own end does
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculation: Speculation = "auto"
    depth: int | None = None
    acceptance: Acceptance = "coupled"
    choice: int = 0
    grammar: Grammar | None = None
    reads_markers: bool = False
    may_think: bool = False
    may_call: bool = False
    max_calls: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one written id under the target's raw distribution, and its rivals'.

    is_content  the id is part of what the reply says, not of its thinking or of a tool call
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    is_content: bool = True


@dataclass(frozen=True)
class Usage:
    """Tokens of one reply. completion_tokens counts EOS and the id that completed a stop.

    reasoning_tokens  those of them that are thinking, its markers included
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """What one reply took, and what the draft did in it.

    latency_ms        from the start of the session to its end
    ttft_ms           to the first id
    decode_ms         first id to last id
    rounds            draft-and-verify rounds; plain steps are not rounds
    round_tokens      ids of the reply that rounds gave
    target_passes     passes over the target's weights that chose an id, the prompt's last included
    drafted, accepted ids that the draft proposed, and those of them that are in the reply; what a
                      grammar left no choice about is in neither
    """

    latency_ms: float
    ttft_ms: float
    decode_ms: float
    completion_tokens: int
    rounds: int
    round_tokens: int
    target_passes: int
    drafted: int
    accepted: int

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed between the first and the last id; None below two ids."""
        return per_second(self.completion_tokens - 1, self.decode_ms)

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted, 0..1; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """Ids of the reply that an average round gave."""
        return self.round_tokens / self.rounds if self.rounds else None


@dataclass(frozen=True)
class Progress:
    """Prompt ids whose keys and values are cached so far."""

    prompt_tokens_done: int
    prompt_tokens: int


@dataclass(frozen=True)
class Text:
    """Ids the target chose, in order, and the text they completed (it may lag behind the ids).

    marks  where in `text` a control token begins; elsewhere its letters are only text
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a reply.

    notice  (code, message) for what its end cut off, such as truncated_during_reasoning
    """

    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    notice: Notice | None = None


@dataclass(frozen=True)
class Failed:
    """The request ended without a reply; the worker itself goes on."""

    error: Exception


Event = Progress | Text | Done | Failed


@dataclass(frozen=True)
class Call:
    """What a client asks for at a door: parsed and within limits, but not yet of any model.

    id          of the request, as X-Request-Id says it
    model       the name it gave; None: the worker's first
    messages    of a chat, as the model's template expects them; None for a completion
    prompt      of a completion: text or token ids; "" beside messages
    sampling    the fields of Sampling that it set; the rest is the model's own
    n           choices wanted; choice i uses noise index i
    max_tokens  None: what the worker gives by default
    stop        visible texts that end a choice
    speculation  on, off, or auto: as was measured
    enable_thinking  let the model think before it answers
    structure   the form its text must have; None: any
    tools       that the model may call, or must; None: there are none
    scope       whose prefix cache it may use: a hash of the caller's key, or LOCAL
    is_streamed its pieces are wanted as they come; else nothing is before its end
    """

    id: str
    model: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] = ""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    speculation: Speculation = "auto"
    enable_thinking: bool = False
    structure: Structure | None = None
    tools: Tools | None = None
    scope: str = LOCAL
    is_streamed: bool = True


@dataclass(frozen=True)
class Started:
    """The engine took a call up.

    model           the id it is answered under
    prompt_tokens   of the prompt, counted once for all choices
    queue_wait_ms   from submit until the engine was free for it
    model_load_ms   of it, what loading the model took; 0 where it was loaded
    notice          (code, message) for what was asked and can't be had, such as
                    speculation_unavailable; None: nothing to say
    protocol        how the replies are marked
    opening         what the prompt's end leaves open: a channel's marker and what follows it
    """

    model: str
    prompt_tokens: int
    queue_wait_ms: float
    model_load_ms: float = 0.0
    notice: Notice | None = None
    protocol: TextProtocol = TextProtocol()
    opening: str = ""


@dataclass(frozen=True)
class ReplyEvent:
    """An event of one choice.

    tokens  the bytes of each id that the event's logprobs name; empty without logprobs
    """

    choice: int
    event: Progress | Text | Done
    tokens: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass(frozen=True)
class ServedModel:
    """A model that calls may name.

    created  Unix time at which it was configured or loaded first
    """

    id: str
    created: int
    context_tokens: int | None = None
    draft: str | None = None
    is_loaded: bool = True


MAX_REVISION = 2**53  # of settings, and no more one: what JSON's readers agree on


@dataclass(frozen=True)
class Settings:
    """What the worker's user may switch while it runs; kept in policies.json.

    speculative_decoding   auto: as measured; off: drafts are never used
    kv_prefix_cache        replies' keys and values are kept for the prompts that go on from them
    run_requests_together  several replies at a time; drafts pause meanwhile
    """

    speculative_decoding: Literal["auto", "off"] = "auto"
    kv_prefix_cache: bool = True
    run_requests_together: bool = False


@dataclass(frozen=True)
class Platform:
    """What the control plane says of drafting; kept in memory alone, so that a restart forgets it.

    speculative_decoding  auto: as settings and measurements say; off: switched off by the platform;
                          unavailable: not for this organisation, which sees no line of it
    display_name          who "Off (by …)" names
    revision              of the last change
    """

    speculative_decoding: Literal["auto", "off", "unavailable"] = "auto"
    display_name: str = PLATFORM
    revision: int = 0


@dataclass(frozen=True)
class Health:
    """Whether requests can be served now; why not, in one sentence."""

    is_ok: bool
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """What a session does next: `tokens` ids, drafting `depth` a round; depth 0 is plain."""

    depth: int
    tokens: int


@dataclass(frozen=True)
class Round:
    """One timed piece of decoding: a draft-and-verify round, or one plain step (depth 0).

    drafted         ids that were proposed, those that a grammar left no choice about included
    accepted        ids that the reply gained, less one
    round_ms        from the last device read to this one, so draft, verify and host work are in it
    context_tokens  ids cached when it began
    forced          how many of `drafted` a grammar left no choice about; they come first
    """

    depth: int
    drafted: int
    accepted: int
    round_ms: float
    context_tokens: int
    forced: int = 0

    @property
    def own(self) -> tuple[int, int]:
        """(drafted, accepted) of the draft's own ids alone."""
        kept = min(self.accepted, self.drafted)
        return self.drafted - self.forced, max(0, kept - self.forced)


@dataclass(frozen=True)
class Disturbance:
    """Something that makes what is timed around it worthless, as whoever saw it says.

    reason  in a word or two: power source, thermal state, low power mode, sleep
    lasts   the machine stays so: what was timed before may not hold from now on
    """

    reason: str
    lasts: bool


State = Literal[
    "none", "needs_update", "platform_off", "settings_off", "paused", "starting",
    "automatic", "measuring", "off", "on",
]  # fmt: skip
MINUS = "\u2212"


@dataclass(frozen=True)
class Status:
    """What the draft of one model is doing, and the measurement behind it.

    speedup           on: of recent requests, exits included; off: what the best depth would bring;
                      a fraction, 0.24 is 24 % faster; None until something was measured
    low, high         its 90 % interval
    depth             drafted ids a round that recent rounds used most, or the best one while off
    acceptance        accepted over drafted, 0..1
    tokens_per_round  ids that an average round gave
    cost              an average round's time in plain steps
    spread            relative SD of time per token under drafts between requests, as measured
    requests, tokens  how many the figure rests on
    loss              ps (plain steps) that trials have cost since the load, their gains deducted
    loss_share        the same as a share of all decode time
    since_s           clock of the last change of state; the caller's own clock
    why               one sentence
    """

    state: State
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    depth: int | None = None
    acceptance: float | None = None
    tokens_per_round: float | None = None
    cost: float | None = None
    spread: float | None = None
    requests: int = 0
    tokens: int = 0
    loss: float = 0.0
    loss_share: float = 0.0
    since_s: float = 0.0
    why: str = ""

    @property
    def text(self) -> str | None:
        """The line that every place shows; None where there is none."""
        return status_text(self)


def status_text(status: Status, platform: str = PLATFORM) -> str | None:
    """The contract: nine texts, and None for no line at all. platform: whose switch it is."""
    match status.state:
        case "on" | "off":
            return verdict_text(status.state == "on", status.speedup or 0.0)
        case "none":
            return None
        case "needs_update":
            return "Needs a worker update"
        case "platform_off":
            return f"Off (by {platform})"
        case "settings_off":
            return "Off (worker's Settings)"
        case _:
            return status.state.capitalize()


def effective_status(
    measured: Status | None,
    *,
    has_draft: bool,
    decides: bool = True,
    is_off_by_platform: bool = False,
    is_off_by_settings: bool = False,
    is_paused: bool = False,
) -> Status:
    """Which of the nine applies: the one place that knows their precedence.

    measured   what the worker's pacer last said; None: nothing reported yet
    has_draft  a draft is loaded, fits, and is available to the organisation
    decides    the worker's version measures and decides

    What was measured stays in the record, so that it is there when the switch is turned again.
    """
    shown: State
    if not has_draft:
        shown = "none"
    elif not decides:
        shown = "needs_update"
    elif is_off_by_platform:
        shown = "platform_off"
    elif is_off_by_settings:
        shown = "settings_off"
    elif is_paused:
        shown = "paused"
    elif measured is None:
        shown = "starting"
    else:
        return measured
    return replace(measured or Status(shown), state=shown)


def verdict_text(is_on: bool, speedup: float) -> str:
    """`On, +24%` or `Off, −18%`, rounded towards zero.

    speedup  a fraction: 0.24 is 24 % faster, −0.18 is 18 % slower

    On needs at least +1 %, else it is Off; Off never shows a positive number but `Off, +0%`.
    """
    percent = whole_percent(speedup)
    if is_on and percent >= 1:
        return f"On, +{percent}%"
    return f"Off, {MINUS}{-percent}%" if percent < 0 else "Off, +0%"


def whole_percent(fraction: float) -> int:
    """Percent, rounded towards zero; 0.29 is 29 although 100 * 0.29 is a little less."""
    return math.trunc(round(100 * fraction, 9))


@dataclass(frozen=True)
class Traffic:
    """What a decision may know of a request before it begins: its kind, never its words."""

    prompt_tokens: int
    temperature: float = 0.0
    has_grammar: bool = False


class Pacer(Protocol):
    """Says what each segment of one reply does, and hears what it took.

    `plan` may be asked before every round, `observe` follows every round and plain step, and `end`
    is called once, however the reply ends.
    """

    def plan(self) -> Plan: ...

    def observe(self, round: Round) -> None: ...

    def end(self) -> None: ...


class Engine(Protocol):
    """Writes replies; the doors (HTTP, link) see nothing else of it. On the event loop.

    submit    what one call gives: Started, then ReplyEvents of its choices, the last of each a
              Done. Raises RequestError (the client's doing), Overloaded (no room; nothing was
              begun), EngineDied, GenerationFailed. Closing it cancels within a round or a chunk
    models    what is served, the default first
    health    whether it can serve, and why not
    status    everything measured, plain values: what /status shows
    settings  those in force
    change    replaces the fields of Settings that are named, from the next call on, and keeps them;
              returns what is in force then. revision: of a change from elsewhere, which isn't
              obeyed unless it is above the one that `status` has as settings_revision. Raises
              ConfigError where they can't be kept
    set_platform  what the control plane says of drafting, from the next call on
    refresh_models  look again at what there is to serve; it is also looked at every few seconds
    forget    stop serving a model whose files are to go, and free its memory. Raises UnknownModel,
              ModelInUse while a request with it runs or waits
    """

    def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]: ...

    def models(self) -> Sequence[ServedModel]: ...

    def health(self) -> Health: ...

    def status(self) -> dict[str, Any]: ...

    def settings(self) -> Settings: ...

    async def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Settings: ...

    def set_platform(self, platform: Platform) -> None: ...

    async def refresh_models(self) -> None: ...

    async def forget(self, id: str) -> None: ...


class Tokenizer(Protocol):
    """What the program needs of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any: ...
