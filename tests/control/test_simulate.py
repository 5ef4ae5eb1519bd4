"""The simulator: the machine is what it says, and a run is counted and judged as documented."""

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest

from mlx_worker.control.machine import Machine
from mlx_worker.control.outcome import (
    REPORTED,
    Account,
    Moment,
    Verdict,
    is_wrong,
    judged,
    n_flips,
    noticed,
)
from mlx_worker.control.pacer import WHOLE_REQUEST_TOKENS
from mlx_worker.control.scenario import Scenario, parse, read
from mlx_worker.control.simulate import Serving, main, regressed, run
from mlx_worker.control.solve import relative_sd, solve, throttled
from mlx_worker.records import Plan, Round, State, Status, Traffic

SCENARIOS = Path(__file__).parent.parent / "scenarios"
CPU_S = 3.0  # of 400 requests, start included
CONTRACT = [
    *("verdict_text", "verdict", "truth", "verdict_wrong", "requests_to_decide"),
    *("tokens_to_decide", "net_speed", "worst_loss", "on_off_flips"),
]
MORE = ["truth_policy", "figure", "low", "high", "spread", "measured_spread", "changes"]


class Listener:
    """One depth throughout, in plans of `tokens`; remembers what it heard."""

    def __init__(self, depth: int, tokens: int = WHOLE_REQUEST_TOKENS):
        self._plan = Plan(depth, tokens)
        self.rounds: list[Round] = []

    def plan(self) -> Plan:
        return self._plan

    def observe(self, round: Round) -> None:
        self.rounds.append(round)

    def end(self) -> None:
        """Nothing to conclude."""


class Fixed:
    """A controller that gives every request a Listener."""

    def __init__(self, depth: int, tokens: int = WHOLE_REQUEST_TOKENS):
        self._of = depth, tokens
        self.pacers: list[Listener] = []
        self.status = Status("automatic")

    def begin(self, traffic: Traffic, now_s: float) -> Listener:
        self.pacers.append(Listener(*self._of))
        return self.pacers[-1]

    @property
    def rounds(self) -> list[Round]:
        return [round for pacer in self.pacers for round in pacer.rounds]


def phase(**values: object) -> Scenario:
    (only,) = parse(values)
    return only


def served(scenario: Scenario, controller: Fixed, requests: int = 20) -> Serving:
    serving = Serving(controller)
    for request in Machine((scenario,), "test").requests(0, requests):
        serving.serve(request)
    return serving


# --- the machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "solve_by"), [(-0.18, "cost"), (0.24, "acceptance"), (0.45, "cost")]
)
def test_a_fixed_depth_gains_what_is_called_the_truth(effect: float, solve_by: str):
    """Mean ratio of 150 replies of 1,000 tokens within 4 standard errors, themselves below 1 %."""
    scenario = phase(
        effect=effect, solve_by=solve_by, spread=0.05, reply_tokens=1000, reply_spread=0
    )
    solved = solve(scenario)
    serving, ratios = Serving(Fixed(solved.depth)), list[float]()
    for request in Machine((scenario,), "fixed").requests(0, 150):
        true_ms, plain_ms = serving.account.true_ms, serving.account.plain_ms
        serving.serve(request)
        ratios.append((serving.account.true_ms - true_ms) / (serving.account.plain_ms - plain_ms))
    error = stdev(ratios) / math.sqrt(len(ratios))
    assert solved.truth == pytest.approx(effect)
    assert error < 0.01
    assert abs(fmean(ratios) - 1 / (1 + solved.truth)) < 4 * error


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_requests_differ_by_the_spread_that_is_asked_for(spread: float):
    """Relative SD of 800 ratios within 15 %, about 4 of its standard errors at 0.3."""
    scenario = phase(spread=spread, effect=0.1)
    depth = solve(scenario).depth
    ratios = [request.ratio(depth) for request in Machine((scenario,), "s").requests(0, 800)]
    assert relative_sd(ratios) == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize("depth", [1, 8])
def test_no_depth_beats_the_one_that_is_called_best(depth: int):
    """The truth is that of the best depth, so another one is slower."""
    scenario = phase(effect=0.2, spread=0.05, reply_tokens=1000)
    best, other = (served(scenario, Fixed(k)).account for k in (solve(scenario).depth, depth))
    assert best.true_ms < other.true_ms


def test_a_draft_is_right_or_wrong_whatever_was_planned():
    """Wherever rounds of depth 1 and of depth 8 both began, the first draft agrees."""
    found: list[dict[tuple[int, int], bool]] = []
    for depth in (1, 8):
        controller = Fixed(depth)
        served(phase(reply_max=4096), controller)
        found.append(
            {
                (n, round.context_tokens): round.accepted > 0
                for n, pacer in enumerate(controller.pacers)
                for round in pacer.rounds[:-1]  # the last is cut by the reply's end
            }
        )
    shallow, deep = found
    common = shallow.keys() & deep.keys()
    assert len(common) > 300
    assert {at: shallow[at] for at in common} == {at: deep[at] for at in common}


def test_plain_steps_take_what_they_take_however_plans_cut_them():
    """Plans of 1 token and of the whole reply hear the same times."""
    scenario = phase(burst_probability=0.5, drift=0.1, spike_probability=0.01)
    cut, whole = Fixed(0, tokens=1), Fixed(0)
    served(scenario, cut)
    served(scenario, whole)
    assert cut.rounds == whole.rounds


def test_plain_decoding_of_the_same_replies_takes_the_same_beside_any_depth():
    """Otherwise speed-ups of two pacers could not be compared."""
    accounts = [served(phase(drift=0.1), Fixed(depth)).account for depth in (0, 2, 7)]
    assert len({(account.tokens, round(account.plain_ms, 6)) for account in accounts}) == 1


def test_plain_decoding_alone_gains_and_loses_nothing():
    """The account of a worker that never drafts."""
    account = served(phase(), Fixed(0)).account
    assert account.true_ms == pytest.approx(account.plain_ms)
    assert account.worst_ms == pytest.approx(0, abs=1e-6)


def test_a_timer_errs_without_bias_and_by_its_cv():
    """What it reads over what is true, on a machine that is otherwise even."""
    steps = phase(plain_ms=10, noise_cv=0.15, warmup_cost=0)
    controller = Fixed(0)
    served(steps, controller)
    read_ms = [round.round_ms for round in controller.rounds]
    n = len(read_ms)
    assert n > 2000
    assert fmean(read_ms) == pytest.approx(10, abs=4 * 1.5 / math.sqrt(n))
    assert stdev(read_ms) / 10 == pytest.approx(0.15, rel=0.1)


EVEN = {
    "plain_ms": 10,
    "round_cost": [1.5],
    "spread": 0,
    "prompt_tokens": 1000,
    "prompt_spread": 0,
    "reply_tokens": 50,
    "reply_spread": 0,
    "noise_cv": 0,
    "warmup_cost": 0,
    "switch_cost": 0,
}


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        ({}, [10] * 49),
        ({"warmup_cost": 0.5}, [15] * 3 + [10] * 46),
        ({"context_plain_ms": 2}, [12 + 0.002 * n for n in range(49)]),
        ({"throttle_at": 0, "throttle_step": 2}, [20] * 49),
        ({"throttle_at": 0, "throttle_step": 2, "throttle_rounds_only": True}, [10] * 49),
        ({"spike_probability": 1, "spike_factor": 7}, [70] * 49),
    ],
)
def test_plain_steps_take_what_the_keys_say(keys: dict[str, object], times: list[float]):
    """In ms, from the second id of a reply of 50 after a prompt of 1,000."""
    controller = Fixed(0)
    served(phase(**EVEN | keys), controller, requests=1)
    assert [round.round_ms for round in controller.rounds] == pytest.approx(times)


@pytest.mark.parametrize(
    ("keys", "first_ms", "slope_ms"),
    [
        ({}, 15, 0),
        ({"context_round_ms": 4}, 19, 4),
        ({"throttle_at": 0, "throttle_step": 2}, 30, 0),
        ({"throttle_at": 0, "throttle_step": 2, "throttle_rounds_only": True}, 30, 0),
    ],
)
def test_rounds_take_what_the_keys_say(keys: dict[str, object], first_ms: float, slope_ms: float):
    """In ms at 1,000 tokens of context, and by how much each 1,000 more are slower."""
    controller = Fixed(2)
    served(phase(**EVEN | keys), controller, requests=1)
    for round in controller.rounds:
        expected_ms = first_ms + slope_ms * (round.context_tokens / 1000 - 1)
        assert round.round_ms == pytest.approx(expected_ms)


def test_background_load_slows_some_tokens_of_a_request():
    """Ten tokens in a row at most, at twice the time."""
    controller = Fixed(0)
    bursts = {"burst_probability": 1, "burst_factor": 2, "burst_tokens": 10}
    served(phase(**EVEN | bursts), controller)
    slow = [sum(round.round_ms > 19 for round in pacer.rounds) for pacer in controller.pacers]
    assert max(slow) == 10
    assert sum(slow) > 60


def test_drift_walks_the_same_for_steps_and_rounds():
    """A slow change of the whole machine: times move, ratios don't."""
    scenario = phase(**EVEN | {"reply_tokens": 1000, "drift": 0.2})
    requests = list(Machine((scenario,), "drift").requests(0, 60))
    assert relative_sd([request.plain_ms[500] for request in requests]) > 0.2
    assert relative_sd([request.ratio(2) for request in requests]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("request_", "factor"), [(0, 1), (9, 1), (10, 1.1), (14, 1.1), (15, 1.21), (90, 1.331)]
)
def test_throttling_goes_in_steps(request_: int, factor: float):
    """Three steps of 10 %, five requests apart, from request 10 on."""
    keys = {"throttle_at": 10, "throttle_step": 1.1, "throttle_every": 5, "throttle_steps": 3}
    assert throttled(phase(**keys), request_) == pytest.approx(factor)


class Turns:
    """Plans 5 plain tokens and 5 drafted ones in turn."""

    def __init__(self) -> None:
        self.n_plans = 0
        self.heard_ms = 0.0
        self.status = Status("automatic")

    def begin(self, traffic: Traffic, now_s: float) -> "Turns":
        return self

    def plan(self) -> Plan:
        self.n_plans += 1
        return Plan(2 * (self.n_plans % 2), 5)

    def observe(self, round: Round) -> None:
        self.heard_ms += round.round_ms

    def end(self) -> None: ...


def test_a_switch_between_steps_and_rounds_costs_what_the_key_says():
    """Half a plain step, charged both ways and not to the first plan; the pacer hears it too."""
    true_ms: list[float] = []
    turns = Turns()
    for cost in (0, 0.5):
        turns = Turns()
        serving = Serving(turns)
        scenario = phase(**EVEN | {"switch_cost": cost, "settle_cost": 0})
        serving.serve(next(Machine((scenario,), "turns").requests(0, 1)))
        true_ms.append(serving.account.true_ms)
        assert turns.heard_ms == pytest.approx(serving.account.true_ms)
    assert turns.n_plans > 5
    assert true_ms[1] - true_ms[0] == pytest.approx(5 * (turns.n_plans - 1))


# --- the judgement ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "policy", "right"),
    [
        (0.24, None, 0.24),
        (0.24, 0.30, 0.24),
        (0.24, 0.20, 0.20),
        (0.06, 0.03, 0.0),
        (-0.18, -0.01, -0.18),
        (0.049, 0.30, 0.0),
        (-0.05, -0.01, -0.05),
        (0.0499999999, None, 0.0499999999),  # solved for 0.05
        (-0.18, 0.09, 0.09),
        (0.10, -0.06, -0.06),
        (-0.18, 0.04, 0.0),
        (-0.02, 0.09, 0.09),
    ],
)
def test_the_truth_judges_unless_the_policy_has_the_other_sign(
    truth: float, policy: float | None, right: float
):
    """Then the policy judges, and within ±5 % either verdict is right."""
    assert judged(truth, policy) == right


@pytest.mark.parametrize(
    ("verdict", "truth", "policy", "expected"),
    [
        ("on", 0.24, 0.24, False),
        ("off", 0.24, 0.24, True),
        ("on", -0.18, -0.01, True),
        ("off", -0.18, -0.01, False),
        ("measuring", -0.18, -0.01, False),
        ("on", -0.04, -0.04, False),
        ("off", 0.04, 0.04, False),
        ("on", -0.18, 0.09, False),
        ("off", -0.18, 0.09, True),
        ("off", -0.18, 0.04, False),
    ],
)
def test_a_verdict_is_wrong_when_its_sign_is(
    verdict: Verdict, truth: float, policy: float | None, expected: bool
):
    """Measuring never is, nor any verdict on what is level."""
    assert is_wrong(verdict, truth, policy) is expected


def moments(states: Sequence[State], lost_ms: Sequence[float] = ()) -> list[Moment]:
    """One request of 10 tokens and 100 ms of plain decoding after the other."""
    lost_ms = lost_ms or [0.0] * len(states)
    return [
        Moment(Status(state), Account(10 * n, 100 * n + lost, 100 * n, 0))
        for n, (state, lost) in enumerate(zip(states, lost_ms, strict=True), 1)
    ]


def test_flips_are_counted_over_what_lies_between():
    """Measuring again between two verdicts makes no flip of its own."""
    states: list[State] = ["measuring", "on", "measuring", "on", "measuring", "off", "on"]
    assert n_flips(moments(states)) == 2


@pytest.mark.parametrize(
    ("states", "requests", "tokens"),
    [
        (["on", "on", "on", "measuring", "off"], 3, 30),
        (["on", "off", "off", "off", "off"], 0, 0),
        (["on", "on", "on", "on", "measuring"], None, None),
    ],
)
def test_a_change_is_noticed_when_the_state_has_its_sign(
    states: list[State], requests: int | None, tokens: int | None
):
    """Counted from the request before it; a state that is right already took none."""
    phases = parse({"effect": 0.24, "changes": [{"at_request": 2, "effect": -0.18}]})
    (found,) = noticed(phases, moments(states), [None, None])
    assert (found.at_request, found.truth) == (2, pytest.approx(-0.18))
    assert (found.requests_to_notice, found.tokens_to_notice) == (requests, tokens)


def test_the_loss_of_a_change_begins_with_it():
    """What was gained before doesn't pay for it: 9 ms lost of the 305 since."""
    phases = parse({"effect": 0.24, "changes": [{"at_request": 2, "effect": -0.18}]})
    run_of = moments(["on", "on", "on", "on", "on"], [-20, -40, -35, -31, -35])
    (found,) = noticed(phases, run_of, [None, None])
    assert found.worst_loss == pytest.approx(9 / 305)


def test_regression_corrects_a_mean_for_an_uneven_sample():
    """Points on y = 1 + 2 x give the y of any x; equal x give the mean."""
    assert regressed([(1, 0, 1), (2, 1, 3), (1, 3, 7)], 2) == pytest.approx(5)
    assert regressed([(1, 4, 1), (3, 4, 2)], 9) == pytest.approx(1.75)


# --- the command ------------------------------------------------------------------------------


def simulated(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of the command in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "mlx_worker.control.simulate", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **(environ or {})},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def write(path: Path, values: object) -> str:
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize("changes", [[], [{"at_request": 10, "effect": -0.2}]])
def test_the_last_line_has_exactly_the_keys_of_the_contract_and_the_documented_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[object]
):
    """--help has a sentence for each."""
    path = write(tmp_path / "some.json", {"effect": 0.2, "changes": changes})
    assert main([path, "--requests", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == list(REPORTED) == CONTRACT + MORE
    assert [list(change) for change in found["changes"]] == [
        ["at_request", "truth", "requests_to_notice", "tokens_to_notice", "worst_loss"]
    ] * len(changes)


def test_figures_are_rounded_in_changes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Six digits, as everywhere in the last line."""
    path = write(tmp_path / "some.json", {"changes": [{"at_request": 10, "spread": 0.1}]})
    main([path, "--requests", "20", "--json"])
    (change,) = json.loads(capsys.readouterr().out.splitlines()[-1])["changes"]
    figures = [value for value in change.values() if isinstance(value, float)]
    assert figures == [round(value, 6) for value in figures]
    assert change["truth"] != 0


def test_help_documents_keys_and_results():
    """One place to look, since errors point there."""
    shown = simulated("--help")
    assert [key for key in [*CONTRACT, *MORE] if f"\n  {key}\n      " not in shown] == []
    assert "\n  effect = null    -0.95..10 or null\n" in shown


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        (
            {"effect": 0.24, "changes": [{"at_request": 5, "acceptance": 0.01, "spread": 3}]},
            [],
            "{path}: from request 5: spread: 3, must be at most ",
        ),
        (
            {"effect": 9, "solve_by": "acceptance"},
            [],
            "{path}: effect: 9, must be -0.18..3.37 by acceptance alone. "
            'hint: set round_base and round_per_depth, or "solve_by": "cost"\n',
        ),
        (
            {"workloads": [{"weight": 0}]},
            [],
            "{path}: workloads: their weights add up to 0, must be more. hint: give one a weight\n",
        ),
        ({"spread": 7}, [], "{path}: spread: 7, must be 0..3. hint: --help lists every key"),
        (
            {},
            ["--requests", "0"],
            "--requests: 0, must be at least 1. hint: leave it out for the scenario's own\n",
        ),
    ],
)
def test_an_error_is_one_line_on_standard_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: object,
    arguments: list[str],
    message: str,
):
    """With the file, the key, the value, the limit and the next step; the exit status is 2."""
    path = write(tmp_path / "some.json", values)
    assert main([path, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: " + message.format(path=path))
    assert printed.err.count("\n") == 1
    assert ". hint: " in printed.err


def test_the_same_seed_gives_the_same_output():
    """In another process, with another order of hashes, too."""
    arguments = [str(SCENARIOS / "mixed.json"), "--requests", "30", "--seed", "1"]
    one, other = (simulated(*arguments, environ={"PYTHONHASHSEED": hashes}) for hashes in "12")
    assert one == other


def test_another_seed_gives_another_run():
    """Otherwise many seeds would be one."""
    one, other = (run([phase()], 10, seed, has_policy=False).net_speed for seed in (1, 2))
    assert one != other


def test_a_draft_that_loses_ends_off_at_little_cost():
    """The acceptance run of the contract: Off, and less than 1 % lost over 400 requests."""
    outcome = run(read(SCENARIOS / "slower_18.json"), 400, 1)
    assert outcome.verdict == "off"
    assert not outcome.verdict_wrong
    assert -0.01 < outcome.net_speed < 0


@pytest.mark.parametrize("name", ["slower_18", "faster_24"])
def test_400_requests_take_less_than_3_s_of_processor_time(name: str):
    """Start included; one repeat, for a machine that was busy."""

    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        simulated(str(SCENARIOS / f"{name}.json"), "--requests", "400", "--seed", "1", "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert cpu_s() < CPU_S or cpu_s() < CPU_S


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(4), marks=pytest.mark.long)], ids=len
)
@pytest.mark.parametrize(
    ("name", "verdict"),
    [("lookup_loses", "off"), ("lookup_gains", "on"), ("stalling", "on"), ("tiny_replies", "on")],
)
def test_a_figure_is_right_where_rounds_are_of_two_kinds(name: str, verdict: Verdict, seeds: range):
    """Seldom dear ones are no hiccups; and replies too short for pairs are compared whole."""
    phases = read(SCENARIOS / f"{name}.json")
    outcomes = [run(phases, 200, seed) for seed in seeds]
    truth = outcomes[0].truth_policy if verdict == "on" else outcomes[0].truth
    figures = [outcome.figure for outcome in outcomes if outcome.figure is not None]
    assert [outcome.verdict for outcome in outcomes] == [verdict] * len(seeds)
    assert fmean(figures) == pytest.approx(truth, abs=0.06)


@pytest.mark.parametrize(
    "values",
    [
        {"proposes": 0.3, "round_base": 1.0, "round_per_depth": 0.2},
        {"stall_probability": 0.05, "stall_steps": 10},
    ],
)
def test_the_truth_is_what_a_fixed_depth_brings_where_rounds_are_of_two_kinds(
    values: dict[str, float],
):
    """Long replies, so that the last round of each hardly counts; noise and switches left out."""
    one = phase(**values, reply_tokens=2000, reply_max=4000, noise_cv=0, warmup_cost=0, spread=0)
    solved = solve(one)
    serving = Serving(Fixed(solved.depth))
    for request in Machine((one,), "1").requests(0, 20):
        serving.serve(request)
    gained = serving.account.plain_ms / serving.account.true_ms - 1
    assert gained == pytest.approx(solved.truth, abs=0.02)
