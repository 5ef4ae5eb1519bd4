"""Scenario files of the simulator: their keys, read and checked.

Owns every key with its default, its limits and its sentence: the checks below, `--help` and
scenario.schema.json all come from the fields here. Leaves the last two to scenario_schema.py and
what the keys do to solve.py and machine.py. Pure but for read(); any thread.
"""

import difflib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

from mlx_worker.errors import ConfigError, shown
from mlx_worker.records import MAX_DEPTH

Kind = Literal[
    "number", "integer", "boolean", "string", "numbers", "integers", "workloads"
]  # fmt: skip
JSON_TYPES: dict[Kind, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "string": (str,),
}
ITEMS: dict[Kind, Kind] = {"numbers": "number", "integers": "integer"}
HINT = "--help lists every key with its limits"
AT_REQUEST = "at_request"
CHANGES = "changes"
CHANGES_ABOUT = (
    "later phases: any keys but requests, with at_request, the first request they hold for"
)


@dataclass(frozen=True)
class Key:
    """What one key may be: a number in low..high, one of choices, or a list of such numbers."""

    kind: Kind
    about: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    is_optional: bool = False


def number(default: float, about: str, low: float = 0, high: float = 1e6) -> Any:
    return _key(default, Key("number", about, low, high))


def integer(default: int, about: str, low: int = 0, high: int = 1_000_000) -> Any:
    return _key(default, Key("integer", about, low, high))


def flag(default: bool, about: str) -> Any:
    return _key(default, Key("boolean", about))


def text(default: str, about: str, *choices: str) -> Any:
    return _key(default, Key("string", about, choices=choices))


def numbers(default: tuple[float, ...], about: str, low: float, high: float) -> Any:
    return _key(default, Key("numbers", about, low, high))


def integers(default: tuple[int, ...], about: str, low: int, high: int) -> Any:
    return _key(default, Key("integers", about, low, high))


def optional(about: str, low: float, high: float) -> Any:
    return _key(None, Key("number", about, low, high, is_optional=True))


def _key(default: object, key: Key) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True, kw_only=True)
class Replies:
    """What is asked and how well it can be guessed: keys of a scenario and of each workload."""

    acceptance: tuple[float, ...] = numbers(
        (0.7,), "share of drafts accepted by position 1, 2, …; the last holds for the rest", 0, 1
    )
    spread: float = number(
        0.25, "relative SD of cost / tokens per round between requests at the best depth", 0, 3
    )
    temperature: float = number(0.0, "of sampling; 0 is greedy. The pacer is told it", 0, 2)
    has_grammar: bool = flag(False, "whether a grammar holds. The pacer is told it")
    reply_tokens: float = number(200, "mean length of a reply (lognormal)", 1, 100_000)
    reply_spread: float = number(0.8, "relative SD of that length", 0, 5)
    reply_min: int = integer(4, "no reply is shorter", 1)
    reply_max: int = integer(1024, "max_tokens of every request; shorter replies end at EOS", 1)
    prompt_tokens: float = number(400, "mean length of a prompt (lognormal)", 1, 1_000_000)
    prompt_spread: float = number(0.8, "relative SD of that length", 0, 5)
    prompt_min: int = integer(8, "no prompt is shorter", 1)
    prompt_max: int = integer(32_000, "no prompt is longer", 1)


@dataclass(frozen=True, kw_only=True)
class Workload(Replies):
    """One kind of traffic; what it leaves out is taken from the scenario."""

    name: str = text("", "of the workload")
    weight: float = number(1.0, "share of the requests, relative to the other workloads", 0, 1e6)


@dataclass(frozen=True, kw_only=True)
class Scenario(Replies):
    """One phase of a scenario: a machine and its traffic, from request `at_request` on."""

    description: str = text("", "for people")
    requests: int = integer(400, "how many are served, unless --requests says", 1)
    plain_ms: float = number(25, "time of a plain step at no context", 0.001)
    round_cost: tuple[float, ...] = numbers(
        (),
        "time of a round in plain steps at depth 1, 2, …; not given: from the next two",
        0.1,
        1e3,
    )
    round_base: float = number(1.1, "time of a round in plain steps: this …", 0.1, 1000)
    round_per_depth: float = number(0.12, "… and this for each drafted id", 0, 1000)
    proposes: float = number(
        1.0, "share of rounds in which the drafter finds something to propose (lookup)", 0, 1
    )
    stall_probability: float = number(0.0, "of a round, never of a plain step, stalling", 0, 1)
    stall_steps: float = number(20.0, "plain steps that such a stall takes", 0, 1000)
    effect: float | None = optional(
        "speed-up at the best depth, as a fraction: −0.18 is 18 % slower. The machine is made so, "
        "by solve_by; not given: what the other keys bring",
        -0.95,
        10,
    )
    solve_by: str = text(
        "cost",
        "what is changed for `effect`: all round times or all acceptances",
        "cost",
        "acceptance",
    )
    depths: tuple[int, ...] = integers(
        tuple(range(1, MAX_DEPTH + 1)), "the depths that the pacer may use", 1, MAX_DEPTH
    )
    has_curve: bool = flag(True, "whether the pacer is told a curve that was timed at load")
    curve_cv: float = number(0.05, "relative error of that curve at each depth", 0, 2)
    workloads: tuple[Workload, ...] = field(
        default=(), metadata={"key": Key("workloads", "kinds of traffic, with weights")}
    )
    noise_cv: float = number(0.08, "timer noise: relative SD of each step (lognormal)", 0, 2)
    spike_probability: float = number(0.0, "of a step being timed far too long", 0, 1)
    spike_factor: float = number(5.0, "how much too long", 1, 1000)
    drift: float = number(0.0, "slow random walk of all times: relative SD per 1,000 tokens", 0, 1)
    throttle_at: int = integer(0, "request at which throttling begins")
    throttle_step: float = number(1.0, "factor on times at each step of throttling", 0.1, 10)
    throttle_steps: int = integer(1, "how many such steps")
    throttle_every: int = integer(20, "requests between them", 1)
    throttle_rounds_only: bool = flag(False, "whether plain steps stay as they were")
    burst_probability: float = number(0.0, "of background load during a request", 0, 1)
    burst_factor: float = number(1.6, "on all times while it lasts", 1, 100)
    burst_tokens: int = integer(40, "how many tokens it lasts", 1)
    context_plain_ms: float = number(0.0, "what 1,000 tokens of context add to a plain step", 0)
    context_round_ms: float = number(0.0, "what they add to a round", 0)
    switch_cost: float = number(
        0.3, "plain steps that the first step after a round, and the reverse, take extra", 0, 1000
    )
    settle_cost: float = number(
        0.1, "by how much plain steps after a round are slower at first; 15 % less each", 0, 100
    )
    warmup_cost: float = number(0.15, "by how much the first 3 steps of a reply are slower", 0, 100)
    prefill_ms: float = number(200, "per 1,000 tokens of prompt; moves the clock only")
    idle_s: float = number(2.0, "mean gap between requests (exponential); moves the clock only")
    at_request: int = 0

    @property
    def mix(self) -> tuple[Workload, ...]:
        """The kinds of traffic; without `workloads` the scenario's own is the only one."""
        own = {each.name: getattr(self, each.name) for each in fields(Replies)}
        return self.workloads or (Workload(name="traffic", **own),)


def read(path: Path | str) -> tuple[Scenario, ...]:
    """The phases of a scenario file. Raises ConfigError, naming file and key."""
    try:
        values: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failed:
        raise ConfigError(
            f"{path}: {failed.strerror or failed}", hint="give a scenario file"
        ) from None
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{path}: not UTF-8 at byte {broken.start}") from None
    except json.JSONDecodeError as broken:
        raise ConfigError(f"{path}, line {broken.lineno}: not JSON: {broken.msg}") from None
    with naming(path):
        return parse(values)


@contextmanager
def naming(path: Path | str) -> Generator[None, None, None]:
    """A ConfigError from inside says which file it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None


def parse(values: object) -> tuple[Scenario, ...]:
    """Phases in order, each with all keys; a change keeps what it doesn't name."""
    given = _object(values, "a scenario")
    given.pop("$schema", None)
    changes = _objects(given.pop(CHANGES, []), CHANGES)
    phases = [_scenario(given, "")]
    for n, change in enumerate(changes):
        where = f"{CHANGES}[{n}]."
        changed = _object(change, where[:-1])
        at = changed.pop(AT_REQUEST, None)
        first = phases[-1].at_request + 1
        if not isinstance(at, int) or isinstance(at, bool) or at < first:
            raise ConfigError(
                f"{where}{AT_REQUEST}: {shown(at)}, must be a whole number from {first}",
                hint="changes are written in the order in which they happen",
            )
        if "requests" in changed:
            raise ConfigError(
                f"{where}requests: can't change", hint="set it for the whole scenario"
            )
        _scenario(changed, where)
        given = {**given, **changed}
        phases.append(_scenario(given, "", at))
    return tuple(phases)


def _scenario(given: Mapping[str, object], where: str, at_request: int = 0) -> Scenario:
    known = keys(Scenario)
    values = {name: _value(f"{where}{name}", value, known) for name, value in given.items()}
    if "workloads" in values:
        shared = {name: given[name] for name in keys(Replies) if name in given}
        values["workloads"] = tuple(
            _workload(shared, workload, f"{where}workloads[{n}]")
            for n, workload in enumerate(cast("list[object]", given["workloads"]))
        )
    return Scenario(**cast("dict[str, Any]", values), at_request=at_request)


def _workload(shared: Mapping[str, object], given: object, where: str) -> Workload:
    known = keys(Workload)
    own = {
        name: _value(f"{where}.{name}", value, known)
        for name, value in _object(given, where).items()
    }
    inherited = {name: _value(name, value, known) for name, value in shared.items()}
    return Workload(**cast("dict[str, Any]", {**inherited, **own}))


def _value(path: str, value: object, known: Mapping[str, Key]) -> object:
    """The value as the dataclass holds it. Raises ConfigError: key, value, limit, next step."""
    name = path.rpartition(".")[2]
    key = known.get(name)
    if key is None:
        raise ConfigError(f"unknown key: {path}", hint=f"did you mean {_nearest(name, known)}?")
    if key.kind == "workloads":
        return _objects(value, path)
    items = _items(value)
    if key.kind in ITEMS:
        if 0 < len(items) <= MAX_DEPTH and all(_is_allowed(item, key) for item in items):
            return tuple(items)
    elif _is_allowed(value, key):
        return value
    raise ConfigError(f"{path}: {shown(value)}, must be {limit(key)}", hint=HINT)


def _items(value: object) -> list[object]:
    """A single number stands for a list of one."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _is_allowed(value: object, key: Key) -> bool:
    if value is None:
        return key.is_optional
    kind = ITEMS.get(key.kind, key.kind)
    if not isinstance(value, JSON_TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    if isinstance(value, str):
        return not key.choices or value in key.choices
    return key.low is None or key.high is None or key.low <= cast("float", value) <= key.high


def _object(value: object, what: str) -> dict[str, object]:
    if isinstance(value, dict):
        return dict(cast("dict[str, object]", value))
    raise ConfigError(f"{what}: {shown(value)}, must be an object", hint=HINT)


def _objects(value: object, what: str) -> list[object]:
    if isinstance(value, list):
        return cast("list[object]", value)
    raise ConfigError(f"{what}: {shown(value)}, must be a list of objects", hint=HINT)


def _nearest(unknown: str, known: Mapping[str, Key]) -> str:
    candidates = [*known, CHANGES]
    return max(candidates, key=lambda name: difflib.SequenceMatcher(None, unknown, name).ratio())


def limit(key: Key) -> str:
    """What completes "must be …"."""
    if key.choices:
        return " or ".join(key.choices)
    match key.kind:
        case "boolean":
            return "true or false"
        case "string":
            return "a text"
        case "workloads":
            return "a list of objects"
        case "numbers" | "integers":
            whole = "whole " if key.kind == "integers" else ""
            return f"a {whole}number or up to {MAX_DEPTH}, each {key.low:g}..{key.high:g}"
        case _:
            what = "a whole number " if key.kind == "integer" else ""
            return f"{what}{key.low:g}..{key.high:g}" + (" or null" if key.is_optional else "")


def keys(of: type[Replies]) -> dict[str, Key]:
    return {each.name: each.metadata["key"] for each in fields(of) if "key" in each.metadata}
