"""Pacers, driven round by round as a session drives them, on machines described in a line."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings, strategies as st

from mlx_worker.control import decide, status as words
from mlx_worker.control.controller import (
    BRACKETS,
    LATELY,
    MAX_LOSS,
    MAX_LOSS_SHARE,
    MAX_PAIRS,
    MOVED_STEP,
    PAIRED_EVERY,
    PAIRED_REQUESTS,
    RECENT,
    RETRY_REQUESTS,
    RETRY_TOKENS,
    SAVINGS_DROP,
    TRY_PAIRS,
    AwaitedPacer,
    Controller,
    Memory,
)
from mlx_worker.control.decide import MIN_BIG_LOOKS
from mlx_worker.control.measure import (
    BUCKETS,
    GAP_STEPS,
    PAIR_TOKENS,
    SURE_PAIRS,
    CostPair,
    Sample,
    bucket_of,
)
from mlx_worker.control.pacer import (
    DROPPED_STEPS,
    EXIT_LOSS,
    FOLLOWED_ROUNDS,
    LEAST_ROUNDS,
    MOVED_COST,
    PLAIN_TOKENS,
    SETTLE_STEPS,
    SHORT_REPLY_TOKENS,
    RequestPacer,
    kind_of,
)
from mlx_worker.records import MAX_DEPTH, Plan, Round, Traffic

repeatable = settings(derandomize=True, deadline=None, max_examples=40)
STEP_MS = 10.0
DEPTHS = range(1, MAX_DEPTH + 1)
ALL, NONE = MAX_DEPTH, 0  # drafts that are right in a row
LONG_TOKENS = 600  # a reply with room for some pairs in either order, and more
Right = Callable[[int], int]  # position in the reply → drafts that are right there


def cheap(depth: int) -> float:
    """ps of a round on a machine where drafts pay if most are right."""
    return 1.1 + 0.1 * depth


def dear(depth: int) -> float:
    """ps of a round on a machine where few drafts pay."""
    return 2.0 + 0.3 * depth


def as_usual(n: int, is_switch: bool) -> float:
    """No round is slower than it should be. n: its number in the reply."""
    return 1.0


@dataclass
class Segment:
    """A plan and the rounds or steps that followed it."""

    plan: Plan
    rounds: list[Round] = field(default_factory=list[Round])


def drive(
    pacer: RequestPacer | AwaitedPacer,
    n_tokens: int,
    *,
    right: Right | int = ALL,
    cost: Callable[[int], float] = cheap,
    step_ms: float = STEP_MS,
    context: int = 20,
    pace: Callable[[int, bool], float] = as_usual,
) -> list[Segment]:
    """One reply of so many tokens, the first from the prefill; the pacer isn't told of its end."""
    segments: list[Segment] = []
    n_ids, n = 1, 0
    while n_ids < n_tokens:
        plan = pacer.plan()
        is_switch = bool(segments) and (segments[-1].plan.depth > 0) != (plan.depth > 0)
        segments.append(Segment(plan))
        until = min(n_tokens, n_ids + plan.tokens)
        while n_ids < until:
            hits = right if isinstance(right, int) else right(n_ids)
            accepted = min(plan.depth, hits, n_tokens - n_ids - 1)
            price = cost(plan.depth) if plan.depth else 1.0
            round_ms = step_ms * price * pace(n, is_switch)
            round = Round(plan.depth, plan.depth, accepted, round_ms, context + n_ids - 1)
            pacer.observe(round)
            segments[-1].rounds.append(round)
            n_ids, n, is_switch = n_ids + accepted + 1, n + 1, False
    return segments


def serve(
    controller: Controller,
    n_tokens: int = 400,
    *,
    prompt: int = 20,
    temperature: float = 0.0,
    right: Right | int = ALL,
    cost: Callable[[int], float] = cheap,
    step_ms: float = STEP_MS,
    pace: Callable[[int, bool], float] = as_usual,
) -> list[Segment]:
    """One request from its beginning to its end."""
    request = controller.begin(Traffic(prompt, temperature), 0.0)
    segments = drive(
        request, n_tokens, right=right, cost=cost, step_ms=step_ms, context=prompt, pace=pace
    )
    request.end()
    return segments


def drafts(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment.plan.depth]


def is_plain(segments: Sequence[Segment]) -> bool:
    """Whether nothing was drafted, with one plan for the whole reply."""
    return len(segments) == 1 and segments[0].plan.depth == 0


def loss_of(segments: Sequence[Segment]) -> float:
    """ps that the drafted rounds took beyond their tokens."""
    return math.fsum(
        round.round_ms / STEP_MS - round.accepted - 1
        for segment in drafts(segments)
        for round in segment.rounds
    )


def new(
    cost: Callable[[int], float] = cheap,
    *,
    depths: Sequence[int] = DEPTHS,
    seed: int = 0,
    forced: Literal["on"] | None = None,
) -> Controller:
    """A controller whose load-time curve is right."""
    curve = {depth: cost(depth) for depth in DEPTHS}
    return Controller(curve=curve, depths=depths, seed=seed, forced=forced)


def on() -> Controller:
    """After some requests whose drafts were all right."""
    controller = new()
    for _ in range(10):
        serve(controller)
    assert controller.memory.phase == "on"
    return controller


def time_no_costs(controller: Controller) -> None:
    """The next requests are no brackets: costs count as timed just now."""
    controller.memory.time_costs_later()


def time_costs(controller: Controller) -> None:
    """The next request is a bracket."""
    controller.memory.costs.suspicion = 0.1
    controller.memory.haste = 2


def is_bracket(segments: Sequence[Segment]) -> bool:
    """Whether it times its costs again while On. Rounds have a plan each, plain steps have one."""
    return segments[0].plan.depth == 0


def plain_share(controller: Controller, n_requests: int, n_tokens: int) -> float:
    """ps that brackets cost, of all."""
    lost = total = 0.0
    for _ in range(n_requests):
        for segment in serve(controller, n_tokens):
            spent = math.fsum(round.round_ms for round in segment.rounds) / STEP_MS
            total += spent
            if not segment.plan.depth:
                lost += spent * (1 - math.exp(-controller.policy.theta))
    return lost / total


def off() -> Controller:
    """After the fewest requests with dear and wrong drafts that it took."""
    controller = new(dear)
    while controller.memory.phase == "measuring":
        assert controller.memory.n_requests < 40
        lose(controller)
    assert controller.memory.phase == "off"
    return controller


def lose(
    controller: Controller,
    n_tokens: int = 400,
    *,
    prompt: int = 20,
    temperature: float = 0.0,
    step_ms: float = STEP_MS,
) -> list[Segment]:
    """A request that loses by its drafts."""
    return serve(
        controller,
        n_tokens,
        prompt=prompt,
        temperature=temperature,
        right=NONE,
        cost=dear,
        step_ms=step_ms,
    )


# --- the course of a measuring request --------------------------------------------------------


def starts_drafting(seed: int) -> bool:
    """Whether the first request of this seed drafts after the dropped steps."""
    return new(seed=seed).begin(Traffic(20), 0.0).plan().tokens == DROPPED_STEPS


DRAFT_FIRST = next(seed for seed in range(99) if starts_drafting(seed))
PLAIN_FIRST = next(seed for seed in range(99) if not starts_drafting(seed))
EITHER = pytest.mark.parametrize("seed", [DRAFT_FIRST, PLAIN_FIRST], ids=["draft", "plain"])


def order(segments: Sequence[Segment]) -> str:
    """P for a plain segment, D for a drafted one."""
    return "".join("D" if segment.plan.depth else "P" for segment in segments)


def test_pairs_alternate_in_abba_order():
    """So that what drifts over a reply hits both halves alike; then plainly to the end."""
    assert order(serve(new(seed=PLAIN_FIRST), 2000)) == "PDDP" * (MAX_PAIRS // 2) + "P"


def test_a_request_that_begins_with_a_draft_drops_some_steps_before():
    """They are decoded plainly, outside any pair."""
    segments = serve(new(seed=DRAFT_FIRST), 2000)
    assert segments[0].plan == Plan(0, DROPPED_STEPS)
    assert order(segments[1:]) == "DPPD" * (MAX_PAIRS // 2) + "P"


def test_plain_halves_are_longer_by_the_steps_that_settle():
    """After the prefill and after rounds, not after the plain half before."""
    plans = [segment.plan.tokens for segment in serve(new(seed=PLAIN_FIRST), 2000)]
    settling = PAIR_TOKENS + SETTLE_STEPS
    assert plans[:5] == [settling, PAIR_TOKENS, PAIR_TOKENS, settling, PAIR_TOKENS]


def test_steps_that_settle_make_no_draft_look_better():
    """Plain steps right after rounds are slower; the costs rest on those after them."""
    controller = new(seed=PLAIN_FIRST, depths=[2])
    for _ in range(3):
        segments, request = [], controller.begin(Traffic(20), 0.0)
        plan = request.plan()
        for n in range(40):
            slow = [1.3] * SETTLE_STEPS + [1.0] * (plan.tokens + 1)
            for i in range(plan.tokens if not plan.depth else 8):
                ms = STEP_MS * (1.5 if plan.depth else slow[i if n % 4 != 3 else i + SETTLE_STEPS])
                accepted = 1 if plan.depth else 0
                request.observe(Round(plan.depth, plan.depth, accepted, ms, 20))
            segments.append(plan)
            plan = request.plan()
            if plan.tokens > 100:
                break
        request.end()
    assert controller.memory.costs.table(0)[2] == pytest.approx(1.5, rel=0.02)


def test_the_order_is_random_by_seed():
    """Half of the seeds begin either way, and always the same way."""
    starts = [starts_drafting(seed) for seed in range(100)]
    assert 30 < sum(starts) < 70
    assert starts == [starts_drafting(seed) for seed in range(100)]


def test_the_order_differs_between_requests():
    """One seed is not one order."""
    controller = new()
    requests = [controller.begin(Traffic(20), 0.0) for _ in range(40)]
    assert 8 < sum(request.plan().tokens == DROPPED_STEPS for request in requests) < 32


def test_no_request_has_more_than_eight_pairs():
    """More of one request would be one opinion asked twice."""
    controller = new(depths=[1])
    segments = serve(controller, 5000, right=1)
    assert len(drafts(segments)) == MAX_PAIRS
    assert len(controller.memory.costs.pairs) == MAX_PAIRS


@EITHER
def test_the_first_steps_after_prefill_are_in_no_pair(seed: int):
    """Caches are cold and buffers new: here they take twice as long."""
    controller = new(seed=seed, depths=[2])
    serve(controller, right=1, pace=lambda n, _: 2.0 if n < DROPPED_STEPS else 1.0)
    assert costs_heard(controller) == {round(math.log(cheap(2)), 9)}


@EITHER
def test_rounds_after_a_switch_count_as_they_were(seed: int):
    """They are hardly slower, and leaving them out could only favour the draft."""
    controller = new(seed=seed, depths=[2])
    serve(controller, right=1, pace=lambda _, is_switch: 2.0 if is_switch else 1.0)
    assert min(costs_heard(controller)) == round(math.log(cheap(2)), 9)
    assert max(costs_heard(controller)) > round(math.log(cheap(2)), 9)


@EITHER
def test_the_first_step_after_a_switch_is_billed(seed: int):
    """Trials did cost it, whatever they are compared by."""
    controller = new(seed=seed, depths=[2])
    segments = serve(controller, right=1, pace=lambda _, is_switch: 2.0 if is_switch else 1.0)
    assert controller.memory.ledger.trial_loss == pytest.approx(loss_of(segments))


def costs_heard(controller: Controller) -> set[float]:
    return {round(pair.log_cost, 9) for pair in controller.memory.costs.pairs}


def test_short_replies_use_half_pairs():
    """So that some fit."""
    controller = new()
    controller.memory.reply_tokens = SHORT_REPLY_TOKENS - 1
    plans = [segment.plan for segment in serve(controller, 300)]
    assert PAIR_TOKENS // 2 in {plan.tokens for plan in plans if plan.depth}
    assert PAIR_TOKENS not in {plan.tokens for plan in plans if plan.depth}


def test_a_reply_that_ends_in_its_first_segment_teaches_no_cost():
    """It has one half of a pair."""
    controller = new()
    serve(controller, DROPPED_STEPS)
    assert controller.memory.costs.pairs == []


def test_where_pairs_have_not_decided_most_requests_draft_as_if_on():
    """What is close then is what the policy gains, so that is measured; costs now and then."""
    late: list[int] = []
    for seed in range(6):
        controller = new(lambda _: 4 / 3, depths=[1], seed=seed)
        for n in range(2 * PAIRED_REQUESTS):
            assert controller.memory.phase == "measuring"
            has_pairs = any(s.plan.tokens > 1 for s in drafts(serve_close(controller, n)))
            assert has_pairs or n >= PAIRED_REQUESTS
            late += [n] * (has_pairs and n >= PAIRED_REQUESTS)
    expected = 6 * PAIRED_REQUESTS / PAIRED_EVERY
    assert expected / 2 < len(late) < 2 * expected
    assert len({n % 2 for n in late}) == 2, "of traffic that alternates, one kind would be timed"


def serve_close(controller: Controller, n: int) -> list[Segment]:
    """Of requests of which one in three gains a third, and the others lose a little."""
    return serve(controller, right=n % 3 == 0, cost=lambda _: 4 / 3)


def test_what_a_request_plans_does_not_depend_on_its_own_times():
    """Costs are learnt from it when it has ended, so its pairs are chosen without looking."""
    rng = random.Random(1)
    usual, noisy = new(), new()
    plans = [
        [segment.plan for segment in serve(controller, right=lambda n: n % 3, pace=pace)]
        for controller, pace in ((usual, as_usual), (noisy, lambda _, __: rng.uniform(0.5, 4)))
    ]
    assert plans[0] == plans[1]


# --- what trials may cost ---------------------------------------------------------------------


@pytest.mark.parametrize("price", [1.05, 1.3, 2.0, 5.0])
def test_a_request_that_does_not_benefit_is_let_go(price: float):
    """Within the loss that a trial may have, and the pair in which it is passed."""
    controller = new(lambda _: price, depths=[2])
    segments = serve(controller, 3000, right=NONE, cost=lambda _: price)
    worst_pair = PAIR_TOKENS * (price - 1)
    assert loss_of(segments) <= EXIT_LOSS[1] + worst_pair + 1e-9


def test_a_request_that_benefits_is_not_let_go():
    """Trials that gain have all their pairs."""
    assert len(drafts(serve(new(), 2000))) == MAX_PAIRS


@pytest.fixture
def only_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spent budget alone never says Off, as where picking requests could still gain."""
    monkeypatch.setattr(decide, "SPENT_PICKINGS", 0.0)


@pytest.mark.usefixtures("only_waiting")
def test_trials_stop_when_they_have_used_up_what_they_may_cost():
    """And the status says so."""
    controller = new(lambda _: 1.1)
    for _ in range(MIN_BIG_LOOKS):
        serve(controller, 120, right=NONE, cost=lambda _: 1.1)
    controller.memory.ledger.trial_loss = 2 * MAX_LOSS
    assert is_plain(serve(controller, 100))
    assert controller.memory.phase == "measuring"
    assert controller.status.why == words.WHY_WAITING


@EITHER
@pytest.mark.parametrize("n_requests", [4, 8])
def test_one_request_on_a_busy_machine_decides_nothing(seed: int, n_requests: int):
    """Its costs, more than half as much again, would price all requests before it."""
    controller = new(lambda _: 1.5, seed=seed, depths=[3])
    for n_tokens, cost in [*[(120, 1.5)] * n_requests, (60, 1.6 * 1.5)]:
        serve(controller, n_tokens, right=lambda n: n % 3 != 0, cost=lambda _, cost=cost: cost)
        assert controller.memory.phase == "measuring"


def test_a_draft_that_loses_much_is_off_although_few_pairs_fit_into_its_replies():
    """Requests of a dozen tokens, then long ones; the budget is spent before costs are sure."""
    controller = new(lambda _: 6.0, depths=[8])
    n_tokens = [12, 9, 12, 14, 26, 10, 34, *[90] * 8]
    losses = [
        loss_of(drafts(serve(controller, n, right=NONE, cost=lambda _: 6.0))) for n in n_tokens
    ]
    assert controller.memory.phase == "off"
    assert max(losses) < 200


def test_a_lone_request_is_not_enough_for_off_either():
    """Though it used up what trials may cost: it may be anything but representative."""
    controller = new(dear)
    controller.memory.ledger.trial_loss = MAX_LOSS - 1
    lose(controller)
    assert controller.memory.ledger.is_spent
    assert controller.memory.phase == "measuring"


@pytest.mark.usefixtures("only_waiting")
def test_trials_go_on_when_decoding_has_earned_more():
    """A share of all that was decoded may go into them."""
    controller = new(lambda _: 1.1)
    for _ in range(MIN_BIG_LOOKS):
        serve(controller, 120, right=NONE, cost=lambda _: 1.1)
    ledger = controller.memory.ledger
    ledger.trial_loss = MAX_LOSS + MAX_LOSS_SHARE * ledger.decode + 10
    enough = math.ceil(10 / MAX_LOSS_SHARE) + 2
    assert is_plain(serve(controller, enough // 2))
    assert is_plain(serve(controller, enough // 2 + 2))
    assert drafts(serve(controller))


def test_the_first_requests_are_measured_whatever_that_costs():
    """Else a draft that loses much would use up its trials before it can be judged."""
    controller = new(dear)
    controller.memory.ledger.trial_loss = 9 * MAX_LOSS
    for _ in range(MIN_BIG_LOOKS):
        assert drafts(lose(controller))


@pytest.mark.parametrize("seed", range(6))
def test_trials_that_are_used_up_draft_only_where_that_seems_to_gain(seed: int):
    """Whatever the requests are like; and every drafted round is in the ledger."""
    rng = random.Random(seed)
    price, depth = rng.uniform(1, 3), rng.choice([1, 3, 8])
    controller = new(lambda _: price, depths=[depth])
    ledger = controller.memory.ledger
    while controller.memory.phase == "measuring" and controller.memory.n_requests < 60:
        is_early = len(controller.memory.samples) < MIN_BIG_LOOKS
        has_leave = is_early or not ledger.is_spent or controller.is_leaning
        before, hits = ledger.trial_loss, rng.randint(0, depth)
        segments = serve(controller, rng.randint(5, 500), right=hits, cost=lambda _: price)
        assert has_leave or not drafts(segments)
        assert ledger.trial_loss == pytest.approx(before + loss_of(segments))


def test_one_request_of_trials_never_costs_more_than_its_exit_and_a_pair():
    """However dear it is at every depth, and with all depths to choose from."""
    controller = new(dear)
    before = 0.0
    for _ in range(12):
        lose(controller, 1000)
        loss = controller.memory.ledger.trial_loss
        assert loss - before <= EXIT_LOSS[1] + PAIR_TOKENS * dear(MAX_DEPTH)
        before = loss


def test_a_machine_that_slept_does_not_use_up_what_trials_may_cost():
    """One gap of a minute in the first drafted round; nothing was lost by drafting."""
    controller = new(seed=DRAFT_FIRST)
    segments = serve(
        controller, pace=lambda n, _: 60_000 / STEP_MS if n == DROPPED_STEPS + 1 else 1.0
    )
    assert max(round.round_ms for round in drafts(segments)[0].rounds) > 60_000
    assert not controller.memory.ledger.is_spent


def test_rounds_that_are_always_far_dearer_than_thought_are_billed():
    """A curve that is quite wrong, or a busy device: no gap, and trials must not go on for ever."""
    controller = new(cheap, depths=[2], seed=DRAFT_FIRST)
    segments = serve(controller, right=NONE, cost=lambda _: 2 * GAP_STEPS * cheap(2))
    assert controller.memory.ledger.trial_loss == pytest.approx(loss_of(segments))


# --- what is discarded ------------------------------------------------------------------------


@EITHER
def test_a_machine_that_slept_in_a_pair_discards_it(seed: int):
    """The other pairs are as good as ever."""
    controller = new(seed=seed, depths=[2])
    serve(controller, 1000, right=1, pace=lambda n, _: 2 * GAP_STEPS if n == 30 else 1.0)
    assert len(controller.memory.costs.pairs) == MAX_PAIRS - 1
    assert costs_heard(controller) == {round(math.log(cheap(2)), 9)}


def overlapping(controller: Controller) -> tuple[list[Segment], list[Segment]]:
    """Two requests, the second begun and ended inside the first."""
    first = controller.begin(Traffic(20), 0.0)
    segments = drive(first, 30)
    second = serve(controller)
    first.end()
    return segments, second


def test_requests_that_overlap_teach_nothing():
    """Each one's times have the other in them."""
    controller = new()
    overlapping(controller)
    memory = controller.memory
    assert (memory.samples, memory.costs.pairs, memory.levels.seen) == ([], [], {})
    assert memory.step_ms == {}


def test_requests_that_overlap_are_billed():
    """Their trials cost what they cost."""
    controller = new(dear)
    first = controller.begin(Traffic(20), 0.0)
    segments = drive(first, 30, right=NONE, cost=dear)
    segments += lose(controller)
    first.end()
    assert controller.memory.ledger.trial_loss == pytest.approx(loss_of(segments))


def test_a_request_after_an_overlap_teaches_again():
    """Nothing sticks to the controller."""
    controller = new()
    overlapping(controller)
    assert controller.is_idle
    serve(controller)
    assert len(controller.memory.samples) == 1


def test_ending_twice_is_ending_once():
    """A session that fails while it ends may do so."""
    controller = new()
    request = controller.begin(Traffic(20), 0.0)
    drive(request, 400)
    request.end()
    once = copy.deepcopy(controller.memory)
    request.end()
    assert controller.memory == once
    assert controller.n_concluded == 1


def test_a_reply_that_ends_at_once_concludes_nothing():
    """Its only token came from the prefill, so no plan was asked for; still Automatic."""
    controller = new()
    pacer = controller.await_request(Traffic(20), 0.0)
    pacer.end()
    assert controller.memory == new().memory
    assert controller.status.text == "Automatic"


def test_an_awaited_request_is_one_like_any_other():
    """From its first plan on."""
    awaited, begun = new(), new()
    pacer = awaited.await_request(Traffic(20), 0.0)
    drive(pacer, 400)
    pacer.end()
    serve(begun, 400)
    assert awaited.memory == begun.memory


def test_a_request_whose_client_left_at_once_teaches_nothing():
    """A plan was asked for, and no round followed."""
    controller = new()
    request = controller.begin(Traffic(20), 0.0)
    request.plan()
    request.end()
    assert controller.memory.samples == []
    assert controller.status.text == "Measuring"


def test_a_load_is_from_scratch():
    """What another controller learnt is not in a new one, not even by a shared default."""
    on()
    assert Controller().memory == Memory()
    assert Controller().status.text == "Automatic"


@pytest.mark.parametrize(
    ("traffic", "kind"),
    [
        (Traffic(9), "greedy"),
        (Traffic(9, temperature=0.5), "warm"),
        (Traffic(9, temperature=1.0), "hot"),
        (Traffic(9, has_grammar=True), "greedy+grammar"),
    ],
)
def test_traffic_is_told_apart_by_temperature_and_grammar(traffic: Traffic, kind: str):
    """All that is known before a request begins, besides its length."""
    assert kind_of(traffic) == kind


# --- On ---------------------------------------------------------------------------------------


def test_drafts_that_gain_are_on():
    """With the text that every place shows."""
    status = on().status
    assert status.state == "on"
    assert status.text is not None
    assert status.text.startswith("On, +")


def test_a_lone_request_is_not_enough():
    """It may be anything but representative."""
    controller = new()
    serve(controller, 5000)
    assert controller.status.text == "Measuring"


def test_while_on_every_round_has_its_own_plan():
    """So that the depth can follow."""
    segments = serve(on())
    assert {segment.plan.tokens for segment in segments} == {1}
    assert order(segments) == "D" * len(segments)


@pytest.mark.parametrize(
    ("n", "may_change"),
    [(1, True), (FOLLOWED_ROUNDS, True), (FOLLOWED_ROUNDS + 1, False), (FOLLOWED_ROUNDS + 2, True)],
)
def test_each_of_the_first_rounds_may_change_the_depth_then_every_second_one(
    n: int, may_change: bool
):
    """Deciding has a price as well, and a reply of many rounds has shown what it is like."""
    controller = mixed()
    before = itertools.product([1, 2, ALL], repeat=min(n - 1, 4))
    changed = [
        next_depth(controller, [*hits, 0]) != next_depth(controller, [*hits, ALL])
        for hits in before
    ]
    assert any(changed) == may_change


def mixed() -> Controller:
    """On; of its requests one in three has next to no drafts right, one half of them."""
    controller = new()
    for i in range(45):
        serve(controller, 600, right=kind_of_text(i))
    assert controller.memory.phase == "on"
    return controller


def kind_of_text(i: int) -> Right:
    """All drafts are right, two in a row, or one now and then."""
    return [lambda _: ALL, lambda _: 2, lambda n: n % 7 == 0][i % 3]


def test_the_depth_follows_acceptance_within_a_few_rounds():
    """One model, two texts: the depth belongs to the request."""
    controller = mixed()
    depths = [
        [segment.plan.depth for segment in drafts(serve(controller, 200, right=right))][4:12]
        for right in (ALL, 2)
    ]
    assert min(depths[0]) > max(depths[1]) >= 1


def test_worse_acceptance_lowers_the_next_depth():
    """Round by round: with the same rounds before it, a worse one never raises what follows."""
    controller = mixed()
    rng = random.Random(2)
    for _ in range(20):
        hits = [rng.choice([0, 2, ALL]) for _ in range(rng.randint(1, 20))]
        following = [next_depth(controller, [*hits[:-1], last]) for last in range(ALL + 1)]
        assert following == sorted(following)


def next_depth(controller: Controller, hits: Sequence[int]) -> int:
    """Of a request whose rounds went so; 0 where it has stopped."""
    controller = copy.deepcopy(controller)
    time_no_costs(controller)
    request = controller.begin(Traffic(20), 0.0)
    plan = request.plan()
    for n in hits:
        if not plan.depth:
            break
        accepted = min(n, plan.depth)
        request.observe(Round(plan.depth, plan.depth, accepted, STEP_MS * cheap(plan.depth), 50))
        plan = request.plan()
    return plan.depth


def test_a_request_that_does_not_benefit_is_decoded_plainly_for_longer_and_longer():
    """It comes back after each stretch."""
    controller = mixed()
    time_no_costs(controller)
    segments = serve(controller, 6000, right=NONE)
    plain = [segment.plan.tokens for segment in segments if not segment.plan.depth]
    least, most = PLAIN_TOKENS
    assert plain == [min(least * 2**n, most) for n in range(len(plain))]
    assert plain.count(most) >= 3


def test_a_request_that_does_not_benefit_loses_little():
    """Before its first plain stretch, and each time that it comes back."""
    controller = mixed()
    time_no_costs(controller)
    segments = serve(controller, 6000, right=NONE)
    runs = [
        list(g)
        for is_plain, g in itertools.groupby(segments, lambda s: not s.plan.depth)
        if not is_plain
    ]
    assert len(runs) > 5
    assert max(map(loss_of, runs)) <= 2 * EXIT_LOSS[1]


def test_a_request_has_a_few_rounds_before_it_is_parked():
    """What others of its kind were like does not park it before it was heard."""
    controller = mixed()
    time_no_costs(controller)
    segments = serve(controller, 300, right=NONE)
    assert order(segments).index("P") >= LEAST_ROUNDS


def test_a_request_that_benefits_again_drafts_again():
    """Parked is not parked for good."""
    segments = serve(mixed(), 3000, right=lambda n: ALL if n > 500 else NONE)
    assert order(segments[-20:]) == "D" * 20
    assert "P" in order(segments)


@pytest.mark.parametrize("n_good", [10, 100])
def test_a_request_that_stops_benefiting_is_let_go_soon(n_good: int):
    """Its drafts were all right, then none is: a few dozen ps below its peak is enough to see."""
    controller = on()
    time_no_costs(controller)
    request, n_bad, lost = controller.begin(Traffic(20), 0.0), 0, 0.0
    for n in range(300):
        depth = request.plan().depth
        if not depth:
            break
        accepted = depth if n < n_good else 0
        request.observe(Round(depth, depth, accepted, STEP_MS * cheap(depth), 50 + n))
        n_bad += n >= n_good
        lost += cheap(depth) - 1 if n >= n_good else 0.0
    assert lost <= 4 * EXIT_LOSS[1], f"{lost:.0f} ps in {n_bad} rounds"


def test_while_on_one_request_in_so_many_times_its_costs_again():
    """The baseline is measured again, not remembered for ever."""
    controller = on()
    found = [n for n in range(400) if is_bracket(serve(controller, 2000))]
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert BRACKETS[0][0] <= min(gaps) <= BRACKETS[0][0] + 2
    assert sum(gaps) / len(gaps) <= BRACKETS[0][0] + 2
    assert len({n % 2 for n in found}) == 2, "of traffic that alternates, one kind would be timed"


def test_a_request_that_times_its_costs_again_has_a_plain_stretch_first():
    """Beside which its own rounds are timed, depth by depth."""
    controller = on()
    time_costs(controller)
    before = len(controller.memory.costs.pairs)
    segments = serve(controller, LONG_TOKENS)
    assert len(controller.memory.costs.pairs) > before
    assert order(segments)[:2] == "PD"
    assert order(segments[1:]) == "D" * (len(segments) - 1)


def test_a_request_that_is_cancelled_before_its_costs_were_timed_leaves_it_to_the_next():
    """Clients that always leave early must not keep old costs for ever."""
    controller = on()
    time_costs(controller)
    serve(controller, 4)
    assert is_bracket(serve(controller, LONG_TOKENS))
    assert not is_bracket(serve(controller, LONG_TOKENS))


@pytest.mark.parametrize("n_tokens", [31, 100, 400])
def test_timing_costs_again_costs_one_percent(n_tokens: int):
    """Where a lot is gained, a plain stretch loses a lot: it comes more seldom then."""
    controller = on()
    controller.memory.reply_tokens = float(n_tokens)
    share = plain_share(controller, 300, n_tokens)
    assert 0 < share <= 1.2 / BRACKETS[0][1]


@pytest.mark.parametrize("change", [1 + 2 * MOVED_COST, 1 - 2 * MOVED_COST])
def test_rounds_that_moved_have_their_costs_timed_again_sooner(change: float):
    """Many in a row took longer, or shorter, than the costs say."""
    controller, waited = on(), 0
    time_no_costs(controller)
    while not is_bracket(serve(controller, 2000, cost=lambda depth: change * cheap(depth))):
        assert controller.memory.haste
        waited += 1
    assert waited < BRACKETS[0][0] - 1


@pytest.mark.parametrize("change", [1.3, 0.8])
def test_costs_that_are_contradicted_are_timed_again_at_once(change: float):
    """So that a machine that was busy for a moment is told from one that has changed."""
    controller = on()
    while len(controller.memory.costs.pairs) < 3 * SURE_PAIRS:
        time_costs(controller)
        serve(controller)
    time_costs(controller)
    controller.memory.costs.suspicion = 0.0
    while not is_bracket(serve(controller, cost=lambda depth: change * cheap(depth))):
        pass
    assert controller.memory.costs.suspicion
    assert is_bracket(serve(controller))
    assert not controller.memory.costs.suspicion


def test_a_few_slow_rounds_are_no_move():
    """Hiccups that come again and again are no reason to measure again."""
    controller = on()
    time_no_costs(controller)
    serve(controller, pace=lambda n, _: [1.5, 1.0, 0.5][n % 3])
    for _ in range(BRACKETS[1][0] + 1):
        assert not is_bracket(serve(controller))


@pytest.mark.parametrize("n_tokens", [16, 31, 60])
@pytest.mark.parametrize("change", [5.0, 8.0])
def test_short_replies_on_a_machine_that_slowed_down_are_measured_soon(
    n_tokens: int, change: float
):
    """Rounds of each are too few for a run of slow ones; what they took beyond costs adds up."""
    controller, lost, n = new(), 0.0, 0
    for _ in range(200):
        serve(controller, n_tokens)
    assert controller.memory.phase == "on"
    while controller.memory.phase == "on":
        segments = serve(controller, n_tokens, cost=lambda depth: change * cheap(depth))
        lost += loss_of(segments)
        n += 1
        assert n < 80
    assert lost < 2 * SAVINGS_DROP[1]


def test_haste_lasts_until_costs_are_timed():
    """A request that was as fast as ever doesn't take back what one before it showed."""
    controller = on()
    time_no_costs(controller)
    controller.memory.haste = 1
    segments = serve(controller)
    while not is_bracket(segments):
        assert controller.memory.haste == 1
        segments = serve(controller)
    assert controller.memory.haste == 0


@pytest.mark.parametrize("every", [2, 3])
def test_a_machine_that_is_slow_for_every_so_many_th_request_is_found_out(every: int):
    """On at a true loss, with a narrow interval: only the fast kind was ever timed."""
    controller = Controller(curve=dict.fromkeys(DEPTHS, 1.6), depths=[1])
    shown: list[float] = []
    for n in range(300):
        is_slow = n >= 40 and n % every == 0
        serve(controller, 60, right=1, cost=lambda _, price=3.2 if is_slow else 1.6: price)
        if n > 150 and controller.memory.phase == "on":
            shown.append(controller.status.speedup or 0.0)
    true = 2 * every / (1.6 * (every - 1) + 3.2) - 1
    assert true < -0.05
    assert len(shown) < 75, f"{len(shown)} of 150 requests On at a true {true:.0%}"


def test_disturbed_requests_are_not_all_brackets():
    """Their costs aren't learnt from, so timing them again and again would gain nothing."""
    controller = on()
    n_brackets = 0
    controller.memory.haste = 2
    for _ in range(50):
        request = controller.begin(Traffic(20), 0.0)
        request.disturb()
        n_brackets += is_bracket(drive(request, 31))
        request.end()
    assert n_brackets <= 1


@pytest.mark.parametrize("zero", ["all", "rounds", "half of the steps"])
def test_a_clock_that_stands_still_breaks_nothing(zero: str):
    """Two reads of a coarse clock may be equal."""

    def pace(n: int, _: bool) -> float:
        return 0.0 if zero == "all" or n % 3 else 1.0

    controller = new()
    for _ in range(6):
        serve(controller, 120, pace=pace, cost=(lambda _: 0.0) if zero == "rounds" else cheap)
    assert controller.n_concluded == 6


def test_drafts_that_no_longer_save_are_measured_again():
    """A fall of acceptance in all requests is noticed, and the status says why."""
    controller = on()
    for _ in range(2 * RECENT):
        serve(controller, right=NONE)
        if controller.memory.phase != "on":
            break
    assert controller.memory.phase == "measuring"
    assert controller.status.why in (words.WHY_SAVINGS, words.WHY_DOUBT)
    assert controller.status.text == "Measuring"


def test_a_steady_loss_is_noticed_long_before_the_figure_has_fallen():
    """By the savings or by the last requests; not by one request. Here rounds cost four steps."""
    controller, n = on(), 0
    for _ in range(RECENT):
        serve(controller)
    for _ in range(2):
        controller.memory.costs.hear([CostPair(MAX_DEPTH, 0, math.log(4.0), 1.0)] * 8)
    while controller.memory.phase == "on":
        assert n < LATELY
        n += 1
        assert loss_of(serve(controller, 8000, right=NONE, cost=lambda _: 4.0)) > 0
    assert controller.memory.why in (words.WHY_SAVINGS, words.WHY_DOUBT)
    assert n >= 3


def test_one_bad_request_is_no_reason_to_measure_again():
    """However long and bad it was."""
    controller = on()
    serve(controller, 5000, right=NONE)
    assert controller.memory.phase == "on"


def test_no_request_alone_ends_on_by_the_savings():
    """However long it was and however often it came back: one is no trend."""
    controller = on()
    for _ in range(2):
        controller.memory.costs.hear([CostPair(MAX_DEPTH, 0, math.log(8.0), 1.0)] * 8)
    segments = serve(controller, 60_000, right=NONE, cost=lambda _: 8.0)
    assert loss_of(segments) > 300
    assert controller.memory.phase == "on"


def test_measuring_again_may_cost_something_however_much_was_spent():
    """Otherwise a change late in a long life could never be judged."""
    controller = on()
    controller.memory.ledger.trial_loss = 50 * MAX_LOSS
    while controller.memory.phase == "on":
        assert controller.memory.n_requests < 2 * RECENT
        serve(controller, right=NONE)
    assert drafts(serve(controller))


def test_on_whose_gain_has_shrunk_below_one_percent_is_measured_again():
    """It would read +0 %, which nobody could tell from Off."""
    controller = on()
    controller.memory.samples = [sample_of(0.994)] * 6
    serve(controller, right=NONE)
    assert controller.status.text == "Measuring"


@pytest.mark.parametrize("share_good", [0.2, 0.5, 0.8])
def test_a_gain_below_one_percent_is_never_shown_as_on(share_good: float):
    """On whose figure falls below +1 is Measuring."""
    controller, rng = on(), random.Random(3)
    for _ in range(80):
        serve(controller, 200, right=1 if rng.random() < share_good else NONE, cost=dear)
        assert not (controller.memory.phase == "on" and str(controller.status.text)[:2] != "On")


def sample_of(tau: float) -> Sample:
    """Of a reply of 128 tokens at depth 1, all right, on a machine where that has this tau."""
    sample = Sample(plain_tokens=round(128 * (tau - 0.6) / 0.4))
    for _ in range((128 - sample.plain_tokens) // 2):
        sample.hear(Round(1, 1, 1, 1.0, 0))
        sample.hear_at_every_depth(1, 1, 1, lambda _: [0.0] * (MAX_DEPTH + 1))
    return sample


def test_a_gain_that_lately_was_none_is_not_shown_as_on_either():
    """A small gain is decided after many requests, of which the figure keeps the last."""
    controller = new(lambda _: 1.2, depths=[1])
    controller.memory.costs.hear([CostPair(1, 0, math.log(1.2), 1.0)] * 99)
    controller.memory.samples = [sample_of(0.8)] * 60 + [sample_of(0.995)] * (RECENT - 1)
    controller.memory.n_requests = len(controller.memory.samples)
    serve(controller, 200, right=1, cost=lambda _: 1.2)
    assert not (controller.memory.phase == "on" and str(controller.status.text)[:2] != "On")


def test_forced_on_drafts_whatever_it_costs():
    """To time the policy itself."""
    controller = new(dear, forced="on")
    for _ in range(40):
        assert drafts(lose(controller, 200))
        assert controller.memory.phase == "on"


# --- Off --------------------------------------------------------------------------------------


def test_drafts_that_lose_are_off():
    """With what they would have cost, and after few requests."""
    controller = off()
    assert controller.status.text is not None
    assert controller.status.text.startswith("Off, −")
    assert controller.memory.n_requests <= 12


def test_while_off_a_reply_is_plain_with_one_plan():
    """No plan per token: the plain path runs as it does without a draft."""
    assert is_plain(lose(off(), 1500))


def test_while_off_drafting_is_tried_again_after_some_plain_tokens():
    """Not before."""
    controller = off()
    n, decoded = 0, 0
    while is_plain(segments := lose(controller, 251)):
        n, decoded = n + 1, decoded + 250
        assert n < 100
    assert RETRY_TOKENS[0] <= decoded < RETRY_TOKENS[0] + 250
    assert len(drafts(segments)) <= TRY_PAIRS


def retries(controller: Controller, n: int, n_tokens: int) -> list[int]:
    """Plain tokens before each of so many re-tries."""
    found: list[int] = []
    decoded = 0
    while len(found) < n:
        if is_plain(lose(controller, n_tokens)):
            decoded += n_tokens - 1
        else:
            found.append(decoded)
            decoded = 0
        assert decoded < 10 * RETRY_TOKENS[1]
    return found


def test_retries_become_rarer_up_to_a_cap():
    """Each failed one doubles the wait."""
    controller, n_tokens = off(), 101
    controller.memory.ledger.granted = math.inf
    waits = [min(RETRY_TOKENS[0] * 2**n, RETRY_TOKENS[1]) for n in range(5)]
    for found, wait in zip(retries(controller, 5, n_tokens), waits, strict=True):
        assert min(wait, RETRY_REQUESTS * 100) <= found < wait + n_tokens


def test_retries_of_long_replies_double_up_to_a_cap():
    """Where the tokens come before the requests do."""
    controller, n_tokens = off(), RETRY_TOKENS[0] // 5
    controller.memory.ledger.granted = math.inf
    waits = [min(RETRY_TOKENS[0] * 2**n, RETRY_TOKENS[1]) for n in range(5)]
    for found, wait in zip(retries(controller, 5, n_tokens), waits, strict=True):
        assert wait <= found < wait + n_tokens


def test_where_replies_are_short_requests_count():
    """Otherwise it would take days."""
    controller = off()
    tried = [not is_plain(lose(controller, 31)) for _ in range(RETRY_REQUESTS + 1)]
    assert tried == [False] * RETRY_REQUESTS + [True]


def waiting(plain_tokens: int) -> Controller:
    """Off, with one failed re-try behind it and so many plain tokens since."""
    controller = off()
    retries(controller, 1, 251)
    assert controller.memory.retry_tokens > RETRY_TOKENS[0]
    lose(controller, plain_tokens + 1)
    return controller


NEW_TRAFFIC = pytest.mark.parametrize(
    ("temperature", "prompt"), [(1.0, 20), (0.0, BUCKETS[0] + 1)], ids=["kind", "context"]
)


@NEW_TRAFFIC
def test_traffic_not_yet_seen_is_tried_earlier(temperature: float, prompt: int):
    """What was measured doesn't tell about it."""
    controller = waiting(RETRY_TOKENS[0])
    assert is_plain(lose(copy.deepcopy(controller)))
    assert drafts(lose(controller, temperature=temperature, prompt=prompt))


@NEW_TRAFFIC
def test_traffic_not_yet_seen_is_not_tried_at_once(temperature: float, prompt: int):
    """Some plain tokens come between re-tries, however mixed the traffic is."""
    controller = waiting(RETRY_TOKENS[0] - 600)
    assert is_plain(lose(controller, temperature=temperature, prompt=prompt))


def test_traffic_that_was_tried_is_not_new_any_more():
    """Each kind costs its re-try once."""
    controller = waiting(RETRY_TOKENS[0])
    assert drafts(lose(controller, temperature=1.0))
    lose(controller, RETRY_TOKENS[0] + 1)
    assert is_plain(lose(controller, temperature=1.0))


def test_a_plain_step_that_moved_brings_a_retry_early():
    """Another machine state may favour drafts."""
    controller = waiting(10)
    for _ in range(12):
        lose(controller, RETRY_TOKENS[0] // 12 + 2, step_ms=STEP_MS * (1 + 2 * MOVED_STEP))
    assert drafts(lose(controller, step_ms=STEP_MS * (1 + 2 * MOVED_STEP)))


def test_a_retry_that_gains_is_measured_again():
    """From new evidence: the old says Off."""
    controller = off()
    while is_plain(serve(controller, 500, cost=cheap)):
        assert controller.memory.n_requests < 60
    assert (controller.status.text, controller.status.why) == ("Measuring", words.WHY_RETRY)
    assert len(controller.memory.samples) == 1


def test_a_machine_that_became_good_is_on_after_all():
    """Off is not for good."""
    controller = off()
    for _ in range(60):
        serve(controller, 500)
    assert controller.memory.phase == "on"


def test_after_on_the_wait_for_a_retry_is_short_again():
    """What was learnt about the machine in an earlier Off is out of date."""
    controller = waiting(10)
    while controller.memory.phase != "on":
        assert controller.memory.n_requests < 200
        serve(controller, 500)
    assert controller.memory.retry_tokens == RETRY_TOKENS[0]


def test_a_retry_that_loses_stays_off():
    """And is in the figure."""
    controller = off()
    n = controller.status.requests
    retries(controller, 1, 251)
    assert controller.memory.phase == "off"
    assert controller.status.requests == n + 1


def test_retries_cost_next_to_nothing():
    """They come too seldom to need the ledger's leave, on however bad a machine."""
    controller = off()
    ledger = controller.memory.ledger
    loss, decode = ledger.trial_loss, ledger.decode
    for _ in range(100):
        lose(controller, 501)
    assert 0 < ledger.trial_loss - loss < 0.01 * (ledger.decode - decode)


# --- a fixed depth, and slower rounds ---------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_fixed_depth_is_the_only_one_ever_planned(depth: int):
    """Or plain decoding: through measuring, On, measuring again, and Off."""
    controller, planned, phases = new(depths=[depth]), set[int](), set[str]()
    for n in range(120):
        good = n < 20
        segments = serve(controller, right=ALL if good else NONE, cost=cheap if good else dear)
        planned |= {segment.plan.depth for segment in segments}
        phases.add(controller.memory.phase)
    assert planned == {0, depth}
    assert phases == {"measuring", "on", "off"}


def undecided(hits: Sequence[int], price: float, depth: int) -> Controller:
    """After requests in each of which so many drafts in a row were right; one depth."""
    controller = new(lambda _: price, depths=[depth])
    for n in hits:
        serve(controller, 120, right=n, cost=lambda _: price)
    return controller


@repeatable
@given(
    st.lists(st.integers(0, 3), max_size=10),
    st.floats(1.0, 3.0),
    st.integers(0, 3),
    st.lists(st.floats(1.0, 3.0), min_size=120, max_size=120),
)
def test_slower_rounds_in_a_request_never_turn_off_into_on(
    before: list[int], price: float, hits: int, slower: list[float]
):
    """The same controller concludes the same request, whose drafted rounds took longer."""
    usual = undecided(before, price, depth=3)
    slow = copy.deepcopy(usual)
    if usual.memory.phase != "measuring":
        return
    pace = iter(slower)
    serve(usual, 120, right=hits, cost=lambda _: price)
    serve(slow, 120, right=hits, cost=lambda _: price * next(pace))
    assert (usual.memory.phase, slow.memory.phase) != ("off", "on")
    assert slow.policy.theta <= usual.policy.theta + 1e-12


@repeatable
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.floats(1.0, 3.0),
    st.floats(1.0, 1.5),
)
def test_a_slower_machine_never_gets_on_where_a_faster_one_got_off(
    hits: list[int], price: float, by: float
):
    """Whole courses of one depth over the same texts, in each of which drafts are alike."""
    usual, slow = (undecided(hits * (24 // len(hits)), p, depth=3) for p in (price, by * price))
    assert (usual.memory.phase, slow.memory.phase) != ("off", "on")


@repeatable
@given(st.integers(0, 3), st.lists(st.floats(1.0, 3.0), min_size=200, max_size=200))
def test_slower_rounds_in_a_retry_never_bring_it_back(hits: int, slower: list[float]):
    """Where it stayed Off with faster ones."""
    usual = copy.deepcopy(DUE)
    slow = copy.deepcopy(usual)
    pace = iter(slower)
    assert drafts(serve(usual, 200, right=hits, cost=dear))
    serve(slow, 200, right=hits, cost=lambda depth: dear(depth) * next(pace))
    assert (usual.memory.phase, slow.memory.phase) != ("off", "measuring")


def due() -> Controller:
    """Off, and the next request is a re-try."""
    controller = off()
    lose(controller, RETRY_TOKENS[0] + 1)
    return controller


DUE = due()


def test_what_a_grammars_steps_and_rounds_take_is_kept_apart():
    """Its plain steps can't be built ahead: others' drafts would seem to gain by that."""
    controller = Controller()
    for n in range(8):
        request, context = controller.begin(Traffic(20, has_grammar=True), float(n)), 20
        while context < 160:
            plan = request.plan()
            until = context + plan.tokens
            while context < until:
                took_ms = 10.0 + 2 * plan.depth
                request.observe(Round(plan.depth, plan.depth, plan.depth, took_ms, context))
                context += plan.depth + 1
        request.end()
    memory, own = controller.memory, bucket_of(20, has_grammar=True)
    assert set(memory.step_ms) == {own}
    assert {pair.bucket for pair in memory.costs.pairs} == {own}
    assert {sample.bucket for sample in memory.samples} == {own}
