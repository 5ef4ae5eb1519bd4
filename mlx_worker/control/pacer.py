"""Pacers: what a session asks before each segment of decoding, and tells after each round.

Owns the course of things: when a request measures in pairs, drafts or decodes plainly, what its
rounds add to the evidence, and when the verdict changes. Leaves estimates to measure.py, the rules
to decide.py and the words to status.py. No clock: times come with the rounds and as arguments.
One thread at a time: the one that runs the session.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal

from mlx_worker.control import status as words
from mlx_worker.control.decide import DOUBT, MIN_BIG_LOOKS, Evidence, is_unpromising, judge, weigh
from mlx_worker.control.measure import (
    BUCKETS,
    GAP_STEPS,
    PAIR_TOKENS,
    CostPair,
    Costs,
    Levels,
    RequestLevel,
    Sample,
    bucket_of,
    cost_pair,
    settled_mean,
)
from mlx_worker.records import MAX_DEPTH, Plan, Round, Status, Traffic, whole_percent

WHOLE_REQUEST_TOKENS = 1 << 30  # longer than any reply, so that the plan is asked for once

DROPPED_STEPS = 3  # after prefill: caches are cold, buffers are new
MAX_PAIRS = 8  # pairs a request; more of one request would be one opinion asked twice
PAIRED_REQUESTS = 8  # requests of a measurement in pairs; if that didn't decide, what is close is
PAIRED_EVERY = 4  # the policy's own gain, so the others draft as if On, but for one in so many
TRY_PAIRS = 4  # pairs of a re-try while Off
BRACKET_PAIRS = 2  # pairs of a request that re-times its costs while On; half if replies are short
BRACKET_REQUESTS = 12  # one request in so many re-times its costs while On …
BRACKET_SOON = 5  # … or in so many, while they are not sure or have moved
SHORT_REPLY_TOKENS = 64  # below this typical length pairs are half as long, so that some fit
MAX_LOSS = 80.0  # ps that trials may cost on top of …
MAX_LOSS_SHARE = 0.005  # … this share of all decode time
OPTIMISM = 0.06  # share by which a depth that was never timed may be cheaper than the curve says
LEANING_Z = 0.5  # standard errors of gain at which the rest of a measured request drafts
AGAIN_LOSS = 30.0  # ps that measuring again may cost, however much was spent before
EXIT_LOSS = (3.0, 8.0)  # ps a request may lose in its trial before it is let go: in between …
EXIT_SHARE = 0.04  # … this share of a typical reply
PLAIN_TOKENS = (96, 768)  # a request that doesn't benefit: plain for so long, doubling up to
STOP_LOSS = 16.0  # ps that one request's savings may fall below their peak, whatever is hoped for
CLOCK_DOUBT = 1.5  # by so much more where the clock says so
LEAST_ROUNDS = 2  # rounds before a request may stop drafting: the prior alone never parks it
TOKENS_AHEAD = (32.0, 256.0)  # how long a reply is thought to go on, from how long they were
SAVINGS_DROP = (60.0, 250.0)  # ps that savings may fall below their peak while On: in between …
SAVINGS_SHARE = 0.5  # … this share of a typical reply
MAX_SAVINGS_LOSS = 1 / 3  # share of it that one request may account for: one is no trend
RECENT = 60  # requests that the figure of On rests on
LATELY = 30  # requests of those that are asked whether there is still a gain
EVIDENCE = 400  # requests that a measurement may take in
RETRY_TOKENS = (2_500, 10_000)  # plain tokens between re-tries while Off, doubling up to
RETRY_REQUESTS = 40  # …or so many requests, where replies are short
RETRY_GAIN = 1.10  # tokens a ps of a re-try that asks for a new measurement
MOVED_COST = 0.15  # share by which rounds moved while On, so that their costs are timed again …
MOVED_ROUNDS = 8  # … for so many rounds in a row
MOVED_STEP = 0.20  # share by which the plain step moved while Off, so that a re-try comes early
KEPT_STEPS = 32  # steps of a plain stretch whose times are kept one by one
LENGTH_FADE = 0.9  # memory of reply lengths
STEP_FADE = 0.8  # memory of the plain step's time, a stretch

Phase = Literal["measuring", "on", "off"]


class FixedPacer:
    """The same depth in every round, whatever it costs: to measure, or when set by hand."""

    def __init__(self, depth: int):
        assert 0 <= depth <= MAX_DEPTH, depth
        self._plan = Plan(depth=depth, tokens=WHOLE_REQUEST_TOKENS)

    def plan(self) -> Plan:
        return self._plan

    def observe(self, round: Round) -> None:
        """Heard, not heeded."""

    def end(self) -> None:
        """Nothing to conclude."""


def kind_of(traffic: Traffic) -> str:
    """What a request has in common with others before it begins: temperature and grammar."""
    heat = "greedy" if traffic.temperature <= 0 else "warm" if traffic.temperature <= 0.5 else "hot"
    return f"{heat}+grammar" if traffic.has_grammar else heat


@dataclass(frozen=True)
class Stretch:
    """Rounds or steps in a row, and what they were for.

    baseline, trial  the plain and the drafted halves of pairs
    draft            drafting because it is On
    plain            decoding plainly: not measured, not drafting, or a request that stopped
    more             steps of a long plain stretch beyond those kept, and their ms
    """

    purpose: Literal["baseline", "trial", "draft", "plain"]
    rounds: list[Round]
    pair: int = -1
    more: list[float] = field(default_factory=lambda: [0, 0.0])

    @property
    def tokens(self) -> int:
        return sum(round.accepted + 1 for round in self.rounds) + int(self.more[0])

    @property
    def took_ms(self) -> float:
        return math.fsum(round.round_ms for round in self.rounds) + self.more[1]

    def awake_ms(self, step_ms: float, costs: Sequence[float]) -> float:
        """The same without the gaps in which the machine slept; no draft is to blame for those.

        A gap is far longer than such a round should be, and than the others here were.
        """
        usual = GAP_STEPS * median_low([round.round_ms for round in self.rounds])
        kept = (
            round.round_ms
            for round in self.rounds
            if round.round_ms <= max(usual, GAP_STEPS * step_ms * costs[round.depth])
        )
        return math.fsum(kept) + self.more[1]


@dataclass
class Ledger:
    """What drafting cost and gave, in ps, and all that was decoded.

    trial_loss  of pairs, dropped rounds included; it bounds what may still be tried
    granted     what trials may cost beyond their share of decoding
    saved       by drafting while On; peak: the most it ever was since On
    decode      everything
    """

    trial_loss: float = 0.0
    granted: float = MAX_LOSS
    saved: float = 0.0
    peak: float = 0.0
    decode: float = 0.0

    @property
    def is_spent(self) -> bool:
        return self.trial_loss > self.granted + MAX_LOSS_SHARE * self.decode

    def grant(self, loss: float) -> None:
        """Let trials cost so much from now on, if they might not already."""
        spent = self.trial_loss - MAX_LOSS_SHARE * self.decode
        self.granted = max(self.granted, spent + loss)


@dataclass
class Memory:
    """All that a controller knows; plain values, so that a log can hold it.

    samples       the evidence of this measurement, or of the requests since On
    kinds         kinds and contexts of traffic that the last measurement saw
    step_ms       context bucket → the plain step, lately
    verdict_step_ms  the same when the verdict fell
    has_hope      the last re-try gained, if not enough
    """

    phase: Phase = "measuring"
    since_s: float = 0.0
    why: str = ""
    n_requests: int = 0
    costs: Costs = field(default_factory=Costs)
    levels: Levels = field(default_factory=Levels)
    ledger: Ledger = field(default_factory=Ledger)
    samples: list[Sample] = field(default_factory=list[Sample])
    kinds: list[str] = field(default_factory=list[str])
    step_ms: dict[int, float] = field(default_factory=dict[int, float])
    verdict_step_ms: dict[int, float] = field(default_factory=dict[int, float])
    reply_tokens: float = 4.0 * SHORT_REPLY_TOKENS
    plain_tokens: int = 0
    plain_requests: int = 0
    retry_tokens: int = RETRY_TOKENS[0]
    bracket_in: int = BRACKET_REQUESTS
    was_on: bool = False
    has_hope: bool = False


class Controller:
    """Measures and decides for one loaded model with its draft; from scratch at each load.

    curve   depth → ps of a round as timed alone at load; ranks depths until pairs do
    depths  the depths it may use; one alone is a fixed depth
    seed    of the order of pairs
    forced  "on" drafts in every request as if the verdict were On, and never changes it: to time
            the policy itself
    on_concluded  hears of each request once it was taken in; for a log

    Next: `await_request` for each request, and give that pacer to its session.
    """

    def __init__(
        self,
        *,
        curve: Mapping[int, float] | None = None,
        depths: Sequence[int] = tuple(range(1, MAX_DEPTH + 1)),
        seed: int = 0,
        forced: Literal["on"] | None = None,
        on_concluded: "Callable[[RequestPacer], None]" = lambda _: None,
    ) -> None:
        assert depths, "a controller needs a depth"
        assert all(1 <= depth <= MAX_DEPTH for depth in depths), depths
        self.depths = tuple(sorted(depths))
        self.seed = seed
        self.forced: Literal["on"] | None = forced
        self.n_concluded = 0
        self._on_concluded = on_concluded
        self.memory = Memory(costs=Costs(curve=dict(curve or {})))
        self._active: list[RequestPacer] = []
        self._taus: list[tuple[float, float]] | None = None  # of the samples, with their weights
        self._policy: Evidence | None = None
        self._fixed: tuple[Evidence, int] | None = None
        if forced:
            self.memory.phase = "on"
        self.refresh()

    def begin(self, traffic: Traffic, now_s: float) -> "RequestPacer":
        """The pacer of one request. Requests that overlap are served, but teach nothing."""
        memory = self.memory
        memory.n_requests += 1
        n_pairs, drafts_on = self._course(traffic)
        request = RequestPacer(self, traffic, n_pairs, now_s, drafts_on=drafts_on)
        self._active.append(request)
        if memory.n_requests == 1:
            self.refresh()
        if len(self._active) > 1:
            for other in self._active:
                other.disturb()
        return request

    def await_request(self, traffic: Traffic, now_s: float) -> "AwaitedPacer":
        """For a session: begins the request at its first plan, so not if it never decodes."""
        return AwaitedPacer(self, traffic, now_s)

    def refresh(self) -> None:
        """Renew `status`, a frozen record that any thread may read at any time."""
        self.status: Status = words.status_of(self)

    @property
    def is_leaning(self) -> bool:
        """Whether the evidence so far favours drafting, though not enough to say so."""
        return self.memory.phase == "on" or (
            bool(self.memory.samples) and self.policy.z > LEANING_Z
        )

    @property
    def policy(self) -> Evidence:
        """Evidence on drafting as it runs: depth by request, exits included. Needs a sample."""
        if self._policy is None:
            self._policy = self.weighed(len(self.memory.samples))
        return self._policy

    def weighed(self, n: int) -> Evidence:
        """Evidence of the last n samples on drafting as it ran."""
        if self._taus is None:
            tables = self.tables()
            self._taus = [
                (sample.tau(tables[sample.bucket]), sample.weight) for sample in self.memory.samples
            ]
        taus, weights = zip(*self._taus[-n:], strict=True)
        return weigh(taus, weights, self.memory.costs.variance)

    @property
    def fixed(self) -> tuple[Evidence, int]:
        """Evidence on the best fixed depth that half of the samples can price, and that depth."""
        if self._fixed is None:
            candidates = [(self._at(depth), -depth) for depth in self.depths]
            priced = [(found.theta, depth, found) for found, depth in candidates if found]
            if priced:
                _, depth, found = max(priced, key=lambda one: one[:2])
                self._fixed = found, -depth
            else:
                self._fixed = self.policy, self.depths[0]
        return self._fixed

    def _at(self, depth: int) -> Evidence | None:
        memory, tables = self.memory, self.tables()
        samples = memory.samples
        found = [sample.tau_at(depth, tables[sample.bucket]) for sample in samples]
        priced = [tau for tau in found if tau is not None]
        if 2 * len(priced) < len(samples):
            return None
        taus, weights, noises = zip(*priced, strict=True)
        return weigh(taus, weights, memory.costs.variance, noises)

    def _forget_prices(self) -> None:
        self._taus = self._policy = self._fixed = None

    # --- one request

    def _course(self, traffic: Traffic) -> tuple[int, bool]:
        """How many pairs a request has, and whether it drafts after them."""
        memory = self.memory
        if self.forced:
            return 0, True
        if memory.phase == "measuring":
            return self._measuring_course()
        if memory.phase == "on":
            memory.bracket_in -= 1
            n_pairs = BRACKET_PAIRS // (2 if memory.reply_tokens < SHORT_REPLY_TOKENS else 1)
            return n_pairs if memory.bracket_in <= 0 else 0, True
        return TRY_PAIRS if self._retries(traffic) else 0, False

    def _measuring_course(self) -> tuple[int, bool]:
        memory = self.memory
        n_samples = len(memory.samples)
        if memory.ledger.is_spent and n_samples >= MIN_BIG_LOOKS:
            return 0, self.is_leaning
        is_known = memory.costs.is_sure and n_samples >= PAIRED_REQUESTS
        if is_known and n_samples % PAIRED_EVERY:
            return 0, True
        return MAX_PAIRS, self.is_leaning

    def _retries(self, traffic: Traffic) -> bool:
        """Off: whether this request tries drafting again; too seldom to need the ledger's leave."""
        memory = self.memory
        if memory.plain_tokens >= memory.retry_tokens or memory.plain_requests >= RETRY_REQUESTS:
            return True
        if memory.plain_tokens < RETRY_TOKENS[0]:
            return False
        bucket = bucket_of(traffic.prompt_tokens)
        before, now = memory.verdict_step_ms.get(bucket), memory.step_ms.get(bucket)
        has_moved = before and now and abs(now / before - 1) > MOVED_STEP
        return bool(has_moved) or situation(traffic) not in memory.kinds

    @property
    def is_idle(self) -> bool:
        return not self._active

    def conclude(self, request: "RequestPacer", now_s: float) -> None:
        """Take in what one request showed, and change the verdict where that is enough."""
        self._active.remove(request)
        self._take_in(request, now_s)
        self.n_concluded += 1
        self.refresh()
        self._on_concluded(request)

    def _take_in(self, request: "RequestPacer", now_s: float) -> None:
        memory = self.memory
        report = request.report()
        self._forget_prices()
        memory.ledger.decode += report.decode
        memory.reply_tokens += (1 - LENGTH_FADE) * (report.tokens - memory.reply_tokens)
        memory.plain_tokens += report.plain_tokens
        memory.plain_requests += 1
        if request.mode != "on":
            memory.ledger.trial_loss += report.loss
        if request.is_disturbed:
            return
        for step_ms in report.steps_ms:
            old = memory.step_ms.get(report.bucket, step_ms)
            memory.step_ms[report.bucket] = STEP_FADE * old + (1 - STEP_FADE) * step_ms
        memory.levels.hear(request.kind, request.level)
        memory.costs.hear(report.pairs)
        conclusion: dict[Phase, Callable[[RequestPacer, Report, float], None]] = {
            "measuring": self._conclude_measuring,
            "on": self._conclude_on,
            "off": self._conclude_off,
        }
        if request.mode == memory.phase:
            conclusion[memory.phase](request, report, now_s)

    def _conclude_measuring(self, request: "RequestPacer", report: "Report", now_s: float) -> None:
        memory = self.memory
        if report.sample.total_rounds:
            memory.samples = [*memory.samples, report.sample][-EVIDENCE:]
            memory.kinds = sorted({*memory.kinds, situation(request.traffic)})
        if not memory.samples or not memory.costs.pairs:
            return
        policy, fixed = self.policy, self.fixed[0]
        decision = judge(policy, fixed, was_on=memory.was_on)
        if decision is None and memory.ledger.is_spent and is_unpromising(policy, fixed):
            decision = False
        if decision and self._gains_lately():
            self._enter("on", now_s, words.why_on(policy))
        elif decision is False:
            self._enter("off", now_s, words.why_off(fixed))

    def _gains_lately(self) -> bool:
        """Whether the requests that the figure of On would rest on show a gain, too."""
        return math.expm1(self.weighed(RECENT).theta) >= 0.01

    def _conclude_on(self, request: "RequestPacer", report: "Report", now_s: float) -> None:
        memory, sample, ledger = self.memory, report.sample, self.memory.ledger
        if request.n_pairs:
            memory.bracket_in = BRACKET_REQUESTS
        if report.has_moved or not memory.costs.is_sure:
            memory.bracket_in = min(memory.bracket_in, BRACKET_SOON)
            if report.loss > STOP_LOSS:
                memory.bracket_in = 0
        if sample.total_rounds:
            memory.samples = [*memory.samples, sample][-RECENT:]
        # By the costs that pairs showed: the plain step itself was last timed some time ago.
        saved = sample.tokens - sample.cost(memory.costs.table(sample.bucket))
        drop = min(max(SAVINGS_SHARE * memory.reply_tokens, SAVINGS_DROP[0]), SAVINGS_DROP[1])
        ledger.saved += max(saved, -MAX_SAVINGS_LOSS * drop)
        ledger.peak = max(ledger.peak, ledger.saved)
        if self.forced or not memory.samples:
            return
        if ledger.peak - ledger.saved > drop:
            self._enter("measuring", now_s, words.WHY_SAVINGS)
        elif self._is_doubtful():
            self._enter("measuring", now_s, words.WHY_DOUBT)

    def _is_doubtful(self) -> bool:
        """On: whether the gain is gone, from what the figure shows or from the last requests."""
        lately = self.weighed(LATELY)
        return (
            whole_percent(math.expm1(self.policy.theta)) < 1
            or (lately.n >= LATELY and lately.theta <= 0)
            or min(lately.likelihood_ratio, self.policy.likelihood_ratio) <= DOUBT
        )

    def _conclude_off(self, request: "RequestPacer", report: "Report", now_s: float) -> None:
        memory = self.memory
        if not request.n_pairs or not report.sample.total_rounds:
            return
        memory.plain_tokens = memory.plain_requests = 0
        doubled = min(2 * memory.retry_tokens, RETRY_TOKENS[1])
        memory.retry_tokens = RETRY_TOKENS[0] if report.gain > 1 else doubled
        memory.samples = [*memory.samples, report.sample][-EVIDENCE:]
        memory.kinds = sorted({*memory.kinds, situation(request.traffic)})
        has_hope = memory.has_hope or self.policy.theta > 0
        memory.has_hope = report.gain > 1
        if report.gain > RETRY_GAIN or (report.gain > 1 and has_hope):
            self._enter("measuring", now_s, words.WHY_RETRY)
            memory.costs.pairs = []
            memory.costs.hear(report.pairs)
            memory.samples = [report.sample]
        else:
            memory.verdict_step_ms.update(memory.step_ms)

    def _enter(self, phase: Phase, now_s: float, why: str) -> None:
        """Change the verdict. What was measured stays for its figure, until measuring again."""
        memory = self.memory
        memory.phase, memory.since_s, memory.why = phase, now_s, why
        memory.verdict_step_ms = dict(memory.step_ms)
        memory.plain_tokens = memory.plain_requests = 0
        if phase == "measuring":
            memory.samples, memory.kinds = [], []
            memory.ledger.grant(AGAIN_LOSS)
        elif phase == "on":
            memory.samples = memory.samples[-RECENT:]
            memory.bracket_in = BRACKET_REQUESTS
            memory.retry_tokens = RETRY_TOKENS[0]
            memory.ledger.saved = memory.ledger.peak = 0.0
            memory.was_on = True
        self._forget_prices()

    def tables(self) -> list[list[float]]:
        """Context bucket → costs by depth."""
        return [self.memory.costs.table(bucket) for bucket in range(len(BUCKETS) + 1)]


def situation(traffic: Traffic) -> str:
    """What a re-try while Off is for: kind and context, as one word."""
    return f"{kind_of(traffic)}/{bucket_of(traffic.prompt_tokens)}"


class AwaitedPacer:
    """The pacer of a request that may fail, be cancelled or be over before it decodes.

    request  its RequestPacer from the first plan on; None: nothing was begun, nothing to conclude
    """

    def __init__(self, controller: Controller, traffic: Traffic, now_s: float) -> None:
        self._controller = controller
        self._traffic = traffic
        self._now_s = now_s
        self.request: RequestPacer | None = None

    def plan(self) -> Plan:
        if self.request is None:
            self.request = self._controller.begin(self._traffic, self._now_s)
        return self.request.plan()

    def observe(self, round: Round) -> None:
        assert self.request is not None, "a round follows a plan"
        self.request.observe(round)

    def end(self) -> None:
        if self.request is not None:
            self.request.end()


@dataclass(frozen=True)
class Report:
    """What one request adds, worked out once it has ended.

    decode      ps of all of it
    loss        ps that its drafts cost beyond what they gave; below 0 is a gain
    gain        tokens a ps of its drafted rounds, 0 where there were none
    steps_ms    settled plain step times, one for each stretch
    has_moved   its rounds took longer or shorter than costs say, many in a row
    """

    bucket: int
    tokens: int
    plain_tokens: int
    decode: float
    loss: float
    gain: float
    steps_ms: list[float]
    pairs: list[CostPair]
    sample: Sample
    has_moved: bool


class Account:
    """What one stretch of drafting has saved so far, at known costs and by the clock.

    The clock's account is the rougher one, as the plain step was timed some time ago; but it is
    the first to see that rounds have become much dearer.
    """

    def __init__(self, costs: Sequence[float], step_ms: float | None) -> None:
        self._costs = costs
        self._step_ms = step_ms
        self._saved = self._peak = self._timed = self._timed_peak = 0.0

    def has_fallen(self, round: Round) -> bool:
        """Whether, with this round, either is further below its peak than a request may lose."""
        tokens = round.accepted + 1
        self._saved += tokens - self._costs[round.depth]
        self._peak = max(self._peak, self._saved)
        fall = self._peak - self._saved
        if self._step_ms:
            limit = GAP_STEPS * self._costs[round.depth]
            self._timed += tokens - min(round.round_ms / self._step_ms, limit)
            self._timed_peak = max(self._timed_peak, self._timed)
            fall = max(fall, (self._timed_peak - self._timed) / CLOCK_DOUBT)
        return fall > STOP_LOSS


class RequestPacer:
    """Paces one request: a course of stretches, as its controller's phase asks."""

    def __init__(
        self,
        controller: Controller,
        traffic: Traffic,
        n_pairs: int,
        now_s: float,
        *,
        drafts_on: bool,
    ) -> None:
        memory = controller.memory
        self._controller = controller
        self.traffic = traffic
        self.kind = kind_of(traffic)
        self.mode: Phase = memory.phase
        self.n_pairs = n_pairs
        self.begun_s = now_s
        self.number = memory.n_requests
        self.bucket = bucket_of(traffic.prompt_tokens)
        self.costs = memory.costs.table(self.bucket)
        self.level = RequestLevel(memory.levels.table(self.kind))
        self.stretches: list[Stretch] = []
        self.is_disturbed = False
        self.is_over = False
        self.n_stops = 0
        self.begun_after = controller.n_concluded
        # What the course depends on is settled here, so that no later request can change it.
        is_short = memory.reply_tokens < SHORT_REPLY_TOKENS
        self._pair_tokens = PAIR_TOKENS // 2 if is_short else PAIR_TOKENS
        self._drafts_on = drafts_on
        self._depths = controller.depths
        self._seed = controller.seed
        self._hopes = hopes(memory.costs) if n_pairs else []
        self._tokens_ahead = min(max(memory.reply_tokens, TOKENS_AHEAD[0]), TOKENS_AHEAD[1])
        self._exit_loss = min(max(EXIT_SHARE * memory.reply_tokens, EXIT_LOSS[0]), EXIT_LOSS[1])
        self._stopped_at: int | None = None  # trial rounds after which On would have stopped
        self._n_trial_rounds = 0
        self._course = self._run()
        self._hear: Callable[[Round], None] = lambda _: None

    def plan(self) -> Plan:
        return next(self._course)

    def observe(self, round: Round) -> None:
        self._hear(round)

    def disturb(self) -> None:
        """Something else used the machine: served as planned, but nothing is learnt from it."""
        self.is_disturbed = True

    def end(self) -> None:
        """The reply is over, however it ended. Safe to call twice."""
        if self.is_over:
            return
        self.is_over = True
        self._course.close()
        took_s = math.fsum(stretch.took_ms for stretch in self.stretches) / 1000
        self._controller.conclude(self, self.begun_s + took_s)

    # --- the course

    def _run(self) -> Generator[Plan, None, None]:
        if self.n_pairs:
            yield from self._pairs()
        if self._drafts_on and self._stopped_at is None:
            yield from self._drafts()
        self._open("plain")
        while True:
            yield Plan(0, WHOLE_REQUEST_TOKENS)

    def _pairs(self) -> Generator[Plan, None, None]:
        """Plain and drafted stretches in ABBA order, until enough or the request is let go."""
        coin = random.Random(f"{self._seed}:{self.number}").random() < 0.5
        n_tokens, n_dropped = self._pair_tokens, DROPPED_STEPS
        if coin:
            self._open("plain")
            yield Plan(0, n_dropped)
            n_dropped = 0
        for pair in range(self.n_pairs):
            for is_draft in (True, False) if coin else (False, True):
                if is_draft:
                    yield from self._trial(pair, n_tokens)
                else:
                    self._open("baseline", pair)
                    yield Plan(0, n_tokens + n_dropped)
                n_dropped = 0
            coin = not coin
            if self._loses():
                return

    def _trial(self, pair: int, n_tokens: int) -> Generator[Plan, None, None]:
        rounds = self._open("trial", pair)
        hoped = [cost * hope for cost, hope in zip(self.costs, self._hopes, strict=True)]
        depth, _ = self.level.best_depth(hoped, self._depths)
        yield Plan(depth, n_tokens)
        for round in rounds:
            self._n_trial_rounds += 1
            self.level.hear(round.depth, round.accepted)
            if self._stopped_at is None and self._should_stop(self._n_trial_rounds):
                self._stopped_at = self._n_trial_rounds

    def _loses(self) -> bool:
        if self._stopped_at is None:
            return False
        lost = math.fsum(
            self.costs[round.depth] - round.accepted - 1
            for stretch in self.stretches
            if stretch.purpose == "trial"
            for round in stretch.rounds
        )
        return lost >= self._exit_loss

    def _should_stop(self, n_rounds: int) -> bool:
        depth, value = self.level.best_depth(self.costs, self._depths)
        return n_rounds >= LEAST_ROUNDS and not self._pays(depth, value)

    def _pays(self, depth: int, value: float) -> bool:
        return self.level.pays(self.costs, depth, value, self._tokens_ahead)

    def _drafts(self) -> Generator[Plan, None, None]:
        """Rounds at the depth that pays here; plainly for a while where none does."""
        level, costs, depths = self.level, self.costs, self._depths
        step_ms = self._controller.memory.step_ms.get(self.bucket)
        n_plain, most = PLAIN_TOKENS
        n_least = LEAST_ROUNDS
        while True:
            rounds = self._open("draft")
            account = Account(costs, step_ms)
            depth, value = level.best_depth(costs, depths)
            while len(rounds) < n_least or self._pays(depth, value):
                yield PLANS[depth]
                last = rounds[-1]
                level.hear(last.depth, last.accepted)
                if account.has_fallen(last):
                    break
                depth, value = level.best_depth(costs, depths)
            self.n_stops += 1
            steps = self._open("plain")
            yield Plan(0, n_plain)
            step_ms = settled_mean([step.round_ms for step in steps[1:]]) or step_ms
            n_plain, n_least = min(2 * n_plain, most), 1
            level.relax()

    def _open(self, purpose: Any, pair: int = -1) -> list[Round]:
        stretch = Stretch(purpose, [], pair)
        self.stretches.append(stretch)
        self._hear = self._hear_plain if purpose == "plain" else stretch.rounds.append
        return stretch.rounds

    def _hear_plain(self, round: Round) -> None:
        stretch = self.stretches[-1]
        if len(stretch.rounds) < KEPT_STEPS:
            stretch.rounds.append(round)
        else:
            self.hear_more(1, round.round_ms)

    def hear_more(self, n_steps: int, took_ms: float) -> None:
        """Plain steps of a stretch that is long already, of which only the sums are kept."""
        more = self.stretches[-1].more
        more[0] += n_steps
        more[1] += took_ms

    # --- what it showed

    def report(self) -> Report:
        stretches = [stretch for stretch in self.stretches if stretch.rounds]
        steps = self._steps(stretches)
        decode = loss = 0.0
        tokens = plain_tokens = drafted_tokens = 0
        for stretch, step_ms in zip(stretches, steps, strict=True):
            n = stretch.tokens
            spent = stretch.awake_ms(step_ms, self.costs) / step_ms if step_ms else n
            tokens += n
            if stretch.purpose in ("trial", "draft"):
                decode += spent
                loss += spent - n
                drafted_tokens += n
            else:
                decode += n
                plain_tokens += n
        return Report(
            bucket=self.bucket,
            tokens=tokens,
            plain_tokens=plain_tokens,
            decode=decode,
            loss=loss,
            gain=drafted_tokens / (drafted_tokens + loss) if drafted_tokens else 0.0,
            steps_ms=self._own_steps(stretches),
            pairs=self._cost_pairs(stretches),
            sample=self._sample(stretches, tokens),
            has_moved=self._has_moved(stretches),
        )

    def _own_steps(self, stretches: Sequence[Stretch]) -> list[float]:
        found = [
            settled_mean([round.round_ms for round in stretch.rounds[1:]])
            for stretch in stretches
            if stretch.purpose in ("baseline", "plain") and len(stretch.rounds) > PAIR_TOKENS // 4
        ]
        return [step_ms for step_ms in found if step_ms]

    def _steps(self, stretches: Sequence[Stretch]) -> list[float | None]:
        """The plain step nearest before each stretch, else after it, else what it was lately."""
        latest = self._controller.memory.step_ms.get(self.bucket)
        own = self._own_steps(stretches)
        latest = own[0] if own else latest
        steps: list[float | None] = []
        for stretch in stretches:
            found = self._own_steps([stretch])
            latest = found[0] if found else latest
            steps.append(latest)
        return steps

    def _cost_pairs(self, stretches: Sequence[Stretch]) -> list[CostPair]:
        found: list[CostPair] = []
        halves: dict[int, dict[str, list[Round]]] = {}
        before: Stretch | None = None
        for stretch in stretches:
            rounds = stretch.rounds
            if stretch.purpose == "baseline":
                n_dropped = DROPPED_STEPS if before is None else 1
                halves.setdefault(stretch.pair, {})["baseline"] = rounds[n_dropped:]
            elif stretch.purpose == "trial":
                is_switch = before is None or before.purpose != "trial"
                halves.setdefault(stretch.pair, {})["trial"] = rounds[1 if is_switch else 0 :]
            before = stretch
        for pair in halves.values():
            trial, baseline = pair.get("trial"), pair.get("baseline")
            if trial and baseline:
                priced = cost_pair(
                    trial[0].depth,
                    bucket_of(trial[0].context_tokens),
                    [round.round_ms for round in trial],
                    [round.round_ms for round in baseline],
                )
                found += [priced] if priced else []
        return found

    def _sample(self, stretches: Sequence[Stretch], tokens: int) -> Sample:
        """What its rounds gave; the last one as it was, cut by the reply's end: a cost, too.

        Trials cover half of a measured reply, and the end falls into one as often.
        """
        sample = Sample(bucket=self.bucket)
        n_trial = 0
        for stretch in stretches:
            is_trial = stretch.purpose == "trial"
            if not is_trial and stretch.purpose != "draft":
                continue
            for round in stretch.rounds:
                n_trial += is_trial
                sample.hear_shallower(round.depth, round.accepted)
                if not (is_trial and self._stopped_at is not None and n_trial > self._stopped_at):
                    sample.hear(round.depth, round.drafted, round.accepted)
        if self._stopped_at is not None:
            sample.plain_tokens = max(0, tokens - sample.tokens)
        elif self.n_stops:
            sample.plain_tokens = sum(
                stretch.tokens for stretch in stretches if stretch.purpose == "plain"
            )
        return sample

    def _has_moved(self, stretches: Sequence[Stretch]) -> bool:
        step_ms = self._controller.memory.step_ms.get(self.bucket)
        if self.mode != "on" or not step_ms:
            return False
        run = 0
        for stretch in stretches:
            if stretch.purpose != "draft":
                continue
            for round in stretch.rounds:
                change = round.round_ms / (step_ms * self.costs[round.depth]) - 1
                run = run + 1 if abs(change) > MOVED_COST else 0
                if run >= MOVED_ROUNDS:
                    return True
        return False


def hopes(costs: Costs) -> list[float]:
    """[depth] → share of its cost that a trial hopes for: less, the fewer pairs it was timed in."""
    timed = Counter(pair.depth for pair in costs.pairs)
    return [1 - OPTIMISM / (1 + timed[depth]) for depth in range(MAX_DEPTH + 1)]


PLANS = tuple(Plan(depth, 1) for depth in range(MAX_DEPTH + 1))
