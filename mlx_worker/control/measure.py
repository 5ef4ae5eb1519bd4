"""Recorded rounds → what a round costs, what is accepted, and what drafting gained.

Owns the three estimates that every decision rests on: `Costs` (a round's time in plain steps, by
depth), `Levels` (how well drafts are accepted, learnt over requests and followed inside one) and
`Sample` (one request's share of the evidence). Leaves decisions to decide.py and the order of
things to pacer.py. Pure arithmetic; one thread at a time.

Unit: ps, the time of one plain step nearby. *Cost* of a round is its time in ps; *tau* of a request
is ps per token under drafts: 0.8 is a quarter faster, 1.25 a fifth slower.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from statistics import median

from mlx_worker.records import MAX_DEPTH

WINSOR = 1.5  # a time beyond this multiple of the median is a hiccup of the machine, cut back to it
GAP_STEPS = 5  # a step this many times the median: the machine slept, the pair says nothing
FULL_STEPS = 8  # plain steps that make a pair's baseline count in full
FULL_ROUNDS = 4  # rounds that make a pair's cost count in full
PAIR_TOKENS = 16  # drafted tokens of a full pair
BUCKETS = (4096, 16384)  # context tokens at which costs are kept apart: attention grows with them

ROUND_VARIANCE = 0.3  # relative variance of a round's ids, until its request's rounds tell
ROUND_PRIOR = 2.0  # rounds' worth of trust in it

PAIR_MEMORY = 128  # pairs a cost rests on
PAIR_FADE = 0.985  # weight of a pair against the next one: a machine changes over the hours
DEPTH_PRIOR = 2.0  # pairs' worth of trust in the load-time curve's shape, for one depth
BUCKET_PRIOR = 4.0  # pairs' worth of trust that another context costs the same
PAIR_SPREAD = 0.08  # relative spread of a pair's cost before there are pairs to tell
PAIR_SPREAD_PRIOR = 4  # pairs' worth of trust in it
SURE_PAIRS = 8  # pairs from which a cost counts as known
CHANGED_PAIRS = 0.8  # pairs' worth of a request that may contradict it …
CHANGED_COST = 0.08  # … by at least this share …
CLEAR_CHANGE = math.log(1.4)  # as a log; one request that says so is enough
CHANGED_Z = 2.5  # … and so many standard errors
DEFAULT_COST_PER_ROW = 0.15  # without a load-time curve; only until the first pairs

LEVELS = (0.05, 0.2, 0.35, 0.5, 0.62, 0.73, 0.82, 0.89, 0.94, 0.97, 0.99)  # acceptance, a grid
LEVEL_PRIOR = 0.15  # requests' worth of trust that a level never seen may come
LEVEL_FADE = 0.97  # memory of levels: half after 23 requests
LEAST_GAIN = 0.98  # expected tokens a ps at which nobody asks whether to stop drafting
LEARNING_ROUNDS = 3  # rounds that it takes to tell a request that gains from one that doesn't
LEVEL_DRIFT = 0.03  # share of what a request taught that the next round no longer believes
SHAPE_PRIOR = 20.0  # failures' worth of trust that all positions of a chain are alike
SHAPE_LIMITS = (0.25, 4.0)  # hazard of a position against the first one's


def bucket_of(context_tokens: int) -> int:
    """Which context bucket: 0 below 4k, 1 below 16k, 2 above."""
    return sum(context_tokens >= edge for edge in BUCKETS)


def settled_mean(times_ms: Sequence[float]) -> float | None:
    """Mean of the times cut back to 1.5× their median; None where the machine slept or for none."""
    if not times_ms:
        return None
    middle = median(times_ms)
    if max(times_ms) > GAP_STEPS * middle:
        return None
    limit = WINSOR * middle
    return math.fsum(min(time, limit) for time in times_ms) / len(times_ms)


# --- costs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostPair:
    """A drafted and a plain stretch side by side: log of the one's round over the other's step."""

    depth: int
    bucket: int
    log_cost: float
    weight: float


def cost_pair(
    depth: int, bucket: int, rounds_ms: Sequence[float], steps_ms: Sequence[float]
) -> CostPair | None:
    """None where either side says nothing: too short, or the machine slept in it."""
    round_ms, step_ms = settled_mean(rounds_ms), settled_mean(steps_ms)
    if not round_ms or not step_ms or len(steps_ms) < FULL_STEPS // 2:
        return None
    weight = min(1.0, len(rounds_ms) / FULL_ROUNDS) * min(1.0, len(steps_ms) / FULL_STEPS)
    return CostPair(depth, bucket, math.log(round_ms / step_ms), weight)


@dataclass
class Costs:
    """What a round costs by depth and context: the load-time curve's shape, the pairs' level.

    curve  depth → ps as timed alone at load; it says how depths compare until pairs do
    """

    curve: dict[int, float] = field(default_factory=dict[int, float])
    pairs: list[CostPair] = field(default_factory=list[CostPair])
    level: float = 0.0  # log of measured over curve, over all pairs
    by_depth: list[float] = field(default_factory=lambda: [0.0] * (MAX_DEPTH + 1))
    by_bucket: list[float] = field(default_factory=lambda: [0.0] * (len(BUCKETS) + 1))
    suspicion: float = 0.0  # by how much the last request's pairs contradicted the ones before
    n_suspects: int = 0  # how many those were
    spread: float = PAIR_SPREAD**2  # relative variance of one pair
    variance: float = PAIR_SPREAD**2  # of `level`

    def hear(self, pairs: Sequence[CostPair]) -> None:
        """Take in one request's pairs. What two in a row contradict alike is forgotten."""
        if not pairs:
            return
        shift = self._contradiction(pairs)
        if shift * self.suspicion > 0 or abs(shift) > CLEAR_CHANGE:
            self.pairs = self.pairs[-self.n_suspects :] if self.suspicion * shift > 0 else []
            shift = 0.0
        self.suspicion, self.n_suspects = shift, len(pairs)
        self.pairs = [*self.pairs, *pairs][-PAIR_MEMORY:]
        self._fit()

    @property
    def is_sure(self) -> bool:
        """Whether enough pairs agree."""
        return len(self.pairs) >= SURE_PAIRS and not self.suspicion

    @property
    def is_doubtful(self) -> bool:
        """Whether they rest on next to nothing, or were just contradicted."""
        return len(self.pairs) < SURE_PAIRS // 2 or self.suspicion != 0

    def _contradiction(self, pairs: Sequence[CostPair]) -> float:
        """By how much, as a log, these pairs are off what is known; 0 where chance explains it."""
        known = Counter(pair.bucket for pair in self.pairs)
        pairs = [pair for pair in pairs if known[pair.bucket] >= SURE_PAIRS // 2]
        total = math.fsum(pair.weight for pair in pairs)
        if len(self.pairs) < SURE_PAIRS or total < CHANGED_PAIRS:
            return 0.0
        shift = math.fsum(pair.weight * self._surprise(pair) for pair in pairs) / total
        error = math.sqrt(self.spread / total + self.variance)
        return shift if abs(shift) > max(CHANGED_COST, CHANGED_Z * error) else 0.0

    def _surprise(self, pair: CostPair) -> float:
        known = self._log_curve(pair.depth) + self.level + self.by_depth[pair.depth]
        return pair.log_cost - known - self.by_bucket[pair.bucket]

    def __post_init__(self) -> None:
        self._tables: dict[int, list[float]] = {}  # until the next fit

    def table(self, bucket: int) -> list[float]:
        """Index depth → ps; [0] is 1, a plain step. Not to be changed."""
        if bucket not in self._tables:
            self._tables[bucket] = self._table(bucket)
        return self._tables[bucket]

    def _table(self, bucket: int) -> list[float]:
        offset = self.level + self.by_bucket[bucket]
        return [1.0] + [
            math.exp(self._log_curve(depth) + offset + self.by_depth[depth])
            for depth in range(1, MAX_DEPTH + 1)
        ]

    def _log_curve(self, depth: int) -> float:
        return math.log(self.curve.get(depth, 1 + DEFAULT_COST_PER_ROW * (depth + 1)))

    def _fit(self) -> None:
        """Weighted means, each factor from what the ones before it left over."""
        self._tables.clear()
        pairs = self.pairs
        n = len(pairs)
        weights = [pair.weight * PAIR_FADE ** (n - 1 - i) for i, pair in enumerate(pairs)]
        left = [pair.log_cost - self._log_curve(pair.depth) for pair in pairs]
        middle, reach = median(left), math.log(WINSOR)
        left = [min(max(value, middle - reach), middle + reach) for value in left]
        total = math.fsum(weights)
        self.level = math.fsum(map(mul, weights, left)) / total
        left = [value - self.level for value in left]
        self.by_depth = _shrunk_means(
            left, weights, [pair.depth for pair in pairs], MAX_DEPTH + 1, DEPTH_PRIOR
        )
        left = [value - self.by_depth[pair.depth] for value, pair in zip(left, pairs, strict=True)]
        self.by_bucket = _shrunk_means(
            left, weights, [pair.bucket for pair in pairs], len(BUCKETS) + 1, BUCKET_PRIOR
        )
        squares = math.fsum(
            weight * value * value for weight, value in zip(weights, left, strict=True)
        )
        self.spread = (PAIR_SPREAD_PRIOR * PAIR_SPREAD**2 + squares) / (PAIR_SPREAD_PRIOR + total)
        self.variance = self.spread * math.fsum(weight * weight for weight in weights) / total**2


def _shrunk_means(
    values: Sequence[float], weights: Sequence[float], groups: Sequence[int], n: int, prior: float
) -> list[float]:
    """Weighted mean of each group, drawn to 0 as by `prior` further values there."""
    sums, totals = [0.0] * n, [prior] * n
    for value, weight, group in zip(values, weights, groups, strict=True):
        sums[group] += weight * value
        totals[group] += weight
    return [value / total for value, total in zip(sums, totals, strict=True)]


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

    def table(self, kind: str) -> LevelTable:
        tokens, outcome = _round_tables(tuple(round(4 * hazard) / 4 for hazard in self.shape))
        return LevelTable(self.prior(kind), tokens, outcome)

    def hear(self, kind: str, request: "RequestLevel") -> None:
        """Learn from one request that has ended."""
        if not request.n_rounds:
            return
        for name in {"", kind}:
            old = self.seen.get(name, [0.0] * len(LEVELS))
            self.seen[name] = [
                LEVEL_FADE * n + share for n, share in zip(old, request.shares(), strict=True)
            ]
        hazard = -math.log(request.mean_level())
        shape = self.shape
        for position in range(1, MAX_DEPTH + 1):
            reached, failed = request.reached[position], request.failed[position]
            self.failures[position] = LEVEL_FADE * self.failures[position] + failed
            self.expected[position] = (
                LEVEL_FADE * self.expected[position] + reached * hazard * shape[position]
            )


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
        self._shares: list[float] | None = None
        self.n_rounds = 0
        self.reached = [0] * (MAX_DEPTH + 1)
        self.failed = [0] * (MAX_DEPTH + 1)

    def hear(self, depth: int, accepted: int) -> None:
        """One round that drafted `depth` ids, `accepted` of them right in a row."""
        keep = 1 - LEVEL_DRIFT
        self._log_shares = [
            keep * share + LEVEL_DRIFT * prior + log
            for share, prior, log in zip(
                self._log_shares,
                self._table.prior,
                self._table.outcome[depth][accepted],
                strict=True,
            )
        ]
        self._shares = None
        self.n_rounds += 1
        for position in range(1, min(accepted + 1, depth) + 1):
            self.reached[position] += 1
        if accepted < depth:
            self.failed[accepted + 1] += 1

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
        if value >= LEAST_GAIN:
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

    n_rounds       [depth] rounds that ran at it
    tokens         ids that those rounds gave
    plain_tokens   ids written plainly because the request had stopped drafting
    rounds_at, tokens_at, squares_at
                   [depth] the same of rounds at least that deep, cut to it
    """

    n_rounds: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    tokens: int = 0
    plain_tokens: int = 0
    rounds_at: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    tokens_at: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    squares_at: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    drafted: int = 0
    bucket: int = 0

    def __post_init__(self) -> None:
        self._priced: tuple[Sequence[float] | None, tuple[float, float]] = (None, (0.0, 0.0))

    def hear(self, depth: int, drafted: int, accepted: int) -> None:
        self._priced = None, (0.0, 0.0)
        self.n_rounds[depth] += 1
        self.tokens += accepted + 1
        self.drafted += drafted

    def hear_shallower(self, depth: int, accepted: int) -> None:
        """Price every shallower depth by the same round."""
        for k in range(1, depth + 1):
            n = min(accepted, k) + 1
            self.rounds_at[k] += 1
            self.tokens_at[k] += n
            self.squares_at[k] += n * n

    @property
    def total_rounds(self) -> int:
        return sum(self.n_rounds)

    @property
    def weight(self) -> float:
        return _weight(self.tokens + self.plain_tokens)

    def cost(self, costs: Sequence[float]) -> float:
        """ps that the rounds took."""
        return sum(map(mul, self.n_rounds, costs))

    def tau(self, costs: Sequence[float]) -> float:
        """ps a token of drafting as it ran, plain stretches of a request that stopped included."""
        return self.priced(costs)[0]

    def priced(self, costs: Sequence[float]) -> tuple[float, float]:
        """tau, and the weight it has; remembered, as a table of costs is never changed."""
        if self._priced[0] is not costs:
            spent = self.cost(costs) + self.plain_tokens
            tau = spent / (self.tokens + self.plain_tokens)
            self._priced = costs, (tau, self.weight)
        return self._priced[1]

    def tau_at(self, depth: int, costs: Sequence[float]) -> tuple[float, float, float] | None:
        """ps a token at one depth throughout, as its rounds tell; weight; relative variance.

        None where no round was as deep.
        """
        rounds, tokens = self.rounds_at[depth], self.tokens_at[depth]
        if not rounds:
            return None
        noise = _ratio_variance(rounds, tokens, self.squares_at[depth])
        return costs[depth] * rounds / tokens, _weight(tokens), noise


def _weight(tokens: int) -> float:
    """m / (m + 1) for m pairs' worth of tokens: the last pairs of a request say little new."""
    m = tokens / PAIR_TOKENS
    return m / (m + 1)


def _ratio_variance(n: int, total: int, squares: int) -> float:
    """Relative variance of n rounds over the ids they gave.

    A round's own relative variance is drawn to what rounds usually have, because a few say little
    of it. (The ratio itself isn't corrected: rounds end with so many ids, not ids with so many
    rounds, so its mean is hardly biased.)
    """
    mean = total / n
    squared = squares / (mean * mean) - n
    relative = (squared + ROUND_PRIOR * ROUND_VARIANCE) / (n - 1 + ROUND_PRIOR)
    return relative / n
