"""What is shown: the nine texts, which of them applies, and the figures that travel with it."""

import dataclasses
import itertools
import math
import threading

import pytest

from mlx_worker.control import status as words
from mlx_worker.control.controller import Controller
from mlx_worker.control.decide import weigh
from mlx_worker.control.measure import CostPair, Costs, Sample
from mlx_worker.control.pacer import Phase
from mlx_worker.records import (
    MAX_DEPTH,
    MINUS,
    PLATFORM,
    Round,
    State,
    Status,
    Traffic,
    effective_status,
    status_text,
    verdict_text,
)


@pytest.mark.parametrize(
    ("is_on", "speedup", "text"),
    [
        (True, 0.24, "On, +24%"),
        (True, 0.2499, "On, +24%"),
        (True, 0.29, "On, +29%"),  # 100 * 0.29 is 28.999999999999996
        (True, 1.13, "On, +113%"),
        (True, 0.01, "On, +1%"),
        (True, 0.0099, "Off, +0%"),
        (True, -0.2, "Off, −20%"),
        (False, -0.18, "Off, −18%"),
        (False, -0.1899, "Off, −18%"),
        (False, -0.009, "Off, +0%"),
        (False, 0.0, "Off, +0%"),
        (False, 0.4, "Off, +0%"),
        (False, -0.99, "Off, −99%"),
    ],
)
def test_figures_are_rounded_towards_zero_and_off_is_never_positive(
    is_on: bool, speedup: float, text: str
):
    """Each line of the contract, with its edges."""
    assert verdict_text(is_on, speedup) == text


def test_the_minus_is_the_typographic_one():
    """Programs that look for the sign find U+2212, not a hyphen."""
    assert "\u2212" in verdict_text(False, -0.5)
    assert "-" not in verdict_text(False, -0.5)


# --- the nine texts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("on", "On, +24%"),
        ("off", f"Off, {MINUS}18%"),
        ("measuring", "Measuring"),
        ("automatic", "Automatic"),
        ("paused", "Paused"),
        ("settings_off", "Off (worker's Settings)"),
        ("platform_off", f"Off (by {PLATFORM})"),
        ("starting", "Starting"),
        ("needs_update", "Needs a worker update"),
        ("none", None),
    ],
)
def test_each_state_has_its_text(state: State, text: str | None):
    """The contract; programs compare it."""
    assert Status(state, speedup=-0.18 if state == "off" else 0.24).text == text


def test_whose_switch_it_is_can_be_named():
    """A gateway setting; the default is the platform's own name."""
    assert status_text(Status("platform_off"), platform="Acme") == "Off (by Acme)"


@pytest.mark.parametrize("state", ["measuring", "automatic", "paused", "starting"])
def test_states_without_a_verdict_show_no_figure(state: State):
    """Also where one was measured."""
    assert Status(state, speedup=0.24).text == state.capitalize()


# --- which one applies ------------------------------------------------------------------------

MEASURED = Status(
    "on", speedup=0.24, low=0.2, high=0.28, depth=3, acceptance=0.7, tokens_per_round=3.1,
    cost=1.6, requests=12, tokens=3000, loss=9.5, loss_share=0.003, since_s=77.0, why="so",
)  # fmt: skip


@pytest.mark.parametrize("measured", [None, MEASURED], ids=["nothing-reported", "measured"])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=5)))
def test_of_all_that_applies_the_first_is_shown(flags: tuple[bool, ...], measured: Status | None):
    """No line, then the update, the platform, the Settings, the pause, Starting, the measured."""
    has_no_draft, is_old, by_platform, by_settings, is_paused = flags
    shown = effective_status(
        measured,
        has_draft=not has_no_draft,
        decides=not is_old,
        is_off_by_platform=by_platform,
        is_off_by_settings=by_settings,
        is_paused=is_paused,
    )
    order = ["none", "needs_update", "platform_off", "settings_off", "paused"]
    applying = [state for state, is_set in zip(order, flags, strict=True) if is_set]
    assert shown.state == [*applying, "on" if measured else "starting"][0]


def test_what_was_measured_is_kept_under_a_switch():
    """So that it is there again when the switch is turned back."""
    paused = effective_status(MEASURED, has_draft=True, is_paused=True)
    assert dataclasses.replace(paused, state="on") == MEASURED


def test_without_a_switch_the_measured_status_is_shown_as_it_is():
    """Nothing is worked out anew on the way."""
    assert effective_status(MEASURED, has_draft=True) is MEASURED


# --- why --------------------------------------------------------------------------------------

WHYS = [
    words.WHY_AUTOMATIC,
    words.WHY_MEASURING,
    words.WHY_WAITING,
    words.WHY_SAVINGS,
    words.WHY_DOUBT,
    words.WHY_RETRY,
    words.why_on(weigh([0.8] * 7, [1.0] * 7, 0.0)),
    words.why_off(weigh([1.25] * 7, [1.0] * 7, 0.0)),
    words.why_off(weigh([0.99] * 7, [1.0] * 7, 0.0)),
]


@pytest.mark.parametrize("why", WHYS)
def test_why_is_one_sentence(why: str):
    """In one line, without a full stop, as it stands beside the text."""
    assert why
    assert why == why.strip()
    assert not set(why) & set(".\n;")


@pytest.mark.parametrize(
    ("taus", "why"),
    [
        ([0.8] * 7, "7 requests were 25 % faster with drafts"),
        ([0.6, 1.0], "2 requests were 25 % faster with drafts"),
    ],
)
def test_why_on_says_by_how_much(taus: list[float], why: str):
    """Rounded as the figure is."""
    assert words.why_on(weigh(taus, [1.0] * len(taus), 0.0)) == why


@pytest.mark.parametrize(
    ("tau", "why"),
    [
        (1.25, "7 requests would have been 20 % slower with drafts"),
        (1.001, "7 requests were not clearly faster with drafts"),
        (0.99, "7 requests were not clearly faster with drafts"),
    ],
)
def test_why_off_says_what_it_would_have_cost(tau: float, why: str):
    """Or that there was nothing to gain, never that it was faster."""
    assert words.why_off(weigh([tau] * 7, [1.0] * 7, 0.0)) == why


# --- the figures of a controller --------------------------------------------------------------

COSTS = {1: 1.2, 2: 1.5, 4: 2.0}


def nothing_more(_: int) -> list[float]:
    """Of a request in which no deeper draft would ever have been right."""
    return [0.0] * (MAX_DEPTH + 1)


def sample_of(depth: int, accepted: list[int], plain_tokens: int = 0, bucket: int = 0) -> Sample:
    sample = Sample(plain_tokens=plain_tokens, bucket=bucket)
    for n in accepted:
        sample.hear(Round(depth, depth, n, 1.0, 0))
        sample.hear_at_every_depth(depth, depth, n, nothing_more)
    return sample


def controller_of(phase: Phase, *samples: Sample) -> Controller:
    """That has measured these costs exactly, and heard these requests."""
    controller = Controller(curve=COSTS, depths=list(COSTS))
    memory = controller.memory
    memory.phase, memory.samples = phase, list(samples)
    memory.n_requests = len(samples)
    memory.costs.hear([CostPair(k, 0, math.log(cost), 1.0) for k, cost in COSTS.items()] * 9)
    memory.ledger.trial_loss, memory.ledger.decode = 12.0, 400.0
    memory.since_s = 5.0
    controller.refresh()
    return controller


def test_what_a_grammar_forced_is_not_in_the_acceptance():
    """Ids that nothing else could have been are no merit of the draft."""
    sample = Sample()
    for n_accepted in (4, 2, 1):  # two forced, then two of the draft's own: 2, 0 and 0 accepted
        sample.hear(Round(4, 4, n_accepted, 1.0, 0, forced=2))
        sample.hear_at_every_depth(4, 4, n_accepted, nothing_more)
    assert controller_of("on", sample).status.acceptance == 2 / 6


GAINING = [sample_of(2, [2, 2, 1, 1], plain_tokens=6), sample_of(4, [4, 4]), sample_of(2, [2] * 4)]
LOSING = [sample_of(2, [0] * 8), sample_of(2, [0, 0, 0, 1]), sample_of(2, [0] * 6)]


def test_acceptance_is_what_was_accepted_of_what_was_drafted():
    """6 of 8, 8 of 8 and 8 of 8."""
    assert controller_of("on", *GAINING).status.acceptance == pytest.approx(22 / 24)


def test_tokens_per_round_is_their_mean():
    """10, 10 and 12 tokens from 4, 2 and 4 rounds."""
    assert controller_of("on", *GAINING).status.tokens_per_round == pytest.approx(32 / 10)


def test_cost_is_that_of_the_average_round():
    """Eight rounds of depth 2 and two of depth 4."""
    expected = (8 * COSTS[2] + 2 * COSTS[4]) / 10
    assert controller_of("on", *GAINING).status.cost == pytest.approx(expected)


def test_cost_is_that_of_the_contexts_that_were_served():
    """Attention over 20,000 tokens makes a round cost more steps, or fewer."""
    controller = controller_of("on", *(sample_of(2, [2] * 9, bucket=2) for _ in range(3)))
    pairs = [CostPair(2, bucket, math.log(cost), 1.0) for bucket, cost in ((0, 1.3), (2, 1.8))]
    costs = controller.memory.costs = Costs(curve=COSTS)
    costs.hear(pairs * 20)
    controller.refresh()
    table = costs.table(2)
    assert table[2] > 1.1 * costs.table(0)[2]
    assert controller.status.cost == pytest.approx(table[2])


def test_the_depth_while_on_is_the_one_that_most_rounds_used():
    """Eight of depth 2, two of depth 4."""
    assert controller_of("on", *GAINING).status.depth == 2


def test_the_depth_while_off_is_the_best_one():
    """The figure is about it: next to all drafts are wrong, so the shallowest loses least."""
    assert controller_of("off", *LOSING).status.depth == 1


def test_requests_and_tokens_are_those_that_the_figure_rests_on():
    """Plain tokens of a request that stopped drafting included."""
    status = controller_of("on", *GAINING).status
    assert (status.requests, status.tokens) == (3, 38)


def test_the_figure_while_on_is_the_policys():
    """What was saved with exits, as evidence has it."""
    controller = controller_of("on", *GAINING)
    policy = controller.policy.estimate
    status = controller.status
    assert (status.speedup, status.low, status.high) == (policy.speedup, policy.low, policy.high)
    table = controller.memory.costs.table(0)
    taus, weights = zip(*[sample.tau(table) for sample in GAINING], strict=True)
    mean = math.fsum(w * tau for w, tau in zip(weights, taus, strict=True)) / math.fsum(weights)
    assert status.speedup == pytest.approx(1 / mean - 1)


def test_the_figure_while_off_is_the_best_depths():
    """What it would have cost to draft throughout."""
    controller = controller_of("off", *LOSING)
    fixed = controller.fixed[0].estimate
    assert controller.status.speedup == fixed.speedup < 0
    assert (controller.status.low, controller.status.high) == (fixed.low, fixed.high)


def test_off_with_a_gain_reads_level():
    """Faster, but not clearly so: no positive number stands behind Off."""
    status = controller_of("off", *GAINING).status
    assert status.speedup is not None
    assert status.speedup > 0
    assert status.text == "Off, +0%"


def test_the_loss_is_the_ledgers():
    """In ps, and as a share of all that was decoded."""
    status = controller_of("measuring", *GAINING).status
    assert (status.loss, status.loss_share) == (12.0, pytest.approx(0.03))


def test_since_is_when_the_state_changed():
    """By the caller's clock."""
    assert controller_of("on", *GAINING).status.since_s == 5.0


@pytest.mark.parametrize("samples", [[], GAINING], ids=["nothing-yet", "some"])
def test_measuring_shows_its_text_and_why(samples: list[Sample]):
    """With or without a figure so far."""
    controller = controller_of("measuring", *samples)
    controller.memory.n_requests = 1
    controller.refresh()
    assert (controller.status.text, controller.status.why) == ("Measuring", words.WHY_MEASURING)


def test_without_a_request_it_is_automatic():
    """And says why."""
    status = Controller().status
    assert (status.text, status.why) == ("Automatic", words.WHY_AUTOMATIC)


def test_from_the_first_request_on_it_is_measuring():
    """Before that request has ended."""
    controller = Controller()
    controller.begin(Traffic(20), 0.0)
    assert controller.status.text == "Measuring"


def test_the_time_of_a_verdict_is_the_end_of_its_request():
    """Its beginning, and what its rounds took."""
    controller, ends = Controller(depths=[2]), list[float]()
    for n in range(20):
        ends.append(serve(controller, 1000.0 * n))
        if controller.status.state == "on":
            break
    assert controller.status.since_s == pytest.approx(ends[-1])


def serve(controller: Controller, now_s: float) -> float:
    """A request whose drafts are all right; returns when it ended. A step takes a second."""
    request = controller.begin(Traffic(20), now_s)
    written, took_s = 0, 0.0
    while written < 300:
        plan = request.plan()
        until = min(300, written + plan.tokens)
        while written < until:
            seconds = 1 + 0.1 * plan.depth
            request.observe(Round(plan.depth, plan.depth, plan.depth, 1000 * seconds, 20))
            written, took_s = written + plan.depth + 1, took_s + seconds
    request.end()
    return now_s + took_s


def test_a_status_is_a_record_that_nobody_changes():
    """It is replaced, not changed, so whoever holds one has a consistent set of figures."""
    controller = controller_of("on", *GAINING)
    before = controller.status
    copy = dataclasses.replace(before)
    serve(controller, 0.0)
    assert controller.status is not before
    assert before == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.speedup = 9.9  # pyright: ignore[reportAttributeAccessIssue]


def test_a_status_may_be_read_from_another_thread_at_any_time():
    """Each one read is one that was published, whole, and they come in order."""
    published, read = list[Status](), list[Status]()
    controller = Controller(depths=[2], on_concluded=lambda _: published.append(controller.status))
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            status = controller.status
            if not read or status is not read[-1]:
                read.append(status)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(20):
        serve(controller, 1000.0 * n)
    is_over.set()
    watcher.join()
    measured = [status for status in read if status.requests]
    numbers = [published.index(status) for status in measured]
    assert measured
    assert numbers == sorted(numbers)
