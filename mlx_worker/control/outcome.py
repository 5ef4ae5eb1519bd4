"""How one simulated run went: the account it is judged by, and the judgement.

Owns what is counted and when a verdict is wrong. Leaves running to simulate.py. Pure; any thread.

What is true is known here, so times are counted without the timer's noise: what was run against
plain decoding of the same replies at the same moments, drift and background load included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mlx_worker.control.scenario import Scenario
from mlx_worker.control.solve import Solved, relative_sd, solve
from mlx_worker.records import Status

LEVEL = 0.05  # an effect below it has no wrong verdict
DIGITS = 6  # of what is reported; a truth solved for 0.05 may be a hair less
REPORTED = {
    "verdict_text": "the status as every place shows it",
    "verdict": "on, off or measuring",
    "truth": "speed-up at the best fixed depth, over all requests of the last phase",
    "verdict_wrong": (
        "whether the verdict's sign contradicts the truth's; never within ±5 % or while measuring. "
        "Where truth_policy has the other sign, that is the judge"
    ),
    "requests_to_decide": "requests until the first On or Off; null: never",
    "tokens_to_decide": "the same in tokens",
    "net_speed": "of all that was written, against plain: -0.004 is 0.4 % slower than undrafted",
    "worst_loss": "the most time ever lost on balance, as a share of all decode time",
    "on_off_flips": "changes between On and Off, whatever came between",
    "truth_policy": "speed-up of the pacer's own drafting in every request, exits included",
    "figure": "of the final status; null: none yet",
    "low": "of its 90 % interval",
    "high": "of its 90 % interval",
    "spread": "relative SD of cost / tokens per round between the last phase's requests",
    "measured_spread": "what the pacer had measured of it at its first verdict, else at the end",
    "changes": (
        "for each change of the scenario: at_request, truth from then on; requests_to_notice and "
        "tokens_to_notice until the state had the right sign, null: never; worst_loss since it"
    ),
}

Verdict = Literal["on", "off", "measuring"]


@dataclass
class Account:
    """What was written and what decoding it took, true times.

    plain_ms  what plain decoding of the same ids would have taken
    worst_ms  the most that true_ms was ever ahead of it
    """

    tokens: int = 0
    true_ms: float = 0.0
    plain_ms: float = 0.0
    worst_ms: float = 0.0

    @property
    def lost_ms(self) -> float:
        return self.true_ms - self.plain_ms


@dataclass(frozen=True)
class Moment:
    """The status and the account after a request."""

    status: Status
    account: Account


@dataclass(frozen=True)
class Noticed:
    """A change of the scenario, and what it took until the state had the sign that is right then.

    The counts are None where it never had, before the next change or the end. worst_loss is the
    most time lost since the change, as a share of decode time since.
    """

    at_request: int
    truth: float
    requests_to_notice: int | None
    tokens_to_notice: int | None
    worst_loss: float


@dataclass(frozen=True)
class Outcome:
    """How one run went. Fractions; REPORTED says what each of its fields is.

    depth    the best fixed one in the last phase
    moments  after each request
    """

    verdict_text: str
    verdict: Verdict
    truth: float
    truth_policy: float | None
    verdict_wrong: bool
    requests_to_decide: int | None
    tokens_to_decide: int | None
    net_speed: float
    worst_loss: float
    on_off_flips: int
    figure: float | None
    low: float | None
    high: float | None
    spread: float
    measured_spread: float | None
    depth: int
    changes: tuple[Noticed, ...]
    requests: int
    tokens: int
    moments: tuple[Moment, ...]

    def as_json(self) -> dict[str, object]:
        """What is reported, in plain values, rounded."""
        values = {name: rounded(getattr(self, name)) for name in REPORTED if name != "changes"}
        changes = [
            {name: rounded(value) for name, value in vars(change).items()}
            for change in self.changes
        ]
        return {**values, "changes": changes}


def rounded(value: object) -> object:
    return round(value, DIGITS) if isinstance(value, float) else value


def judged(truth: float, truth_policy: float | None) -> float:
    """The speed-up whose sign a verdict must have; 0 where either sign is right.

    A policy that drops requests in time and picks depths may gain where every fixed depth loses.
    Then it is the judge, and within ±5 % nothing is wrong, as everywhere. So it is where it gains
    less than the fixed depth does on replies without end: the last round of each is cut.
    """
    judge = truth
    if truth_policy is not None and (truth * truth_policy < 0 or 0 < truth_policy < truth):
        judge = truth_policy
    return judge if round(abs(judge), DIGITS) >= LEVEL else 0.0


def is_wrong(verdict: Verdict, truth: float, truth_policy: float | None) -> bool:
    return judged(truth, truth_policy) * sign_of(verdict) < 0


def sign_of(verdict: Verdict) -> int:
    return {"on": 1, "off": -1, "measuring": 0}[verdict]


def verdict_of(status: Status) -> Verdict:
    return status.state if status.state in ("on", "off") else "measuring"


def first_verdict(moments: Sequence[Moment]) -> int | None:
    verdicts = (verdict_of(moment.status) for moment in moments)
    return next((n for n, verdict in enumerate(verdicts) if verdict != "measuring"), None)


def n_flips(moments: Sequence[Moment]) -> int:
    verdicts = [v for moment in moments if (v := verdict_of(moment.status)) != "measuring"]
    return sum(before != after for before, after in pairwise(verdicts))


def noticed(
    phases: Sequence[Scenario], moments: Sequence[Moment], policies: Sequence[float | None]
) -> Iterable[Noticed]:
    """By change of the scenario, in order. policies: truth_policy of each phase."""
    stops = [*(phase.at_request for phase in phases[1:]), len(moments)]
    for phase, policy, stop in list(zip(phases, policies, stops, strict=True))[1:]:
        at, truth = phase.at_request, solve(phase).truth
        before, since = moments[at - 1].account, [moment.account for moment in moments[at:stop]]
        right = judged(truth, policy)
        signs = [right * sign_of(verdict_of(moment.status)) for moment in moments[at - 1 : stop]]
        # From the request before the change: a state that was right already took none.
        found = next((n for n, sign in enumerate(signs, at - 1) if sign > 0 or not right), None)
        lost_ms = max(account.lost_ms - before.lost_ms for account in since)
        yield Noticed(
            at_request=at,
            truth=truth,
            requests_to_notice=None if found is None else found - at + 1,
            tokens_to_notice=(
                None if found is None else moments[found].account.tokens - before.tokens
            ),
            worst_loss=max(0.0, lost_ms / ((since[-1].true_ms - before.true_ms) or 1.0)),
        )


def outcome(
    phases: Sequence[Scenario],
    moments: Sequence[Moment],
    ratios: Sequence[float],
    last: Solved,
    policies: Sequence[float | None],
) -> Outcome:
    """Count a run. ratios: of the last phase's requests at its best depth."""
    status, account = moments[-1].status, moments[-1].account
    verdict, decided = verdict_of(status), first_verdict(moments)
    true_ms = account.true_ms or 1.0  # replies of one id take no decoding
    return Outcome(
        verdict_text=status.text or "",
        verdict=verdict,
        truth=last.truth,
        truth_policy=policies[-1],
        verdict_wrong=is_wrong(verdict, last.truth, policies[-1]),
        requests_to_decide=None if decided is None else decided + 1,
        tokens_to_decide=None if decided is None else moments[decided].account.tokens,
        net_speed=-account.lost_ms / true_ms,
        worst_loss=account.worst_ms / true_ms,
        on_off_flips=n_flips(moments),
        figure=status.speedup,
        low=status.low,
        high=status.high,
        spread=relative_sd(ratios),
        measured_spread=moments[-1 if decided is None else decided].status.spread,
        depth=last.depth,
        changes=tuple(noticed(phases, moments, policies)),
        requests=len(moments),
        tokens=account.tokens,
        moments=tuple(moments),
    )
