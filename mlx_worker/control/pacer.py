"""Pacers: what a session asks before each segment of decoding, and tells after each round.

Owns the course of one request: pairs, drafting or plain decoding, depth by depth, and what its
rounds showed. Leaves the verdict, and which course a request takes, to controller.py. No clock:
times come with the rounds. One thread at a time: the one that runs the session.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import median_low
from typing import TYPE_CHECKING, Any, Literal

from mlx_worker.control.measure import (
    GAP_STEPS,
    PAIR_TOKENS,
    CostPair,
    Costs,
    RequestLevel,
    Sample,
    bucket_of,
    cost_pair,
    settled_mean,
)
from mlx_worker.records import MAX_DEPTH, Plan, Round, Traffic

if TYPE_CHECKING:
    from mlx_worker.control.controller import Controller

WHOLE_REQUEST_TOKENS = 1 << 30  # longer than any reply, so that the plan is asked for once

DROPPED_STEPS = 3  # before drafts that follow the prefill: caches are cold, buffers are new
SETTLE_STEPS = 8  # plain steps after prefill or rounds that are slower than the rest, up to 10 %
LAST_STEPS = 1  # of a stretch: nothing was built beside it, as it was in the first one
SHORT_REPLY_TOKENS = 64  # below this typical length pairs are half as long, so that some fit
OPTIMISM = 0.06  # share by which a depth that was never timed may be cheaper than the curve says
EXIT_LOSS = (3.0, 8.0)  # ps a request may lose in its trial before it is let go: in between …
EXIT_SHARE = 0.04  # … this share of a typical reply
PLAIN_TOKENS = (96, 768)  # a request that doesn't benefit: plain for so long, doubling up to
STOP_LOSS = 16.0  # ps that one request's savings may fall below their peak, whatever is hoped for
CLOCK_DOUBT = 1.5  # by so much more where the clock says so
FOLLOWED_ROUNDS = 3  # of a stretch, each of which may change the depth; then every second one
LEAST_ROUNDS = 2  # rounds before a request may stop drafting: the prior alone never parks it
TOKENS_AHEAD = (32.0, 256.0)  # how long a reply is thought to go on, from how long they were
MOVED_COST = 0.15  # share by which rounds moved while On, so that their costs are timed again …
MOVED_ROUNDS = 8  # … for so many rounds in a row
KEPT_STEPS = 32  # steps of a plain stretch whose times are kept one by one
WHOLE_TRIAL_TOKENS = 32  # of a request that is the drafted half, should it be a long one after all
WHOLE_PAIR = 0  # the pair that a request is half of where replies are too short for both halves

Phase = Literal["measuring", "on", "off"]


@dataclass(frozen=True)
class Course:
    """What a request is for.

    n_pairs    plain and drafted stretches in turn, to compare them
    drafts_on  whether it drafts as if On after those
    whole      where replies are too short for a pair: the half of one that all of it is
    """

    n_pairs: int = 0
    drafts_on: bool = False
    whole: Literal["plain", "trial"] | None = None

    @property
    def times(self) -> bool:
        """Whether it is there to compare drafts with plain decoding."""
        return self.n_pairs > 0 or self.whole is not None


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

    def billed_ms(self, step_ms: float, costs: Sequence[float]) -> float:
        """The same with gaps in which the machine slept cut short; no draft is to blame for those.

        A gap is far longer than such a round should be, and than the others here were; it counts
        as the longest round that is none, as it may have been the draft after all.
        """
        usual = GAP_STEPS * median_low([round.round_ms for round in self.rounds])
        limits = [max(usual, GAP_STEPS * step_ms * cost) for cost in costs]
        billed = (min(round.round_ms, limits[round.drafted]) for round in self.rounds)
        return math.fsum(billed) + self.more[1]


@dataclass(frozen=True)
class Report:
    """What one request adds, worked out once it has ended.

    decode      ps of all of it
    loss        ps that its drafts cost beyond what they gave; below 0 is a gain
    overrun     ps that its rounds took beyond what costs say; below 0: they took less
    gain        tokens a ps of its drafted rounds, 0 where there were none
    steps_ms    settled plain step times, one for each stretch
    whole_steps_ms  of a request that was decoded plainly for a pair's sake, each step
    rounds_ms, plain_ms  times in the groups in which they are cut for pairs
    has_moved   its rounds took longer or shorter than costs say, many in a row
    """

    bucket: int
    tokens: int
    plain_tokens: int
    decode: float
    loss: float
    overrun: float
    gain: float
    steps_ms: list[float]
    whole_steps_ms: list[float]
    rounds_ms: list[list[float]]
    plain_ms: list[list[float]]
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
        self._saved += tokens - self._costs[round.drafted]
        self._peak = max(self._peak, self._saved)
        fall = self._peak - self._saved
        if self._step_ms:
            limit = GAP_STEPS * self._costs[round.drafted]
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
        course: Course,
        now_s: float,
    ) -> None:
        memory = controller.memory
        self._controller = controller
        self.traffic = traffic
        self.kind = kind_of(traffic)
        self.mode: Phase = memory.phase
        self.course = course
        self.begun_s = now_s
        self.number = memory.n_requests
        self.bucket = bucket_of(traffic.prompt_tokens, traffic.has_grammar)
        self.costs = memory.costs.table(self.bucket)  # of rounds by what they proposed …
        self._planned = memory.levels.planned(self.costs)  # … and by what they were to
        self.level = RequestLevel(memory.levels.table(self.kind))
        self.stretches: list[Stretch] = []
        self.is_disturbed = False
        self.disturbed_by: list[str] = []  # reasons, but for requests beside it
        self.changed: Sequence[str] = ()  # what of the machine had changed for good before it
        self.is_over = False
        self.n_stops = 0
        self.begun_after = controller.n_concluded
        # What the course depends on is settled here, so that no later request can change it.
        self._pair_tokens = pair_tokens(memory.reply_tokens)
        self._depths = controller.depths
        self._seed = controller.seed
        self._hopes = hopes(memory.costs) if course.times else []
        self._whole_steps = memory.whole_steps.get(self.bucket, ())
        self._tokens_ahead = min(max(memory.reply_tokens, TOKENS_AHEAD[0]), TOKENS_AHEAD[1])
        self._exit_loss = min(max(EXIT_SHARE * memory.reply_tokens, EXIT_LOSS[0]), EXIT_LOSS[1])
        self._stopped_at: int | None = None  # trial rounds after which On would have stopped
        self._n_trial_rounds = 0
        self._plans = self._run()
        self._hear: Callable[[Round], None] = lambda _: None

    def plan(self) -> Plan:
        return next(self._plans)

    def observe(self, round: Round) -> None:
        self._hear(round)

    def disturb(self, reason: str | None = None) -> None:
        """The machine wasn't its own or as it was: served as planned, but nothing is learnt of it.

        reason  what happened to the machine; None: another request used it
        """
        self.is_disturbed = True
        if reason is not None and reason not in self.disturbed_by:
            self.disturbed_by.append(reason)

    def end(self) -> None:
        """The reply is over, however it ended. Safe to call twice."""
        if self.is_over:
            return
        self.is_over = True
        self._plans.close()
        took_s = math.fsum(stretch.took_ms for stretch in self.stretches) / 1000
        self._controller.conclude(self, self.begun_s + took_s)

    # --- the course

    def _run(self) -> Generator[Plan, None, None]:
        course = self.course
        if course.whole == "plain":
            self._open("baseline", WHOLE_PAIR)
            yield Plan(0, WHOLE_REQUEST_TOKENS)
        elif course.whole == "trial":
            yield from self._trial(WHOLE_PAIR, WHOLE_TRIAL_TOKENS)
        elif course.n_pairs and self.mode == "on":
            self._open("baseline")
            yield Plan(0, SETTLE_STEPS + self._pair_tokens)
        elif course.n_pairs:
            yield from self._pairs()
        if course.drafts_on and self._stopped_at is None:
            yield from self._drafts()
        self._open("plain")
        while True:
            yield Plan(0, WHOLE_REQUEST_TOKENS)

    def _pairs(self) -> Generator[Plan, None, None]:
        """Plain and drafted stretches in ABBA order, until enough or the request is let go."""
        coin = random.Random(f"{self._seed}:{self.number}").random() < 0.5
        n_tokens = self._pair_tokens
        if coin:
            self._open("plain")
            yield Plan(0, DROPPED_STEPS)
        for pair in range(self.course.n_pairs):
            for is_draft in (True, False) if coin else (False, True):
                if is_draft:
                    yield from self._trial(pair, n_tokens)
                else:
                    is_settled = bool(self.stretches) and self.stretches[-1].purpose == "baseline"
                    self._open("baseline", pair)
                    yield Plan(0, n_tokens + (0 if is_settled else SETTLE_STEPS))
            coin = not coin
            if self._loses():
                return

    def _trial(self, pair: int, n_tokens: int) -> Generator[Plan, None, None]:
        rounds = self._open("trial", pair)
        hoped = [cost * hope for cost, hope in zip(self._planned, self._hopes, strict=True)]
        depth, _ = self.level.best_depth(hoped, self._depths)
        yield Plan(depth, n_tokens)
        for round in rounds:
            self._n_trial_rounds += 1
            self._learn(round)
            if self._stopped_at is None and self._should_stop(self._n_trial_rounds):
                self._stopped_at = self._n_trial_rounds

    def _loses(self) -> bool:
        if self._stopped_at is None:
            return False
        lost = math.fsum(
            self.costs[round.drafted] - round.accepted - 1
            for stretch in self.stretches
            if stretch.purpose == "trial"
            for round in stretch.rounds
        )
        return lost >= self._exit_loss

    def _learn(self, round: Round) -> None:
        self.level.hear(round.depth, round.accepted, is_empty=not round.drafted)

    def _should_stop(self, n_rounds: int) -> bool:
        depth, value = self.level.best_depth(self._planned, self._depths)
        return n_rounds >= LEAST_ROUNDS and not self._pays(depth, value)

    def _pays(self, depth: int, value: float) -> bool:
        return self.level.pays(self._planned, depth, value, self._tokens_ahead)

    def _drafts(self) -> Generator[Plan, None, None]:
        """Rounds at the depth that pays here; plainly for a while where none does."""
        level, costs, depths = self.level, self._planned, self._depths
        step_ms = self._controller.memory.step_ms.get(self.bucket)
        n_plain, most = PLAIN_TOKENS
        n_least = LEAST_ROUNDS
        while True:
            rounds = self._open("draft")
            account, n_heard = Account(self.costs, step_ms), 0
            depth, value = level.best_depth(costs, depths)
            while len(rounds) < n_least or self._pays(depth, value):
                yield PLANS[depth]
                if len(rounds) > FOLLOWED_ROUNDS:
                    yield PLANS[depth]
                heard, n_heard = rounds[n_heard:], len(rounds)
                for round in heard:
                    self._learn(round)
                if any([account.has_fallen(round) for round in heard]):
                    break
                depth, value = level.best_depth(costs, depths)
            self.n_stops += 1
            steps = self._open("plain")
            yield Plan(0, n_plain)
            step_ms = settled_mean(times_of(settled_steps(steps))) or step_ms
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

    @cached_property
    def report(self) -> Report:
        """What it adds; asked once it is over, and the same whenever it is asked again."""
        stretches = [stretch for stretch in self.stretches if stretch.rounds]
        steps = self._steps(stretches)
        decode = loss = overrun = 0.0
        tokens = plain_tokens = drafted_tokens = 0
        for stretch, step_ms in zip(stretches, steps, strict=True):
            n = stretch.tokens
            tokens += n
            if stretch.purpose in ("trial", "draft"):
                priced = math.fsum(self.costs[one.drafted] for one in stretch.rounds)
                spent = stretch.billed_ms(step_ms, self.costs) / step_ms if step_ms else priced
                decode += spent
                loss += spent - n
                overrun += spent - priced
                drafted_tokens += n
            else:
                decode += n
                plain_tokens += n
        plain, drafted = self._groups(stretches)
        return Report(
            bucket=self.bucket,
            tokens=tokens,
            plain_tokens=plain_tokens,
            decode=decode,
            loss=loss,
            overrun=overrun,
            gain=drafted_tokens / (drafted_tokens + loss) if drafted_tokens + loss > 0 else 0.0,
            steps_ms=self._own_steps(stretches),
            whole_steps_ms=plain.get(WHOLE_PAIR, []) if self.course.whole == "plain" else [],
            rounds_ms=[times_of(rounds) for rounds in drafted.values()],
            plain_ms=list(plain.values()),
            pairs=self._cost_pairs(plain, drafted),
            sample=self._sample(stretches, tokens),
            has_moved=self._has_moved(stretches),
        )

    def _own_steps(self, stretches: Sequence[Stretch]) -> list[float]:
        found = [
            settled_mean(times_of(self._settled_steps(stretch.rounds)))
            for stretch in stretches
            if stretch.purpose in ("baseline", "plain")
            and (len(stretch.rounds) > PAIR_TOKENS // 4 or self.course.whole)
        ]
        return [step_ms for step_ms in found if step_ms]

    def _settled_steps(self, steps: Sequence[Round]) -> Sequence[Round]:
        """Those that count; all of a reply that is too short to settle, and so never does."""
        return steps if self.course.whole else settled_steps(steps)

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

    def _groups(
        self, stretches: Sequence[Stretch]
    ) -> tuple[dict[int, list[float]], dict[tuple[int, int], list[Round]]]:
        """Settled ms of plain steps by pair, and rounds by pair and drafted ids.

        A last round that the limit of the reply cut short says little of what it cost.
        """
        plain: dict[int, list[float]] = {}
        drafted: dict[tuple[int, int], list[Round]] = {}
        last = stretches[-1].rounds[-1] if stretches else None
        before: Stretch | None = None
        for stretch in stretches:
            if stretch.purpose == "baseline":
                is_settled = before is not None and before.purpose == "baseline"
                n_dropped = 1 if is_settled else 0 if self.course.whole else SETTLE_STEPS
                steps = stretch.rounds[n_dropped : None if self.course.whole else -LAST_STEPS]
                plain[stretch.pair] = times_of(steps)
            elif stretch.purpose in ("trial", "draft"):
                for round in stretch.rounds:
                    if round is not last or round.drafted == round.depth:
                        drafted.setdefault((stretch.pair, round.drafted), []).append(round)
            before = stretch
        return plain, drafted

    def _cost_pairs(
        self, plain: Mapping[int, list[float]], drafted: Mapping[tuple[int, int], list[Round]]
    ) -> list[CostPair]:
        """Trials beside their plain halves; while On, rounds beside the plain steps before them.

        Where replies are too short for both halves, beside a request before it.
        """
        if not plain and not self._whole_steps:
            return []
        found = [
            cost_pair(
                n_drafted,
                bucket_of(rounds[0].context_tokens, self.traffic.has_grammar),
                times_of(rounds),
                plain.get(pair, self._whole_steps),
            )
            for (pair, n_drafted), rounds in drafted.items()
        ]
        return [pair for pair in found if pair]

    def _sample(self, stretches: Sequence[Stretch], tokens: int) -> Sample:
        """What its rounds gave; the last one as it was, cut by the reply's end: a cost, too.

        Trials cover half of a measured reply, and the end falls into one as often.
        """
        sample = Sample(bucket=self.bucket)
        is_on = self.mode == "on"  # a fixed depth is no question there
        beyond = self.level.beyond if is_on else lru_cache(maxsize=None)(self.level.beyond)
        n_trial = 0
        for stretch in stretches:
            is_trial = stretch.purpose == "trial"
            if not is_trial and stretch.purpose != "draft":
                continue
            for round in stretch.rounds:
                n_trial += is_trial
                if not is_on:
                    sample.hear_at_every_depth(round.depth, round.drafted, round.accepted, beyond)
                if not (is_trial and self._stopped_at is not None and n_trial > self._stopped_at):
                    sample.hear(round)
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
                change = round.round_ms / (step_ms * self.costs[round.drafted]) - 1
                run = run + 1 if abs(change) > MOVED_COST else 0
                if run >= MOVED_ROUNDS:
                    return True
        return False


def pair_tokens(reply_tokens: float) -> int:
    """Tokens of either half of a pair, where replies are so long."""
    return PAIR_TOKENS // 2 if reply_tokens < SHORT_REPLY_TOKENS else PAIR_TOKENS


def settled_steps(steps: Sequence[Round]) -> Sequence[Round]:
    """Those that the rounds or the prefill before them slow no more; of a few, the later half."""
    return steps[min(SETTLE_STEPS, len(steps) // 2) : -LAST_STEPS] or steps


def times_of(rounds: Sequence[Round]) -> list[float]:
    return [round.round_ms for round in rounds]


def hopes(costs: Costs) -> list[float]:
    """[depth] → share of its cost that a trial hopes for: less, the fewer pairs it was timed in."""
    timed = Counter(pair.drafted for pair in costs.pairs)
    return [1 - OPTIMISM / (1 + timed[depth]) for depth in range(MAX_DEPTH + 1)]


PLANS = tuple(Plan(depth, 1) for depth in range(MAX_DEPTH + 1))
