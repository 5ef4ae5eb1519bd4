"""Several models, some of them in memory: who comes, who goes, and what must fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_worker.config import ModelEntry
from mlx_worker.engine import memory
from mlx_worker.engine.prefix import PrefixCache
from mlx_worker.errors import ModelTooLarge, NotEnoughMemory, Overloaded, UnknownModel
from mlx_worker.loaded_model import Decider, LoadedModel
from mlx_worker.models import catalogue
from mlx_worker.records import GenerationRequest
from mlx_worker.roster import Roster
from tests.tiny import tiny_pair

AMPLE = 1 << 30
SIZE = 640_000  # bytes of a tiny pair
Make = Callable[..., Roster]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Iterator[Make]:
    """Rosters of three tiny models, of SIZE each."""
    made: list[Roster] = []

    def load(entry: ModelEntry) -> LoadedModel:
        pair = replace(tiny_pair(draft="assistant"), name=entry.id)
        return LoadedModel(pair, PrefixCache(), Decider())

    def build(
        most: int = 1, budget_bytes: int = AMPLE, least_stay_s: float = 60, **more: Any
    ) -> Roster:
        models = {id: ModelEntry(id=id) for id in "abc"}
        made.append(
            Roster(
                models, load, budget_bytes=budget_bytes, size_of=lambda _: SIZE, most=most,
                least_stay_s=least_stay_s, clock=clock, **more,
            )
        )  # fmt: skip
        return made[-1]

    yield build
    for roster in made:
        roster.close()


def loaded(roster: Roster) -> list[str]:
    return [id for id, entry in roster.entries.items() if entry.served.is_loaded]


def test_a_model_is_loaded_when_it_is_asked_for(make: Make):
    """Once; what that took is told the first time."""
    roster = make()
    assert loaded(roster) == []
    model, took_ms = roster.take("a")
    again, no_ms = roster.take("a")
    assert took_ms > 0
    assert no_ms == 0
    assert again is model
    assert loaded(roster) == ["a"]


def test_the_least_recently_used_makes_room(make: Make, clock: Clock):
    """Of two that are there, the one that wasn't asked for since."""
    roster = make(most=2)
    for id in ("a", "b", "a"):
        clock.now_s += 100
        roster.take(id)
    clock.now_s += 100
    roster.take("c")
    assert loaded(roster) == ["a", "c"]


def test_two_models_do_not_drive_each_other_out(make: Make, clock: Clock):
    """One that came a moment ago stays; whoever asks for the other is told how long."""
    roster = make(least_stay_s=60)
    roster.take("a")
    clock.now_s = 10
    with pytest.raises(Overloaded, match="a was loaded a moment ago") as refused:
        roster.take("b")
    assert refused.value.retry_after_s == 50
    assert loaded(roster) == ["a"]
    clock.now_s = 60
    roster.take("b")
    assert loaded(roster) == ["b"]


def test_each_model_has_its_own_verdict(make: Make, clock: Clock):
    """And begins anew when it comes back."""
    roster = make(most=2)
    first, _ = roster.take("a")
    second, _ = roster.take("b")
    assert first.decider is not second.decider
    clock.now_s = 100
    roster.take("c")
    clock.now_s = 200
    again, _ = roster.take("a")
    assert again.decider is not first.decider


def test_letting_go_frees_the_memory(make: Make):
    """Weights, draft and prefix cache."""
    roster = make()
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = roster.take("a")
    held = (model.pair.target_bytes + model.pair.draft_bytes) // 2  # some is made when it is used
    list(model.events(GenerationRequest((40,) * 50, 8)))
    assert mx.get_active_memory() >= before + held
    del model
    roster.let_go("a")
    assert mx.get_active_memory() <= before + held // 10
    assert loaded(roster) == []


def test_an_unknown_name_is_refused(make: Make):
    """With the names that are known; none is the default."""
    roster = make()
    assert roster.known(None) == "a"
    assert roster.known("b") == "b"
    with pytest.raises(UnknownModel, match="a, b, c"):
        roster.known("d")


def test_a_model_is_known_by_its_other_names(make: Make):
    """Its repository, in any case of letters; what clients are told is its id."""
    roster = make()
    roster.refresh({"gemma-4-e2b": ModelEntry(id="gemma-4-e2b")})
    variant = catalogue.find("gemma-4-e2b")
    assert variant is not None
    assert roster.known(variant.weights.repo.upper()) == "gemma-4-e2b"
    assert roster.known(f"gemma-4-e2b:{variant.tag}") == "gemma-4-e2b"


def test_a_model_that_comes_is_served_and_one_that_goes_is_let_go(make: Make):
    """At the next tidying, so not while it answers; what stays is as it was."""
    roster = make(most=2)
    kept, _ = roster.take("a")
    roster.take("b")
    roster.refresh({id: ModelEntry(id=id) for id in "acd"})
    assert list(roster.entries) == ["a", "c", "d"]
    roster.publish("b")  # of a reply that ends now
    assert list(roster.entries) == ["a", "c", "d"]
    with pytest.raises(UnknownModel, match="a, c, d"):
        roster.take("b")
    roster.tidy()
    assert loaded(roster) == ["a"]
    assert roster.take("a")[0] is kept
    roster.refresh({"b": ModelEntry(id="b")})
    assert roster.known(None) == "b"
    assert loaded(roster) == []


def test_a_model_whose_files_are_others_now_is_loaded_anew(make: Make):
    """It was pulled again; what is asked while it is in memory is still answered by it."""
    stale: set[str] = set()
    roster = make(most=2, is_current=lambda entry, _: entry.id not in stale)
    before, _ = roster.take("a")
    kept, _ = roster.take("b")
    stale.add("a")
    assert roster.take("a")[0] is before
    roster.tidy()
    assert loaded(roster) == ["b"]
    stale.clear()
    assert roster.take("a")[0] is not before
    assert roster.take("b")[0] is kept


def test_a_model_that_was_dropped_is_no_more(make: Make):
    """Not even the last of all."""
    roster = make()
    roster.take("a")
    for id in "abc":
        roster.drop(id)
    roster.tidy()
    assert roster.entries == {}
    with pytest.raises(UnknownModel):
        roster.known(None)


def test_a_model_that_is_configured_otherwise_is_loaded_anew(make: Make):
    """Its draft is another, for instance."""
    roster = make()
    before, _ = roster.take("a")
    roster.refresh({"a": ModelEntry(id="a", draft="none")})
    after, took_ms = roster.take("a")
    assert after is not before
    assert took_ms > 0


def test_a_model_beyond_the_budget_is_not_loaded(make: Make):
    """It is told before the machine begins to swap."""
    roster = make(budget_bytes=SIZE - 1)
    with pytest.raises(ModelTooLarge, match="a: its weights take"):
        roster.take("a")
    assert loaded(roster) == []


def test_why_a_model_could_not_be_loaded_is_remembered(make: Make):
    """Until it could be: whoever looks later sees why it isn't there."""
    roster = make(budget_bytes=SIZE - 1)
    with pytest.raises(ModelTooLarge):
        roster.take("a")
    assert (roster.entries["a"].problem or "").startswith("a: its weights take")
    roster.budget_bytes = SIZE
    roster.take("a")
    assert roster.entries["a"].problem is None


def test_a_second_model_goes_where_both_do_not_fit(make: Make, clock: Clock):
    """Though so many would be allowed."""
    roster = make(most=2, budget_bytes=mx.get_active_memory() + int(1.2 * SIZE))
    model, _ = roster.take("a")
    list(model.events(GenerationRequest((40,) * 50, 8)))
    del model
    clock.now_s = 100
    roster.take("b")
    assert loaded(roster) == ["b"]


def test_a_request_takes_the_room_of_prefix_caches(make: Make):
    """They are a convenience; it is not."""
    roster = make()
    model, _ = roster.take("a")
    list(model.events(GenerationRequest(tuple(range(40, 240)), 8)))
    held = model.prefixes.nbytes
    assert held > 0
    need = memory.request_bytes(model.pair, 300)
    roster.budget_bytes = mx.get_active_memory() + need
    roster.admit(model, 300)
    assert model.prefixes.nbytes == held
    roster.budget_bytes = mx.get_active_memory() + need - 1
    roster.admit(model, 300)
    assert model.prefixes.nbytes == 0


def test_a_request_beyond_the_budget_is_refused(make: Make):
    """Whatever were let go of for it."""
    roster = make()
    model, _ = roster.take("a")
    with pytest.raises(NotEnoughMemory):
        roster.admit(model, 10_000_000)


@pytest.mark.parametrize("n_prompt", [8, 60, 300, 600, 1200])
def test_the_forecast_covers_what_a_request_takes(n_prompt: int):
    """And is no more than a few times as much, beyond what a pass always takes."""
    pair = tiny_pair(draft="assistant")
    request = GenerationRequest(tuple(40 + i % 200 for i in range(n_prompt)), 32, speculation="on")
    forecast = memory.request_bytes(pair, n_prompt + 32)
    model = LoadedModel(pair, PrefixCache(0), Decider())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    list(model.events(request))
    took = mx.get_peak_memory() - before
    assert took <= forecast <= 8 * took
