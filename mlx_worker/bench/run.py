"""Serve one batch of requests plainly and with drafts, interleaved, and work out what changed.

Owns the order in which requests meet the arms, and the arithmetic from replies to rows and
verdict inputs. Leaves the decision rule to control/decide.py, the machine to facts.py and the
layout to report.py. Runs on the thread that owns MLX.

An *arm* is one way of decoding: a mode at a depth. Every request is served by every arm, one
straight after the other, so that whatever else slows the machine slows all arms of a request
alike; request i begins with arm i, so that none always goes first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import mlx.core as mx

from mlx_worker.bench.workloads import ALL, Prompt, names
from mlx_worker.control.decide import (
    MIN_REQUESTS,
    Estimate,
    Ratios,
    Verdict,
    decide,
    estimate_speedup,
)
from mlx_worker.engine.load import LoadedPair, load_pair as load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.engine.target import Target
from mlx_worker.errors import ConfigError, shown
from mlx_worker.records import (
    MAX_DEPTH,
    Acceptance,
    Done,
    GenerationRequest,
    Pacer,
    Text,
    Timing,
)

MODES = ("off", "assistant", "model", "lookup", "auto")
DEPTHS = (0, 1, 2, 3, 4)
MAX_TOKENS = 96


@dataclass(frozen=True, order=True)
class Arm:
    """One way of decoding; depth 0 is plain."""

    mode: str
    depth: int


OFF = Arm("off", 0)
AUTO = Arm("auto", 0)  # the live controller chooses


@dataclass(frozen=True)
class Limits:
    """What is the same for every request."""

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    acceptance: Acceptance = "coupled"

    def of(self, request: "Request") -> "Limits":
        """These limits with what the request's own prompt sets."""
        temperature = request.prompt.temperature
        return self if temperature is None else replace(self, temperature=temperature)

    @property
    def keeps_text(self) -> bool:
        """Whether the text must be the same with and without a draft."""
        return self.acceptance == "coupled" or self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One request of the batch; the i-th has seed i."""

    prompt: Prompt
    ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Batch:
    """What is to be served: every request in every arm."""

    loaded: LoadedPair
    pairs: Mapping[str, LoadedPair]
    arms: Sequence[Arm]
    requests: Sequence[Request]
    limits: Limits

    @property
    def n_replies(self) -> int:
        """Replies that serving writes, the warm-up included."""
        return (len(self.requests) + 1) * len(self.arms)

    @property
    def main_mode(self) -> str | None:
        """The mode that the verdict is about: the loaded draft's, else the first that drafts."""
        drafting = [mode for mode in self.pairs if mode not in ("off", "auto")]
        kind = self.loaded.draft_kind
        return kind if kind in drafting else next(iter(drafting), None)


@dataclass(frozen=True)
class Reply:
    """What one arm made of one request."""

    ids: tuple[int, ...]
    timing: Timing

    @property
    def ms_per_token(self) -> float | None:
        """Decode time per token after the first; None below two tokens."""
        rate = self.timing.tokens_per_s
        return 1000 / rate if rate else None


@dataclass(frozen=True)
class Served:
    """One request, and its reply from every arm."""

    request: Request
    replies: Mapping[Arm, Reply]

    @property
    def off(self) -> Reply:
        return self.replies[OFF]

    @property
    def same_text(self) -> bool:
        return all(reply.ids == self.off.ids for reply in self.replies.values())

    def ratio(self, arm: Arm) -> float | None:
        """Time per token in this arm over time per token when off; None if either is unknown."""
        on, off = self.replies[arm].ms_per_token, self.off.ms_per_token
        return on / off if on and off else None

    def latency_change(self, arm: Arm) -> float:
        """Whole request, prefill included: −0.2 is a fifth less waiting."""
        return self.replies[arm].timing.latency_ms / self.off.timing.latency_ms - 1


@dataclass(frozen=True)
class Row:
    """One arm on one workload, or on all of them.

    estimate is None where nothing could be compared; its interval also where there was one prompt.
    """

    arm: Arm
    workload: str
    requests: int
    tokens_per_s: float | None
    slowest_per_s: float | None
    fastest_per_s: float | None
    estimate: Estimate | None
    acceptance: float | None
    tokens_per_round: float | None


@dataclass(frozen=True)
class Trade:
    """What speculation gives and takes, over the whole batch in one arm.

    extra_kv_bytes  K/V rows that a round holds for ids which may be thrown away, and the K/V of a
                    draft model that keeps its own
    """

    passes_off: int
    passes_on: int
    drafted: int
    thrown_away: int
    extra_kv_bytes: int
    draft_bytes: int


@dataclass(frozen=True)
class Result:
    """What serving showed. arm: the verdict's; None, like verdict and trade, without a verdict."""

    served: Sequence[Served]
    rows: Sequence[Row]
    verdicts: Mapping[str, Verdict]
    arm: Arm | None
    trade: Trade | None

    @property
    def verdict(self) -> Verdict | None:
        return self.verdicts[self.arm.mode] if self.arm else None


# --- before -----------------------------------------------------------------------------------


def check_modes(modes: Sequence[str] | None) -> None:
    for mode in modes or ():
        if mode not in MODES:
            raise ConfigError(f"--modes: no mode is called {shown(mode)}", hint=", ".join(MODES))


def check_depths(depths: Sequence[int]) -> None:
    for depth in depths:
        if not 0 <= depth <= MAX_DEPTH:
            raise ConfigError(f"--depths: {depth}, must be 0 to {MAX_DEPTH}")


def prepare(
    loaded: LoadedPair,
    prompts: Sequence[Prompt],
    modes: Sequence[str] | None = None,
    depths: Sequence[int] = DEPTHS,
    limits: Limits | None = None,
) -> Batch:
    """Decide who meets whom: pairs by mode, arms, numbered requests. Nothing is generated yet.

    modes  None means off and whatever draft is loaded; off is always there

    Raises ConfigError: a mode that is unknown or has no drafter, no depth to draft at, or too few
    requests for a verdict. Next: serve.
    """
    pairs = pairs_of(loaded, modes)
    arms = arms_of(list(pairs), depths)
    requests = requests_of(loaded, prompts, len(arms))
    return Batch(loaded, pairs, arms, requests, limits or Limits())


def pairs_of(loaded: LoadedPair, modes: Sequence[str] | None) -> dict[str, LoadedPair]:
    """Mode → the target with that mode's drafter. Off has none, so that none is prepared there."""
    check_modes(modes)
    wanted = [loaded.draft_kind] if modes is None else modes
    drafting = {mode: with_mode(loaded, mode) for mode in wanted if mode and mode != "off"}
    return {"off": loaded.with_draft("none"), **drafting}


def with_mode(loaded: LoadedPair, mode: str) -> LoadedPair:
    """The same target with the drafter that a mode needs.

    Raises ConfigError: there is none.
    """
    if loaded.draft_kind == mode or (mode == "auto" and loaded.draft_kind):
        return loaded
    if mode == "lookup":
        return loaded.with_draft("lookup")
    matching = loaded.with_draft("auto")
    if matching.draft_kind == mode:
        return matching
    why = matching.draft_problem or f"{loaded.name} comes without one"
    wanted = "made for this model" if mode == "assistant" else "of a smaller model"
    raise ConfigError(f"--modes {mode}: {why}", hint=f"--draft with a folder {wanted}")


def arms_of(modes: Sequence[str], depths: Sequence[int]) -> list[Arm]:
    """Off, then every other mode at every depth above 0.

    Raises ConfigError: a depth out of range, or drafts asked for at no depth.
    """
    check_depths(depths)
    drafting = [mode for mode in modes if mode not in ("off", "auto")]
    if drafting and not any(depths):
        raise ConfigError(
            "--depths: no depth above 0, so nothing to compare", hint="--depths 0,2,4"
        )
    fixed = [Arm(mode, depth) for mode in drafting for depth in sorted(set(depths)) if depth]
    return [OFF, *fixed, *([AUTO] if "auto" in modes else [])]


def requests_of(loaded: LoadedPair, prompts: Sequence[Prompt], n_arms: int) -> list[Request]:
    """The prompts as ids, numbered.

    Raises ConfigError: a comparison of fewer than two requests has no interval, so no verdict.
    """
    if n_arms > 1 and len(prompts) < MIN_REQUESTS:
        raise ConfigError(
            f"{len(prompts)} request in the batch, a verdict needs at least {MIN_REQUESTS}",
            hint="raise --requests, or add --workloads",
        )
    return [
        Request(prompt, tuple(loaded.encode_chat(prompt.messages)), seed)
        for seed, prompt in enumerate(prompts)
    ]


# --- serving ----------------------------------------------------------------------------------


Answer = Callable[[Request], Reply]


def serve(
    batch: Batch,
    on_reply: Callable[[], None] = lambda: None,
    answer_live: Answer | None = None,
) -> list[Served]:
    """Serve every request in every arm. One untimed reply in each arm comes first, to warm it up.

    on_reply     called after each reply, batch.n_replies times
    answer_live  answers in the arm AUTO, where there is one

    Raises GenerationFailed; ContextTooLong for a prompt that this model can't take.
    """
    # The longest prompt, so that shapes which only long contexts have are warm too.
    longest = max(batch.requests, key=lambda request: len(request.ids))
    assert AUTO not in batch.arms or answer_live, "who answers in automatic mode?"

    def reply_of(request: Request, arm: Arm) -> Reply:
        if arm == AUTO and answer_live:
            return answer_live(request)
        return answer(batch.pairs[arm.mode], request, arm, batch.limits)

    for arm in batch.arms:
        reply_of(longest, arm)
        on_reply()
    served: list[Served] = []
    for i, request in enumerate(batch.requests):
        replies: dict[Arm, Reply] = {}
        for arm in rotated(batch.arms, i):
            replies[arm] = reply_of(request, arm)
            on_reply()
        served.append(Served(request, {arm: replies[arm] for arm in batch.arms}))
    return served


def rotated(arms: Sequence[Arm], i: int) -> list[Arm]:
    """The arms in turn, beginning with the i-th."""
    start = i % len(arms)
    return [*arms[start:], *arms[:start]]


def answer(
    pair: LoadedPair, request: Request, arm: Arm, limits: Limits, pacer: Pacer | None = None
) -> Reply:
    """One reply. What the caller set is set; the rest is the model's own generation_config.

    pacer  for the arm AUTO
    """
    limits = limits.of(request)
    sampling = replace(
        pair.generation_defaults, temperature=limits.temperature, seed=request.seed, logprobs=None
    )
    asked = GenerationRequest(
        prompt_ids=request.ids,
        max_tokens=limits.max_tokens,
        sampling=sampling,
        speculation="auto" if arm == AUTO else "on" if arm.depth else "off",
        depth=None if arm == AUTO else arm.depth,
        acceptance=limits.acceptance,
    )
    ids: list[int] = []
    done: Done | None = None
    for event in generate_events(pair, asked, pacer):
        if isinstance(event, Text):
            ids += event.ids
        elif isinstance(event, Done):
            done = event
    assert done is not None, "a session ends with Done"
    mx.synchronize()  # what a reply queued and did not need must not run on the next one's time
    return Reply(tuple(ids), done.timing)


# --- after ------------------------------------------------------------------------------------


def conclude(batch: Batch, served: Sequence[Served]) -> Result:
    """Rows for every arm, a verdict for every mode, and what the main mode's best arm trades."""
    fixed = [mode for mode in batch.pairs if mode not in ("off", "auto")]
    found = {mode: verdict_of(served, mode) for mode in fixed}
    verdicts = {mode: verdict for mode, verdict in found.items() if verdict}
    main = batch.main_mode
    arm = Arm(main, verdicts[main].depth) if main in verdicts else None
    trade = trade_of(served, arm, batch.pairs[arm.mode]) if arm else None
    return Result(served, rows_of(served), verdicts, arm, trade)


def rows_of(served: Sequence[Served]) -> list[Row]:
    """Every arm on every workload, then on all."""
    kinds = names([one.request.prompt for one in served])
    return [
        row_of(arm, kind, [one for one in served if kind in (one.request.prompt.workload, ALL)])
        for arm in served[0].replies
        for kind in (*kinds, ALL)
    ]


def row_of(arm: Arm, workload: str, served: Sequence[Served]) -> Row:
    timings = [one.replies[arm].timing for one in served]
    speeds = [timing.tokens_per_s for timing in timings if timing.tokens_per_s]
    ratios = [ratios[arm] for ratios in ratios_by_prompt(served, [arm])]
    drafted = sum(timing.drafted for timing in timings)
    accepted = sum(timing.accepted for timing in timings)
    rounds = sum(timing.rounds for timing in timings)
    return Row(
        arm=arm,
        workload=workload,
        requests=len(served),
        tokens_per_s=median(speeds) if speeds else None,
        slowest_per_s=min(speeds, default=None),
        fastest_per_s=max(speeds, default=None),
        estimate=estimate_speedup(ratios) if ratios else None,
        acceptance=accepted / drafted if drafted else None,
        tokens_per_round=sum(timing.round_tokens for timing in timings) / rounds
        if rounds
        else None,
    )


def ratios_by_prompt(served: Sequence[Served], arms: Sequence[Arm]) -> list[dict[Arm, float]]:
    """The ratios that a verdict may rest on: one set for each different prompt.

    A prompt served twice is no second piece of evidence, so its ratios are averaged. A request
    that has no speed in some arm (a reply of one token) is left out of all.
    """
    by_prompt: dict[str, list[dict[Arm, float]]] = {}
    for one in served:
        ratios = {arm: one.ratio(arm) for arm in arms}
        known = {arm: ratio for arm, ratio in ratios.items() if ratio is not None}
        if len(known) == len(ratios):
            by_prompt.setdefault(repr(one.request.prompt), []).append(known)
    return [
        {arm: math.fsum(ratios[arm] for ratios in same) / len(same) for arm in arms}
        for same in by_prompt.values()
    ]


def verdict_of(served: Sequence[Served], mode: str) -> Verdict | None:
    """The verdict on one mode over its depths; None when no request had two tokens in every arm."""
    arms = [arm for arm in served[0].replies if arm.mode == mode]
    requests: list[Ratios] = [
        {arm.depth: ratio for arm, ratio in ratios.items()}
        for ratios in ratios_by_prompt(served, arms)
    ]
    return decide(requests) if requests else None


def trade_of(served: Sequence[Served], arm: Arm, pair: LoadedPair) -> Trade:
    timings = [one.replies[arm].timing for one in served]
    drafted = sum(timing.drafted for timing in timings)
    return Trade(
        passes_off=sum(one.off.timing.target_passes for one in served),
        passes_on=sum(timing.target_passes for timing in timings),
        drafted=drafted,
        thrown_away=drafted - sum(timing.accepted for timing in timings),
        extra_kv_bytes=arm.depth * pair.kv_bytes_per_token + draft_kv_bytes(served, arm, pair),
        draft_bytes=pair.draft_bytes,
    )


def draft_kv_bytes(served: Sequence[Served], arm: Arm, pair: LoadedPair) -> int:
    """K/V of the draft's own at the longest request; an assistant reads the target's instead."""
    if not isinstance(pair.draft_network, Target):
        return 0
    longest = max(len(one.request.ids) + len(one.replies[arm].ids) for one in served)
    return longest * pair.draft_network.kv_bytes_per_token
