"""One loaded model's controller: from its requests' reports to its verdict, and back.

Owns what is known of the model (`Memory`), which course a request takes, and when the verdict
changes. Leaves the course itself to pacer.py, estimates to measure.py, the rules to decide.py and
the words to status.py. No clock: times are arguments. One thread at a time; but `status` is a
frozen record that any may read, and any may `disturb`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlx_worker.control import status as words
from mlx_worker.control.decide import DOUBT, MIN_BIG_LOOKS, Evidence, is_unpromising, judge, weigh
from mlx_worker.control.measure import (
    FULL_STEPS,
    N_BUCKETS,
    PAIR_TOKENS,
    Costs,
    Levels,
    Priced,
    Sample,
    bucket_of,
)
from mlx_worker.control.pacer import (
    KEPT_STEPS,
    SETTLE_STEPS,
    SHORT_REPLY_TOKENS,
    STOP_LOSS,
    Course,
    Phase,
    Report,
    RequestPacer,
    kind_of,
    pair_tokens,
)
from mlx_worker.records import (
    MAX_DEPTH,
    Disturbance,
    Plan,
    Round,
    Status,
    Traffic,
    whole_percent,
)

MAX_PAIRS = 8  # pairs a request; more of one request would be one opinion asked twice
PAIRED_REQUESTS = 8  # requests of a measurement in pairs; if that didn't decide, what is close is
PAIRED_EVERY = 4  # the policy's own gain, so all but one in so many draft as if On
UNPAIRED_REQUESTS = 3  # in a row that were too short for a pair: then whole requests are compared
PAIRED_REPLY = 2 * (SETTLE_STEPS + PAIR_TOKENS)  # tokens of a reply that ends that
TRY_PAIRS = 4  # pairs of a re-try while Off
BRACKETS = (  # while On: requests, and ps for each that it costs, until costs are timed again …
    (12, 100.0),  # … usually: 1 % of decode time
    (5, 33.0),  # … where rounds have moved, or few pairs timed them yet
    (0, 20.0),  # … where requests took far longer than they should; at once where pairs contradict
)
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fall into (0, 1) evenly and never in step
BRACKET_DRAWN = 2  # of those that are due, one in so many
OVERRUN_SHARE = 0.2  # of decode time since costs were timed that rounds may take beyond them
MAX_LOSS = 50.0  # ps that trials may cost on top of …
MAX_LOSS_SHARE = 0.005  # … this share of all decode time
LEANING_Z = 0.5  # standard errors of gain at which the rest of a measured request drafts
AGAIN_LOSS = 20.0  # ps that measuring again may cost, however much was spent before
SAVINGS_DROP = (60.0, 250.0)  # ps that savings may fall below their peak while On: in between …
SAVINGS_SHARE = 0.5  # … this share of a typical reply
MAX_SAVINGS_LOSS = 1 / 3  # share of it that one request may account for: one is no trend
RECENT = 60  # requests that the figure of On rests on
LATELY = 30  # requests of those that are asked whether there is still a gain
EVIDENCE = 400  # requests that a measurement may take in
RETRY_TOKENS = (2_500, 10_000)  # plain tokens between re-tries while Off, doubling up to
RETRY_REQUESTS = 40  # …or so many requests, where replies are short
RETRY_GAIN = 1.10  # tokens a ps of a re-try that asks for a new measurement
MOVED_STEP = 0.20  # share by which the plain step moved while Off, so that a re-try comes early
LENGTH_FADE = 0.9  # memory of reply lengths
STEP_FADE = 0.8  # memory of the plain step's time, a stretch


def situation(traffic: Traffic) -> str:
    """What a re-try while Off is for: kind and context, as one word."""
    return f"{kind_of(traffic)}/{bucket_of(traffic.prompt_tokens)}"


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
    step_ms       bucket → the plain step, lately
    verdict_step_ms  the same when the verdict fell
    n_unbracketed, unbracketed  requests, and ps of them, since costs were timed while On
    overrun       ps that their rounds took beyond what costs say
    haste         how soon they are to be timed again, an index of BRACKETS
    has_hope      the last re-try gained, if not enough
    is_wasted     the last trial taught nothing, as the machine was disturbed
    n_unpaired    requests in a row that should have timed a pair and were too short for one
    whole_steps   bucket → ms of the plain steps of requests, for the next one's rounds
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
    n_unbracketed: int = 0
    unbracketed: float = 0.0
    overrun: float = 0.0
    haste: int = 0
    was_on: bool = False
    was_off: bool = False
    has_hope: bool = False
    is_wasted: bool = False
    n_unpaired: int = 0
    whole_steps: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def time_costs_later(self) -> None:
        """They were timed, or couldn't be: not before it is time again."""
        self.n_unbracketed, self.unbracketed, self.overrun, self.haste = 0, 0.0, 0.0, 0


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
        on_concluded: Callable[[RequestPacer], None] = lambda _: None,
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
        self._disturbances: deque[Disturbance] = deque()  # not heard yet
        self._changed: list[str] = []  # for good, since the last request began
        self._priced = Priced()
        self._variance = 0.0  # of the costs, in what follows
        self._policy: Evidence | None = None
        self._fixed: tuple[Evidence, int] | None = None
        if forced:
            self.memory.phase = "on"
        self.refresh()

    def begin(self, traffic: Traffic, now_s: float) -> RequestPacer:
        """The pacer of one request. Requests that overlap are served, but teach nothing."""
        memory = self.memory
        self._hear_disturbances()
        changed, self._changed = self._changed, []
        if changed:
            self._doubt()
        memory.n_requests += 1
        request = RequestPacer(self, traffic, self._course(traffic), now_s)
        request.changed = changed
        self._active.append(request)
        if memory.n_requests == 1:
            self.refresh()
        if len(self._active) > 1:
            for other in self._active:
                other.disturb()
        return request

    def disturb(self, disturbance: Disturbance) -> None:
        """Something happened to the machine, so what decodes now says nothing. Any thread."""
        self._disturbances.append(disturbance)

    def change(self, reasons: Sequence[str]) -> None:
        """The machine isn't as it was, and stays so; heard before the next request begins."""
        self._changed += [reason for reason in reasons if reason not in self._changed]

    def _hear_disturbances(self) -> None:
        """Between requests and at the end of each, on the thread that runs them."""
        while self._disturbances:
            disturbance = self._disturbances.popleft()
            for request in self._active:
                request.disturb(disturbance.reason)
            if disturbance.lasts:
                self.change([disturbance.reason])

    def _doubt(self) -> None:
        """What was timed may not hold any more: see soon, at no more than that usually costs."""
        if self.memory.phase == "on":
            self.memory.haste = len(BRACKETS) - 1
        elif self.memory.phase == "off":
            self.memory.retry_tokens = RETRY_TOKENS[0]

    def await_request(self, traffic: Traffic, now_s: float) -> AwaitedPacer:
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
        priced = self.priced
        if self._policy is None:
            self._policy = weigh(priced.taus, priced.weights, self.memory.costs.variance)
        return self._policy

    def weighed(self, n: int) -> Evidence:
        """Evidence of the last n samples on drafting as it ran."""
        priced = self.priced
        return weigh(priced.taus[-n:], priced.weights[-n:], self.memory.costs.variance)

    @property
    def priced(self) -> Priced:
        """The samples at the costs as they are now."""
        memory = self.memory
        is_new = self._priced.take_in(memory.samples, self.tables())
        if is_new or memory.costs.variance != self._variance:
            self._policy = self._fixed = None
            self._variance = memory.costs.variance
        return self._priced

    @property
    def fixed(self) -> tuple[Evidence, int]:
        """Evidence on the best fixed depth that half of the samples ran at, and that depth."""
        tables = self.priced.tables
        if self._fixed is None:
            candidates = [(self._at(depth, tables), -depth) for depth in self.depths]
            priced = [(found.theta, depth, found) for found, depth in candidates if found]
            if priced:
                _, depth, found = max(priced, key=lambda one: one[:2])
                self._fixed = found, -depth
            else:
                self._fixed = self.policy, self.depths[0]
        return self._fixed

    def _at(self, depth: int, tables: Sequence[Sequence[float]]) -> Evidence | None:
        samples = self.memory.samples
        if 2 * sum(sample.deepest >= depth for sample in samples) < len(samples):
            return None
        priced = [sample.tau_at(depth, tables[sample.bucket]) for sample in samples]
        taus, weights, noises = zip(*priced, strict=True)
        return weigh(taus, weights, self.memory.costs.variance, noises)

    # --- one request

    def _course(self, traffic: Traffic) -> Course:
        memory = self.memory
        if self.forced:
            return Course(drafts_on=True)
        bucket = bucket_of(traffic.prompt_tokens, traffic.has_grammar)
        if memory.phase == "measuring":
            return self._measuring_course(bucket)
        if memory.phase == "on":
            return self._bracket(bucket)
        if not self._retries(traffic):
            return Course()
        return Course(whole="trial") if self._is_short else Course(TRY_PAIRS)

    @property
    def _is_short(self) -> bool:
        """Whether replies are too short for both halves of a pair, so that requests take turns."""
        return self.memory.n_unpaired >= UNPAIRED_REQUESTS

    def _has_whole_steps(self, bucket: int) -> bool:
        return len(self.memory.whole_steps.get(bucket, ())) >= FULL_STEPS // 2

    def _measuring_course(self, bucket: int) -> Course:
        memory = self.memory
        n_samples = len(memory.samples)
        if memory.ledger.is_spent and (n_samples >= MIN_BIG_LOOKS or memory.is_wasted):
            return Course(drafts_on=self.is_leaning and bool(memory.costs.pairs))
        is_known = memory.costs.is_sure and n_samples >= PAIRED_REQUESTS
        if is_known and not self._is_drawn(PAIRED_EVERY):
            return Course(drafts_on=True)
        if self._is_short:
            return Course(whole="trial" if self._has_whole_steps(bucket) else "plain")
        return Course(MAX_PAIRS, self.is_leaning)

    def _bracket(self, bucket: int) -> Course:
        """On: drafts, beside plain steps of its own or of a request before where it is time."""
        if not self._is_bracket_due() or (self._is_short and self._has_whole_steps(bucket)):
            return Course(drafts_on=True)
        return Course(whole="plain") if self._is_short else Course(1, drafts_on=True)

    def _is_bracket_due(self) -> bool:
        memory = self.memory
        if memory.costs.suspicion and memory.haste:
            return True
        n_requests, times = BRACKETS[memory.haste]
        if memory.n_unbracketed + 1 < n_requests or not self._is_drawn(BRACKET_DRAWN):
            return False
        gain = 1 - math.exp(-self.policy.theta) if memory.samples else 0.0
        cost = gain * (SETTLE_STEPS + pair_tokens(memory.reply_tokens))
        return memory.unbracketed >= times * cost

    def _is_drawn(self, every: int) -> bool:
        """One request in so many, in no rhythm: of traffic that alternates, no kind is left out."""
        return (self.seed + self.memory.n_requests) * GOLDEN % 1 * every < 1

    def _retries(self, traffic: Traffic) -> bool:
        """Off: whether this request tries drafting again; too seldom to need the ledger's leave."""
        memory = self.memory
        if memory.plain_tokens >= memory.retry_tokens or memory.plain_requests >= RETRY_REQUESTS:
            return True
        if memory.plain_tokens < RETRY_TOKENS[0]:
            return False
        bucket = bucket_of(traffic.prompt_tokens, traffic.has_grammar)
        before, now = memory.verdict_step_ms.get(bucket), memory.step_ms.get(bucket)
        has_moved = before and now and abs(now / before - 1) > MOVED_STEP
        return bool(has_moved) or situation(traffic) not in memory.kinds

    @property
    def is_idle(self) -> bool:
        return not self._active

    def conclude(self, request: RequestPacer, now_s: float) -> None:
        """Take in what one request showed, and change the verdict where that is enough."""
        self._hear_disturbances()
        self._active.remove(request)
        self._take_in(request, now_s)
        self.n_concluded += 1
        self.refresh()
        self._on_concluded(request)

    def _take_in(self, request: RequestPacer, now_s: float) -> None:
        memory = self.memory
        report = request.report
        memory.ledger.decode += report.decode
        memory.reply_tokens += (1 - LENGTH_FADE) * (report.tokens - memory.reply_tokens)
        memory.plain_tokens += report.plain_tokens
        memory.plain_requests += 1
        if request.mode != "on":
            memory.ledger.trial_loss += report.loss
        if request.is_disturbed:
            self._take_in_disturbed(request, now_s)
            return
        memory.is_wasted = False
        for step_ms in report.steps_ms:
            old = memory.step_ms.get(report.bucket, step_ms)
            memory.step_ms[report.bucket] = STEP_FADE * old + (1 - STEP_FADE) * step_ms
        memory.levels.hear(request.kind, request.level)
        memory.costs.hear_tails(report.rounds_ms, report.plain_ms)
        memory.costs.hear(report.pairs)
        self._count_pairs(request, report)
        conclusion: dict[Phase, Callable[[RequestPacer, Report, float], None]] = {
            "measuring": self._conclude_measuring,
            "on": self._conclude_on,
            "off": self._conclude_off,
        }
        if request.mode == memory.phase:
            conclusion[memory.phase](request, report, now_s)

    def _take_in_disturbed(self, request: RequestPacer, now_s: float) -> None:
        """Its times teach nothing. What it would have told is asked again, but at a bounded price.

        Else a machine that something disturbs in each request would be measured for ever.
        """
        memory = self.memory
        memory.is_wasted = memory.is_wasted or request.course.times
        if request.mode == "off" and request.course.times:
            memory.plain_tokens = memory.plain_requests = 0
            memory.retry_tokens = RETRY_TOKENS[0]
        if request.mode != "on":
            return
        if request.course.times:
            memory.time_costs_later()
        fall, drop = self._save(request.report)
        if memory.phase == "on" and not self.forced and fall > drop:
            self._enter("measuring", now_s, words.WHY_SAVINGS)

    def _count_pairs(self, request: RequestPacer, report: Report) -> None:
        """Whether replies have become too short for pairs, or long enough again."""
        memory, bucket = self.memory, report.bucket
        if report.pairs:
            memory.whole_steps.pop(bucket, None)
        if report.whole_steps_ms:
            steps = [*memory.whole_steps.get(bucket, ()), *report.whole_steps_ms]
            memory.whole_steps[bucket] = steps[-KEPT_STEPS:]
        if report.tokens >= PAIRED_REPLY or (request.course.n_pairs and report.pairs):
            memory.n_unpaired = 0
        elif request.course.n_pairs:
            memory.n_unpaired += 1

    def _conclude_measuring(self, request: RequestPacer, report: Report, now_s: float) -> None:
        memory = self.memory
        if report.sample.total_rounds:
            memory.samples = [*memory.samples, report.sample][-EVIDENCE:]
            memory.kinds = sorted({*memory.kinds, situation(request.traffic)})
        if not memory.samples or not memory.costs.pairs:
            return
        if memory.costs.is_doubtful and not memory.ledger.is_spent:
            return  # one request on a machine that was busy for a while could price all the others
        policy, fixed = self.policy, self.fixed[0]
        decision = judge(policy, fixed, was_on=memory.was_on, was_off=memory.was_off)
        if decision is None and memory.ledger.is_spent and is_unpromising(policy, fixed):
            decision = False
        if decision and self._gains_lately():
            self._enter("on", now_s, words.why_on(policy))
        elif decision is False:
            self._enter("off", now_s, words.why_off(fixed))

    def _gains_lately(self) -> bool:
        """Whether the requests that the figure of On would rest on show a gain, too."""
        return math.expm1(self.weighed(RECENT).theta) >= 0.01

    def _conclude_on(self, request: RequestPacer, report: Report, now_s: float) -> None:
        memory, sample = self.memory, report.sample
        memory.n_unbracketed += 1
        memory.unbracketed += report.decode
        memory.overrun += report.overrun
        if report.pairs:  # none where the client left too soon: then the next request times them
            memory.time_costs_later()
        overrun = memory.overrun - OVERRUN_SHARE * memory.unbracketed
        if memory.costs.suspicion or overrun > STOP_LOSS:
            memory.haste = 2
        elif report.has_moved or not memory.costs.is_sure:
            memory.haste = max(memory.haste, 1)
        if sample.total_rounds:
            memory.samples = [*memory.samples, sample][-RECENT:]
        fall, drop = self._save(report)
        if self.forced or not memory.samples:
            return
        if max(fall, overrun) > drop:
            self._enter("measuring", now_s, words.WHY_SAVINGS)
        elif self._is_doubtful():
            self._enter("measuring", now_s, words.WHY_DOUBT)

    def _save(self, report: Report) -> tuple[float, float]:
        """Count what drafting gave; how far savings are below their peak, and may be.

        By the costs that pairs showed: the plain step itself was last timed some time ago.
        """
        memory, sample, ledger = self.memory, report.sample, self.memory.ledger
        saved = sample.tokens - sample.cost(memory.costs.table(sample.bucket))
        drop = min(max(SAVINGS_SHARE * memory.reply_tokens, SAVINGS_DROP[0]), SAVINGS_DROP[1])
        ledger.saved += max(saved, -MAX_SAVINGS_LOSS * drop)
        ledger.peak = max(ledger.peak, ledger.saved)
        return ledger.peak - ledger.saved, drop

    def _is_doubtful(self) -> bool:
        """On: whether the gain is gone, from what the figure shows or from the last requests."""
        policy = self.policy
        if whole_percent(math.expm1(policy.theta)) < 1 or policy.likelihood_ratio <= DOUBT:
            return True
        if self.priced.taus[-1] <= 1:
            return False  # a request that gained is no new reason
        lately = self.weighed(LATELY)
        return lately.n >= LATELY and lately.theta <= 0

    def _conclude_off(self, request: RequestPacer, report: Report, now_s: float) -> None:
        memory = self.memory
        if not request.course.times or not report.sample.total_rounds:
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
            memory.costs.renew(report.pairs)
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
            memory.time_costs_later()
            memory.retry_tokens = RETRY_TOKENS[0]
            memory.ledger.saved = memory.ledger.peak = 0.0
            memory.was_on = True
        else:
            memory.was_off = True

    def tables(self) -> list[list[float]]:
        """Bucket → costs by depth."""
        return [self.memory.costs.table(bucket) for bucket in range(N_BUCKETS)]
