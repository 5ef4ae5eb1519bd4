"""Recorded rounds → what a round costs, what is accepted, and what drafting gained.

Owns the three estimates that every decision rests on: `Costs` (a round's time in plain steps, by
depth), `Levels` (how well drafts are accepted, learnt over requests and followed inside one) and
`Sample` (one request's share of the evidence). Leaves decisions to decide.py and the order of
things to pacer.py. Pure arithmetic; one thread at a time.

Unit: ps, the time of one plain step nearby. *Cost* of a round is its time in ps; *tau* of a request
is ps per token under drafts: 0.8 is a quarter faster, 1.25 a fifth slower.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from statistics import median

from mlx_worker.records import MAX_DEPTH, Round

WINSOR = 1.5  # a time beyond this multiple of the median is a hiccup of the machine, cut back to it
TAIL_CUT = 50.0  # medians that one cut counts for at most: a machine that slept is one hiccup
TAIL_FADE = 0.99  # memory of what was cut, a request
TAIL_Z = 2.5  # standard errors by which rounds must lose more to the cut than steps do
GAP_STEPS = 5  # a time this many times the median: the machine slept, the pair says nothing
FULL_STEPS = 8  # plain steps that make a pair's baseline count in full
FULL_ROUNDS = 4  # rounds that make a pair's cost count in full
PAIR_TOKENS = 16  # drafted tokens of a full pair
BUCKETS = (4096, 16384)  # context tokens at which costs are kept apart: attention grows with them
# And once more under a grammar, whose plain steps can't be built ahead and whose rounds read twice.
N_BUCKETS = 2 * (len(BUCKETS) + 1)

ROUND_VARIANCE = 0.3  # relative variance of a round's ids, until its request's rounds tell
ROUND_PRIOR = 2.0  # rounds' worth of trust in it

PAIR_MEMORY = 128  # pairs a cost rests on
PAIR_FADE = 0.985  # weight of a pair against the next one: a machine changes over the hours
DRAFTED_PRIOR = 2.0  # pairs' worth of trust in the load-time curve's shape
BUCKET_PRIOR = 4.0  # pairs' worth of trust that another context costs the same
PAIR_SPREAD = 0.08  # relative spread of a pair's cost before there are pairs to tell
PAIR_SPREAD_PRIOR = 4  # pairs' worth of trust in it
SURE_PAIRS = 8  # pairs from which a cost counts as known
CHANGED_PAIRS = 0.8  # pairs' worth of a request that may contradict it …
CHANGED_COST = 0.08  # … by at least this share …
CHANGED_Z = 2.5  # … and so many standard errors
RECALL_REQUESTS = 16  # that timed pairs: what was contradicted once in so many was a moment
PAIR_CUT = math.log(2)  # either side of the median, beyond which a pair is a hiccup; as a log
DEFAULT_COST_PER_ROW = 0.15  # without a load-time curve; only until the first pairs

LEVELS = (0.05, 0.2, 0.35, 0.5, 0.62, 0.73, 0.82, 0.89, 0.94, 0.97, 0.99)  # acceptance, a grid
LEVEL_PRIOR = 0.15  # requests' worth of trust that a level never seen may come
EMPTY_PRIOR = 8.0  # rounds' worth of trust that a drafter always has something to propose
LEVEL_FADE = 0.97  # memory of levels: half after 23 requests
CLEAR_VALUE = 0.98  # expected tokens a ps at which nobody asks whether to stop drafting
LEARNING_ROUNDS = 3  # rounds that it takes to tell a request that gains from one that doesn't
LEVEL_DRIFT = 0.03  # share of what a request taught that the next round no longer believes
SHAPE_PRIOR = 20.0  # failures' worth of trust that all positions of a chain are alike
SHAPE_LIMITS = (0.25, 4.0)  # hazard of a position against the first one's


def bucket_of(context_tokens: int, has_grammar: bool = False) -> int:
    """Which bucket of costs: 0 below 4k, 1 below 16k, 2 above; 3, 4, 5 under a grammar."""
    context = sum(context_tokens >= edge for edge in BUCKETS)
    return context + (N_BUCKETS // 2 if has_grammar else 0)


def settled_mean(times_ms: Sequence[float]) -> float | None:
    """Mean of the times cut back to 1.5× their median; None where the machine slept or for none."""
    if not times_ms or max(times_ms) > GAP_STEPS * median(times_ms):
        return None
    return _cut_mean(times_ms)


def _cut_mean(times_ms: Sequence[float]) -> float:
    limit = WINSOR * median(times_ms)
    return math.fsum(min(time, limit) for time in times_ms) / len(times_ms)


@dataclass
class Tail:
    """What the cut to 1.5× the median took off one kind of time, in means of what was left, fading.

    kept     how many times were heard
    cut      what they lost, up to TAIL_CUT each
    squares  of what each lost
    """

    kept: float = 0.0
    cut: float = 0.0
    squares: float = 0.0

    def hear(self, times_ms: Sequence[float]) -> None:
        """Times of one kind that were cut together; those of a pair that says nothing, too."""
        if not times_ms:
            return
        self.kept += len(times_ms)
        limit = WINSOR * median(times_ms)
        if max(times_ms) > limit > 0:
            mean = _cut_mean(times_ms)
            lost = [min((time - limit) / mean, TAIL_CUT) for time in times_ms if time > limit]
            self.cut += math.fsum(lost)
            self.squares += math.fsum(map(mul, lost, lost))

    def fade(self) -> None:
        self.kept, self.cut, self.squares = (
            TAIL_FADE * value for value in (self.kept, self.cut, self.squares)
        )

    @property
    def share(self) -> float:
        """By how much the mean of all times exceeds the mean that was left."""
        return self.cut / self.kept if self.kept else 0.0

    @property
    def variance(self) -> float:
        return self.squares / self.kept**2 if self.kept else 0.0


# --- costs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostPair:
    """Rounds beside plain steps: log of the one's time over the other's.

    drafted  ids that each of these rounds proposed; 0: the drafter had nothing to propose
    """

    drafted: int
    bucket: int
    log_cost: float
    weight: float


def cost_pair(
    drafted: int, bucket: int, rounds_ms: Sequence[float], steps_ms: Sequence[float]
) -> CostPair | None:
    """None where either side says nothing: too short, or the machine slept in it."""
    round_ms, step_ms = settled_mean(rounds_ms), settled_mean(steps_ms)
    if not round_ms or not step_ms or len(steps_ms) < FULL_STEPS // 2:
        return None
    weight = min(1.0, len(rounds_ms) / FULL_ROUNDS) * min(1.0, len(steps_ms) / FULL_STEPS)
    return CostPair(drafted, bucket, math.log(round_ms / step_ms), weight)


@dataclass
class Costs:
    """What a round costs by drafted ids and context: the load-time curve's shape, the pairs' level.

    Cutting hiccups off rounds and steps alike is fair while both have them alike. What rounds
    clearly lose more (a draft that stalls now and then) is added to every round's cost.

    curve  drafted ids → ps as timed alone at load; it says how they compare until pairs do
    rounds_tail, steps_tail  what the cuts took off either
    suspects   a request's pairs that contradict the rest, by `suspicion`, a log; they wait …
    waiting    … for these, that don't tell yet
    dismissed  suspects that the next request didn't confirm, by `dismissed_shift`, so many requests
               (`dismissed_for`) ago
    """

    curve: dict[int, float] = field(default_factory=dict[int, float])
    pairs: list[CostPair] = field(default_factory=list[CostPair])
    level: float = 0.0  # log of measured over curve, over all pairs
    by_drafted: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    by_bucket: list[float] = field(default_factory=lambda: [0.0] * N_BUCKETS)
    rounds_tail: Tail = field(default_factory=Tail)
    steps_tail: Tail = field(default_factory=Tail)
    stalls: float = 0.0  # log of what rounds lose to the cuts beyond what steps do
    suspects: list[CostPair] = field(default_factory=list[CostPair])
    suspicion: float = 0.0
    waiting: list[CostPair] = field(default_factory=list[CostPair])
    dismissed: list[CostPair] = field(default_factory=list[CostPair])
    dismissed_shift: float = 0.0
    dismissed_for: int = 0
    spread: float = PAIR_SPREAD**2  # relative variance of one pair
    level_variance: float = PAIR_SPREAD**2

    def hear_tails(
        self, rounds: Sequence[Sequence[float]], steps: Sequence[Sequence[float]]
    ) -> None:
        """Take in one request's times, each group as it is cut for a pair; plain ones teach none.

        So that a draft that stalls is remembered for as long as it is not tried.
        """
        if not rounds:
            return
        for tail, groups in ((self.rounds_tail, rounds), (self.steps_tail, steps)):
            tail.fade()
            for times_ms in groups:
                tail.hear(times_ms)
        before, self.stalls = self.stalls, self._stalls()
        if self.stalls != before:
            self._tables.clear()

    def _stalls(self) -> float:
        """0 where chance explains it."""
        rounds, steps = self.rounds_tail, self.steps_tail
        if rounds.share - steps.share <= TAIL_Z * math.sqrt(rounds.variance + steps.variance):
            return 0.0
        return math.log1p(rounds.share) - math.log1p(steps.share)

    @property
    def variance(self) -> float:
        """Of the log of every cost alike."""
        return self.level_variance + (self.rounds_tail.variance if self.stalls else 0.0)

    def hear(self, pairs: Sequence[CostPair]) -> None:
        """Take in one request's pairs.

        Those that contradict what is known wait for the next request's. If those contradict it
        alike, the machine has changed: what was known is forgotten. Else it was busy for a moment,
        and the suspects are set aside; but if that comes again, both are part of what rounds cost.
        """
        if not pairs:
            return
        pairs = [*self.waiting, *pairs]
        shift = self._contradiction(pairs)
        if shift is None and self.suspicion and len(pairs) < SURE_PAIRS // 2:
            self.waiting = pairs
            return
        self._judge(pairs, shift or 0.0)

    def _judge(self, pairs: list[CostPair], shift: float) -> None:
        known, suspects, suspicion = self.pairs, self.suspects, self.suspicion
        self.waiting, self.suspects, self.suspicion = [], [], 0.0
        self.dismissed_for += 1
        if shift * suspicion > 0:
            known = suspects
        elif shift * self.dismissed_shift > 0 and self.dismissed_for <= RECALL_REQUESTS:
            known = [*known[-2 * SURE_PAIRS :], *self.dismissed]
        else:
            if suspicion:
                self.dismissed, self.dismissed_shift, self.dismissed_for = suspects, suspicion, 0
            if shift:
                self.suspects, self.suspicion = pairs, shift
                return
        if shift:
            self.dismissed, self.dismissed_shift = [], 0.0
        self.pairs = [*known, *pairs][-PAIR_MEMORY:]
        self._fit()

    @property
    def is_sure(self) -> bool:
        """Whether enough pairs agree."""
        return len(self.pairs) >= SURE_PAIRS and not self.suspicion

    @property
    def is_doubtful(self) -> bool:
        """Whether they rest on next to nothing, or were just contradicted."""
        return len(self.pairs) < SURE_PAIRS // 2 or self.suspicion != 0

    def renew(self, pairs: Sequence[CostPair]) -> None:
        """Forget all pairs but these."""
        self.pairs, self.suspects, self.waiting, self.dismissed = [], [], [], []
        self.suspicion = self.dismissed_shift = 0.0
        self.hear(pairs)

    def _contradiction(self, pairs: Sequence[CostPair]) -> float | None:
        """By how much, as a log, these pairs are off what is known; 0 where chance explains it.

        None where they don't tell: too few, or of a context that is not known.
        """
        known = Counter(pair.bucket for pair in self.pairs)
        pairs = [pair for pair in pairs if known[pair.bucket] >= SURE_PAIRS // 2]
        total = math.fsum(pair.weight for pair in pairs)
        if len(self.pairs) < SURE_PAIRS or total < CHANGED_PAIRS:
            return None
        shift = math.fsum(pair.weight * self._surprise(pair) for pair in pairs) / total
        error = math.sqrt(self.spread / total + self.level_variance)
        return shift if abs(shift) > max(CHANGED_COST, CHANGED_Z * error) else 0.0

    def _surprise(self, pair: CostPair) -> float:
        known = self._log_curve(pair.drafted) + self.level + self.by_drafted[pair.drafted]
        return pair.log_cost - known - self.by_bucket[pair.bucket]

    def __post_init__(self) -> None:
        self._tables: dict[int, list[float]] = {}  # until the next fit

    def table(self, bucket: int) -> list[float]:
        """[drafted ids] → ps; [0] is a round without a proposal. Not to be changed."""
        if bucket not in self._tables:
            self._tables[bucket] = self._table(bucket)
        return self._tables[bucket]

    def _table(self, bucket: int) -> list[float]:
        offset = self.level + self.by_bucket[bucket] + self.stalls
        return [
            math.exp(self._log_curve(drafted) + offset + self.by_drafted[drafted])
            for drafted in range(MAX_DEPTH + 1)
        ]

    def _log_curve(self, drafted: int) -> float:
        default = 1 + DEFAULT_COST_PER_ROW * (drafted + 1) if drafted else 1.0
        return math.log(self.curve.get(drafted, default))

    def _fit(self) -> None:
        """Weighted means of costs, each factor from what the ones before it left over.

        Not of their logs: where a machine is now fast, now slow, the mean is what rounds take.
        """
        self._tables.clear()
        pairs = self.pairs
        n = len(pairs)
        weights = [pair.weight * PAIR_FADE ** (n - 1 - i) for i, pair in enumerate(pairs)]
        drafted = [pair.drafted for pair in pairs]
        left = _cut_back([pair.log_cost - self._log_curve(pair.drafted) for pair in pairs], drafted)
        total = math.fsum(weights)
        self.level = math.log(math.fsum(map(mul, weights, map(math.exp, left))) / total)
        left = [value - self.level for value in left]
        self.by_drafted = _shrunk_means(left, weights, drafted, MAX_DEPTH + 1, DRAFTED_PRIOR)
        left = [value - self.by_drafted[n] for value, n in zip(left, drafted, strict=True)]
        self.by_bucket = _shrunk_means(
            left, weights, [pair.bucket for pair in pairs], N_BUCKETS, BUCKET_PRIOR
        )
        squares = math.fsum(
            weight * value * value for weight, value in zip(weights, left, strict=True)
        )
        self.spread = (PAIR_SPREAD_PRIOR * PAIR_SPREAD**2 + squares) / (PAIR_SPREAD_PRIOR + total)
        self.level_variance = self.spread * math.fsum(map(mul, weights, weights)) / total**2


def _cut_back(values: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Logs, each cut to PAIR_CUT either side of its own group's median."""
    of_group: dict[int, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        of_group[group].append(value)
    middles = {group: median(own) for group, own in of_group.items()}
    return [
        min(max(value, middles[group] - PAIR_CUT), middles[group] + PAIR_CUT)
        for value, group in zip(values, groups, strict=True)
    ]


def _shrunk_means(
    values: Sequence[float], weights: Sequence[float], groups: Sequence[int], n: int, prior: float
) -> list[float]:
    """Log of each group's weighted mean of exp(value), drawn to 0 as by `prior` further zeros."""
    sums, totals = [prior] * n, [prior] * n
    for value, weight, group in zip(values, weights, groups, strict=True):
        sums[group] += weight * math.exp(value)
        totals[group] += weight
    return [math.log(value / total) for value, total in zip(sums, totals, strict=True)]


# --- acceptance -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LevelTable:
    """What each level of acceptance means for a round, worked out once a request.

    prior    (levels,) log-probability that a request is at each level
    tokens   [depth] (levels,) expected ids of a round
    outcome  [depth][accepted] (levels,) log-probability of that many
    """

    prior: list[float]
    tokens: list[list[float]]
    outcome: list[list[list[float]]]


@dataclass
class Levels:
    """How well drafts are accepted, over requests: a histogram of levels by kind of traffic.

    A *level* is the chance that a draft in the first position is right; positions differ by
    `shape`, the hazard of each against the first one's. Content makes requests differ far more
    than chance does, and in clumps (JSON, prose), so a histogram, not a mean with a spread.
    """

    seen: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    asked: float = 0.0  # rounds that were to draft, fading
    empty: float = 0.0  # those of them without a proposal
    failures: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    expected: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))

    @property
    def shape(self) -> list[float]:
        """[position from 1] → hazard against the first position's."""
        raw = [
            (failed + SHAPE_PRIOR) / (hazard + SHAPE_PRIOR)
            for failed, hazard in zip(self.failures, self.expected, strict=True)
        ]
        low, high = SHAPE_LIMITS
        return [0.0] + [min(max(value / raw[1], low), high) for value in raw[1:]]

    def prior(self, kind: str) -> list[float]:
        """(levels,) log-probability; a kind seldom seen borrows from all."""
        flat = 1 / len(LEVELS)
        overall = self.seen.get("", [0.0] * len(LEVELS))
        n_overall = math.fsum(overall)
        base = [(n + LEVEL_PRIOR * flat) / (n_overall + LEVEL_PRIOR) for n in overall]
        own = self.seen.get(kind, [0.0] * len(LEVELS))
        n_own = math.fsum(own)
        return [math.log((n + 2 * share) / (n_own + 2)) for n, share in zip(own, base, strict=True)]

    def planned(self, costs: Sequence[float]) -> Sequence[float]:
        """[depth] → ps of a round planned so deep, when some have nothing to propose."""
        if not self.empty:
            return costs
        empty = self.empty / (self.asked + EMPTY_PRIOR)
        return [empty * costs[0] + (1 - empty) * cost for cost in costs]

    def table(self, kind: str) -> LevelTable:
        tokens, outcome = _round_tables(tuple(round(4 * hazard) / 4 for hazard in self.shape))
        return LevelTable(self.prior(kind), tokens, outcome)

    def hear(self, kind: str, request: "RequestLevel") -> None:
        """Learn from one request that has ended."""
        if not request.n_rounds:
            return
        self.asked = LEVEL_FADE * self.asked + request.n_rounds
        self.empty = LEVEL_FADE * self.empty + request.n_empty
        for name in {"", kind}:
            old = self.seen.get(name, [0.0] * len(LEVELS))
            self.seen[name] = [
                LEVEL_FADE * n + share for n, share in zip(old, request.shares(), strict=True)
            ]
        hazard = -math.log(request.mean_level())
        shape = self.shape
        reached, failed = [0] * (MAX_DEPTH + 1), [0] * (MAX_DEPTH + 1)
        for (depth, accepted), n in request.outcomes.items():
            for position in range(1, min(accepted + 1, depth) + 1):
                reached[position] += n
            if accepted < depth:
                failed[accepted + 1] += n
        for k in range(1, MAX_DEPTH + 1):
            self.failures[k] = LEVEL_FADE * self.failures[k] + failed[k]
            self.expected[k] = LEVEL_FADE * self.expected[k] + reached[k] * hazard * shape[k]


@lru_cache(maxsize=64)
def _round_tables(
    shape: tuple[float, ...],
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """`tokens` and `outcome` of a LevelTable whose positions have these hazards."""
    tokens = [[1.0] * len(LEVELS)] + [[0.0] * len(LEVELS) for _ in range(MAX_DEPTH)]
    outcome = [[[0.0] * len(LEVELS) for _ in range(k + 1)] for k in range(MAX_DEPTH + 1)]
    for g, level in enumerate(LEVELS):
        hazard = -math.log(level)
        survival, log_survival = 1.0, 0.0
        for position in range(1, MAX_DEPTH + 1):
            kept = math.exp(-hazard * shape[position])
            failed = log_survival + math.log1p(-kept)
            for depth in range(position, MAX_DEPTH + 1):
                outcome[depth][position - 1][g] = failed
            survival *= kept
            log_survival -= hazard * shape[position]
            outcome[position][position][g] = log_survival
            tokens[position][g] = tokens[position - 1][g] + survival
    return tokens, outcome


class RequestLevel:
    """Follows the level of one request, round by round, and prices depths by it."""

    def __init__(self, table: LevelTable) -> None:
        self._table = table
        self._log_shares = list(table.prior)
        self._drift = [LEVEL_DRIFT * share for share in table.prior]
        self._shares: list[float] | None = None
        self.n_rounds = self.n_empty = 0
        self.outcomes: Counter[tuple[int, int]] = Counter()  # (depth, accepted)

    def hear(self, depth: int, accepted: int, *, is_empty: bool = False) -> None:
        """One round planned to draft `depth` ids, `accepted` of them right in a row.

        is_empty  there was nothing to propose, which helps as little as a wrong draft
        """
        keep = 1 - LEVEL_DRIFT
        outcome = self._table.outcome[depth][accepted]
        self._log_shares = [
            keep * share + drift + log
            for share, drift, log in zip(self._log_shares, self._drift, outcome, strict=True)
        ]
        self._shares = None
        self.n_rounds += 1
        self.n_empty += is_empty
        self.outcomes[depth, accepted] += 1

    def relax(self) -> None:
        """Believe half of it again: the reply has moved on."""
        self._log_shares = [
            (share + prior) / 2
            for share, prior in zip(self._log_shares, self._table.prior, strict=True)
        ]
        self._shares = None

    def shares(self) -> list[float]:
        """(levels,) probability of each level now."""
        if self._shares is None:
            top = max(self._log_shares)
            raw = [math.exp(share - top) for share in self._log_shares]
            total = math.fsum(raw)
            self._shares = [value / total for value in raw]
        return self._shares

    def mean_level(self) -> float:
        return math.fsum(map(mul, self.shares(), LEVELS))

    def beyond(self, depth: int) -> list[float]:
        """[depth'] → ids that a round of which `depth` drafts were right would have given more."""
        shares, tokens = self.shares(), self._table.tokens
        expected = [sum(map(mul, shares, tokens[k])) for k in range(MAX_DEPTH + 1)]
        chance = expected[depth] - expected[depth - 1]
        return [max(0.0, expected[k] - expected[depth]) / chance for k in range(MAX_DEPTH + 1)]

    def best_depth(self, costs: Sequence[float], depths: Sequence[int]) -> tuple[int, float]:
        """The depth with the most tokens a ps, and how many; the shallower of equals.

        Never deeper for a worse round heard: a level's gain from one more draft shrinks with it.
        """
        shares, tokens = self.shares(), self._table.tokens
        best, best_value = 0, 0.0
        for depth in depths:
            value = sum(map(mul, shares, tokens[depth])) / costs[depth]
            if value > best_value:
                best, best_value = depth, value
        return best, best_value

    def pays(self, costs: Sequence[float], depth: int, value: float, tokens_ahead: float) -> bool:
        """Whether one more round is worth its price, by what it may win and what it may teach.

        value         expected tokens a ps at this depth
        tokens_ahead  how long the reply may go on

        It is, while the chance of a request that gains, times what it would gain in the rest of
        the reply, exceeds what finding out costs. Never more for a worse round heard.
        """
        if value >= CLEAR_VALUE:
            return True
        cost, won, lost = costs[depth], 0.0, 0.0
        for share, tokens in zip(self.shares(), self._table.tokens[depth], strict=True):
            if tokens > cost:
                won += share * (1 - cost / tokens)
            else:
                lost += share * (cost - tokens)
        return won * tokens_ahead > lost * LEARNING_ROUNDS


# --- evidence ---------------------------------------------------------------------------------


@dataclass
class Sample:
    """One request's evidence, in counts, so that better known costs can price it again.

    n_rounds       [drafted] rounds that ran, by the ids that they proposed
    tokens         ids that those rounds gave
    drafted, accepted  the draft's own ids, and those that were kept: what a grammar forced is in
                   the others alone
    plain_tokens   ids written plainly because the request had stopped drafting
    deepest        the deepest plan of its rounds
    n_at, empty_at rounds that price every fixed depth, and those of them without a proposal
    tokens_at, squares_at
                   [depth] what those would have given if all had drafted so deep, and its squares
    """

    n_rounds: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    plain_tokens: int = 0
    deepest: int = 0
    n_at: int = 0
    empty_at: int = 0
    tokens_at: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    squares_at: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    bucket: int = 0

    def hear(self, round: Round) -> None:
        drafted, accepted = round.own
        self.n_rounds[round.drafted] += 1
        self.tokens += round.accepted + 1
        self.drafted += drafted
        self.accepted += accepted

    def hear_at_every_depth(
        self, depth: int, drafted: int, accepted: int, beyond: Callable[[int], Sequence[float]]
    ) -> None:
        """Price every fixed depth by this round.

        beyond  what a round all of whose drafts were right would have given more: a guess from the
                rest of its request, as only such a round doesn't tell. Without it deep drafts
                would be judged by the requests alone that were worth drafting deep in.
        """
        self.deepest = max(self.deepest, depth)
        self.n_at += 1
        self.empty_at += not drafted
        is_open = accepted == drafted == depth < MAX_DEPTH
        more = beyond(depth) if is_open else None
        for k in range(1, MAX_DEPTH + 1):
            n = min(accepted, k) + 1 + (more[k] if more else 0.0)
            self.tokens_at[k] += n
            self.squares_at[k] += n * n

    @property
    def total_rounds(self) -> int:
        return sum(self.n_rounds)

    def cost(self, costs: Sequence[float]) -> float:
        """ps that the rounds took."""
        return sum(map(mul, self.n_rounds, costs))

    def tau(self, costs: Sequence[float]) -> tuple[float, float]:
        """ps a token of drafting as it ran, plain stretches after a stop included; and weight."""
        tokens = self.tokens + self.plain_tokens
        return (self.cost(costs) + self.plain_tokens) / tokens, _weight(tokens)

    def tau_at(self, depth: int, costs: Sequence[float]) -> tuple[float, float, float]:
        """ps a token at one depth throughout, as its rounds tell; weight; relative variance."""
        rounds, tokens = self.n_at, self.tokens_at[depth]
        spent = self.empty_at * costs[0] + (rounds - self.empty_at) * costs[depth]
        noise = _ratio_variance(rounds, tokens, self.squares_at[depth])
        return spent / tokens, _weight(tokens), noise


class Priced:
    """Samples at today's costs, kept up to date at the price of what is new among them.

    tables         bucket → costs by drafted ids
    taus, weights  of each sample
    n_rounds       [bucket][drafted] of all samples; tokens, drafted, accepted, plain_tokens alike
    """

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self.tables: list[list[float]] = []
        self._start_over()

    def _start_over(self) -> None:
        self.taus: list[float] = []
        self.weights: list[float] = []
        self.n_rounds = [[0] * (MAX_DEPTH + 1) for _ in range(N_BUCKETS)]
        self.tokens = self.drafted = self.accepted = self.plain_tokens = 0

    def take_in(self, samples: list[Sample], tables: list[list[float]]) -> bool:
        """Whether anything has changed. Neither list nor what is in it may be changed later."""
        before = self._samples
        if samples is before and tables == self.tables:
            return False
        n_known = len(samples) - 1  # most often one has come, and the oldest may have gone
        n_gone = len(before) - n_known
        if n_gone < 0 or tables != self.tables or before[n_gone:] != samples[:-1]:
            self._start_over()
            before, n_known, n_gone = [], 0, 0
        self._samples, self.tables = samples, tables
        del self.taus[:n_gone], self.weights[:n_gone]
        for sample in before[:n_gone]:
            self._count(sample, -1)
        for sample in samples[n_known:]:
            tau, weight = sample.tau(tables[sample.bucket])
            self.taus.append(tau)
            self.weights.append(weight)
            self._count(sample, 1)
        return True

    def _count(self, sample: Sample, sign: int) -> None:
        counts = self.n_rounds[sample.bucket]
        for drafted, n in enumerate(sample.n_rounds):
            counts[drafted] += sign * n
        self.tokens += sign * sample.tokens
        self.drafted += sign * sample.drafted
        self.accepted += sign * sample.accepted
        self.plain_tokens += sign * sample.plain_tokens

    @property
    def cost(self) -> float:
        """ps that all rounds took."""
        return math.fsum(
            sum(map(mul, own, costs)) for own, costs in zip(self.n_rounds, self.tables, strict=True)
        )


def _weight(tokens: float) -> float:
    """m / (m + 1) for m pairs' worth of tokens: the last pairs of a request say little new."""
    m = tokens / PAIR_TOKENS
    return m / (m + 1)


def _ratio_variance(n: int, total: float, squares: float) -> float:
    """Relative variance of n rounds over the ids they gave.

    A round's own relative variance is drawn to what rounds usually have, because a few say little
    of it. (The ratio itself isn't corrected: rounds end with so many ids, not ids with so many
    rounds, so its mean is hardly biased.)
    """
    mean = total / n
    squared = squares / (mean * mean) - n
    relative = (squared + ROUND_PRIOR * ROUND_VARIANCE) / (n - 1 + ROUND_PRIOR)
    return relative / n
