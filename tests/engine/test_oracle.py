"""The oracle drafter is right as often as it is told to be, and refuses what it can't know."""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any

import mlx.core as mx
import pytest

from mlx_worker.engine.arrays import ints
from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.records import GenerationRequest, Round, Sampling
from tests.oracle import Acceptance, Oracle, OraclePair, oracle_pair, random_target
from tests.tiny import VOCAB, Script, Written, tiny_pair, write

PROMPT = (2, *range(40, 51))
OTHER = (2, *range(60, 71))
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=5)}
REPLY = (9, 8, 7, VOCAB - 1, 5, 4)  # of an oracle that no target stands behind
DEVIATIONS = 4.0  # a right oracle lies outside once in 16,000; the draws are seeded


def asked(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 60, **changes: Any) -> Any:
    return GenerationRequest(prompt, max_tokens, ignore_eos=True, **changes)


@cache
def knowing(sampling: str, n_ids: int) -> OraclePair:
    """An oracle over the tiny target that knows n ids after PROMPT."""
    request = asked(max_tokens=n_ids, sampling=SAMPLINGS[sampling])
    return oracle_pair(tiny_pair("own"), [request], 1.0)


def written(pair: LoadedPair, n_ids: int, depth: int, sampling: str = "greedy") -> Written:
    return write(
        pair,
        PROMPT,
        n_ids,
        sampling=SAMPLINGS[sampling],
        ignore_eos=True,
        speculation="on",
        depth=depth,
    )


def heard(pair: LoadedPair, n_ids: int, depth: int) -> list[Round]:
    """The rounds of a greedy reply that proposed all they were asked for."""
    pacer = Script([(depth, n_ids)])
    write(pair, PROMPT, n_ids, pacer=pacer, ignore_eos=True)
    return [round for round in pacer.heard if round.drafted == depth]


def oracle(acceptance: Acceptance, **changes: Any) -> Oracle:
    """One that stands before the first id of REPLY."""
    drafter = Oracle({PROMPT: REPLY}, acceptance, VOCAB, **changes)
    drafter.begin(PROMPT)
    return drafter


def at(position: int) -> Cursor:
    return Cursor(0, mx.zeros((1, 1, 32)), position, None)


def proposal(drafter: Oracle, depth: int, position: int = 0) -> list[int]:
    ids = drafter.propose(depth, at(position)).ids
    return [] if ids is None else ints(ids)


@pytest.mark.parametrize(
    "acceptance", [0.3, pytest.param(0.8, marks=pytest.mark.long), (0.9, 0.6, 0.3)]
)
def test_each_position_is_right_as_often_as_asked(acceptance: Acceptance):
    """Among the rounds that got so far, within four binomial standard deviations."""
    rounds = heard(replace(knowing("greedy", 300), acceptance=acceptance), 300, depth=3)
    chances = acceptance if isinstance(acceptance, tuple) else (acceptance,) * 3
    for i, chance in enumerate(chances):
        n_tried = sum(round.accepted >= i for round in rounds)
        n_right = sum(round.accepted > i for round in rounds)
        assert n_tried >= 10
        assert abs(n_right - n_tried * chance) <= DEVIATIONS * sqrt(n_tried * chance * (1 - chance))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0, (1.0, 0.0, 1.0, 1.0)])
@pytest.mark.parametrize(
    ("sampling", "depth"),
    [
        ("greedy", 1),
        ("sampled", 4),
        pytest.param("greedy", 4, marks=pytest.mark.long),
        pytest.param("sampled", 1, marks=pytest.mark.long),
    ],
)
def test_the_reply_is_the_plain_one_at_any_acceptance(
    sampling: str, acceptance: Acceptance, depth: int
):
    """The target decides, whatever is proposed."""
    pair = knowing(sampling, 60)
    reply = written(replace(pair, acceptance=acceptance), 60, depth, sampling)
    assert tuple(reply.ids) == pair.replies[PROMPT]
    timing = reply.done.timing
    if acceptance == 0.0:
        assert timing.accepted == 0 < timing.drafted
    elif acceptance == 1.0:
        assert timing.accepted == timing.drafted > 0
    elif acceptance == 0.5:
        assert 0 < timing.accepted < timing.drafted
    else:
        assert timing.rounds - 1 <= timing.accepted <= timing.rounds  # the last may have no room


def test_other_seeds_are_right_elsewhere():
    """So that repeats of one reply are not the same draws; the same seed repeats them."""

    def pattern(seed: int) -> list[int]:
        pair = replace(knowing("greedy", 60), acceptance=0.5, seed=seed)
        return [round.accepted for round in heard(pair, 60, depth=3)]

    assert pattern(1) == pattern(1) != pattern(2)


def test_a_wrong_id_is_another_id_of_the_vocabulary():
    """Also for the last id there is."""
    wrong = proposal(oracle(0.0), len(REPLY))
    assert all(a != b for a, b in zip(wrong, REPLY, strict=True))
    assert all(0 <= id < VOCAB for id in wrong)


def test_a_certain_oracle_proposes_the_reply():
    """From wherever decoding stands."""
    drafter = oracle(1.0)
    assert proposal(drafter, 2) == [9, 8]
    drafter.commit([9, 8, 7], 2)
    assert proposal(drafter, 2, position=3) == [VOCAB - 1, 5]


def test_past_the_known_reply_nothing_is_proposed():
    """Towards its end fewer ids are, and the reply goes on without them."""
    drafter = oracle(1.0)
    drafter.commit(REPLY[:4], 0)
    assert proposal(drafter, 5, position=4) == [5, 4]
    drafter.commit([5, 4, 200], 2)
    assert drafter.propose(5, at(7)).n == 0
    reply = written(knowing("greedy", 20), 60, depth=3)
    assert tuple(reply.ids) == knowing("greedy", 60).replies[PROMPT]
    assert reply.done.timing.accepted <= 20


# --- misuse -----------------------------------------------------------------------------------


def misuses() -> dict[str, tuple[str, Callable[[], object]]]:
    """What is done wrong → a part of what is said, and how to do it."""
    pair = tiny_pair("own")
    greedy, seedless = asked(), asked(sampling=Sampling(temperature=1.0))
    standard = asked(sampling=SAMPLINGS["sampled"], acceptance="standard")
    return {
        "prompt": ("no known reply", lambda: oracle(1.0).begin(OTHER)),
        "session": (
            "no known reply",
            lambda: write(knowing("greedy", 60), OTHER, speculation="on"),
        ),
        "reply": ("departs", lambda: oracle(1.0).commit([10], 0)),
        "sampling": ("departs", lambda: written(knowing("greedy", 60), 60, 2, "sampled")),
        "place": ("asked at 3", lambda: oracle(1.0).propose(2, at(3))),
        "positions": ("for 2 positions", lambda: oracle((0.5, 0.5)).propose(3, at(0))),
        "laws": ("standard rule", lambda: oracle(1.0).propose(1, at(0), with_laws=True)),
        "depth": ("drafts nothing", lambda: oracle(1.0).propose(0, at(0))),
        "accepted": ("1, 0", lambda: oracle(1.0).commit([9], 1)),
        "above": ("not 0..1", lambda: oracle_pair(pair, [], 1.1)),
        "below": ("not 0..1", lambda: oracle_pair(pair, [], (0.5, -0.1))),
        "none": ("no position", lambda: oracle_pair(pair, [], ())),
        "charge": ("no draft", lambda: oracle_pair(pair, [], 0.5, charge=True)),
        "twice": ("same prompt", lambda: oracle_pair(pair, [greedy, greedy], 0.5)),
        "seed": ("random seed", lambda: oracle_pair(pair, [seedless], 0.5)),
        "rule": ("standard rule", lambda: oracle_pair(pair, [standard], 0.5)),
    }


@pytest.mark.parametrize("misuse", misuses())
def test_misuse_fails_and_says_why(misuse: str):
    """An experiment on a wrong premise must not give figures."""
    said, act = misuses()[misuse]
    with pytest.raises(AssertionError, match=said):
        act()


# --- charging a draft -------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed", "lookup"])
def test_a_charged_oracle_proposes_the_same(draft: str):
    """Every kind of draft can be charged for, and changes neither ids nor acceptance."""
    free = replace(knowing("greedy", 60), acceptance=0.6)
    charged = oracle_pair(tiny_pair("own", draft), [asked(max_tokens=30)], 0.6, charge=True)
    assert charged.draft_name == draft
    assert written(charged, 30, 3).ids == written(free, 30, 3).ids
    accepted = [[one.accepted for one in heard(pair, 27, 3)] for pair in (charged, free)]
    assert accepted[0] == accepted[1]


def test_a_charged_oracle_runs_the_steps_of_the_draft(monkeypatch: pytest.MonkeyPatch):
    """As many as a real one's, the last round's included; none when it isn't charged."""
    steps: list[int] = []
    step = Assistant.step

    def counted(self: Assistant, *arguments: Any) -> Any:
        steps.append(1)
        return step(self, *arguments)

    monkeypatch.setattr(Assistant, "step", counted)
    real = tiny_pair("own", "assistant")
    written(oracle_pair(real, [asked()], 0.5), 60, 3)
    assert steps == []
    reply = written(oracle_pair(real, [asked()], 0.5, charge=True), 60, 3)
    assert len(steps) == reply.done.timing.drafted


def test_charged_work_is_part_of_what_the_device_computes():
    """Thrown away, not left out: the proposal can't be had without it."""
    charged = oracle_pair(tiny_pair("own", "assistant"), [asked()], 1.0, charge=True)
    sizes = [len(graph(pair)) for pair in (charged, knowing("greedy", 60))]
    assert sizes[0] > 20 * sizes[1]


def graph(pair: OraclePair) -> str:
    """The operations behind a proposal of two ids after the prompt."""
    timelines = Timelines(pair.target.model)
    hidden = pair.target.hidden(mx.array([PROMPT]), timelines.layers)[:, -1:]
    timelines.evaluate()
    mx.eval(hidden)
    drafter = pair.drafter(timelines, Sampler(Sampling(), VOCAB, PROMPT))
    drafter.begin(PROMPT)
    first = pair.replies[PROMPT][0]
    drafter.commit([first], 0)
    drafts = drafter.propose(2, Cursor(first, hidden, 1, None))
    assert drafts.ids is not None
    text = io.StringIO()
    mx.export_to_dot(text, drafts.ids)
    return text.getvalue()


def test_another_draft_takes_the_place_of_the_oracle():
    """Bench's plain arm, for instance, is the target without it."""
    pair = knowing("greedy", 60)
    assert type(pair.with_draft("none")) is LoadedPair
    assert pair.with_draft("lookup").draft_kind == "lookup"


# --- the random target ------------------------------------------------------------------------


@cache
def small_target() -> LoadedPair:
    return random_target(60)


def test_a_random_target_has_the_size_asked_for():
    """To a layer."""
    assert small_target().target_bytes == pytest.approx(60e6, rel=0.1)
    assert small_target().dtype == "float32"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_random_target_writes_various_ids_the_same_with_an_oracle(sampling: str):
    """It does not repeat one id, and its verify pass agrees with its steps."""
    request = asked(max_tokens=12, sampling=SAMPLINGS[sampling])
    pair = oracle_pair(small_target(), [request], 0.7)
    reply = written(pair, 12, 3, sampling)
    assert tuple(reply.ids) == pair.replies[PROMPT]
    assert len(set(reply.ids)) > 1
