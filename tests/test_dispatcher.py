"""Calls to a real tiny model: in line, answered, left, timed out, drained, told why."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlx_worker import policies
from mlx_worker.activity import Activity
from mlx_worker.config import Config, LimitsSection as Limits, ModelEntry
from mlx_worker.dispatcher import Dispatcher
from mlx_worker.engine.prefix import PrefixCache
from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import (
    ConfigError,
    EngineDied,
    InvalidParameter,
    ModelInUse,
    NotEnoughMemory,
    Overloaded,
    ShuttingDown,
    TimedOut,
    UnknownModel,
)
from mlx_worker.loaded_model import Decider, LoadedModel
from mlx_worker.policies import Kept, Policies
from mlx_worker.power import Power
from mlx_worker.records import (
    Call,
    Disturbance,
    Done,
    Event,
    Platform,
    Progress,
    ReplyEvent,
    Settings,
    Started,
    Text,
)
from mlx_worker.roster import Roster
from tests.tiny import tiny_pair

CALL = Call("1", prompt=tuple(range(40, 60)), max_tokens=24)

HELD_AT = 10
LIMITS, SETTINGS = Limits(), Settings()


@dataclass
class Bench:
    """A dispatcher with what it was built of."""

    thread: EngineThread
    dispatcher: Dispatcher
    gate: threading.Event  # models load once it is set
    roster: Roster
    offered: list[dict[str, ModelEntry]]  # which models there are, at each look for a change


def tiny_model() -> LoadedModel:
    pair = replace(tiny_pair(draft="assistant"), draft_name="tiny-draft")
    return LoadedModel(pair, PrefixCache(), Decider(depth=2))


class Held(LoadedModel):
    """Its replies wait in the middle, after HELD_AT texts, until `gate` is set."""

    def __init__(self, gate: threading.Event) -> None:
        tiny = tiny_model()
        super().__init__(tiny.pair, tiny.prefixes, tiny.decider)
        self._gate = gate

    def events(self, *arguments: Any, **options: Any) -> Generator[Event, None, None]:
        n_texts = 0
        for event in super().events(*arguments, **options):
            yield event
            n_texts += isinstance(event, Text)
            if n_texts == HELD_AT:
                assert self._gate.wait(30)


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    """Builds dispatchers; their threads end with the test."""
    made: list[Bench] = []
    policies = Policies(tmp_path / "policies.json")

    def build(
        limits: Limits = LIMITS,
        settings: Settings = SETTINGS,
        budget: int = 1 << 30,
        activity: Activity | None = None,
        model: Callable[[], LoadedModel] = tiny_model,
    ) -> Bench:
        gate = threading.Event()
        gate.set()

        def loaded(_: ModelEntry) -> LoadedModel:
            assert gate.wait(30)
            return model()

        thread = EngineThread()
        roster = Roster(
            {"tiny": ModelEntry(id="tiny")}, loaded, budget_bytes=budget, size_of=lambda _: 0
        )
        offered: list[dict[str, ModelEntry]] = []
        dispatcher = Dispatcher(
            thread, roster, Config(limits=limits), policies, Kept(settings),
            changed=lambda: offered.pop(0) if offered else None, activity=activity,
        )  # fmt: skip
        made.append(Bench(thread, dispatcher, gate, roster, offered))
        return made[-1]

    yield build
    for bench in made:
        bench.gate.set()
        await asyncio.to_thread(bench.thread.close)


async def answered(dispatcher: Dispatcher, call: Call) -> tuple[Started, list[ReplyEvent]]:
    events = [event async for event in dispatcher.submit(call)]
    first, rest = events[0], events[1:]
    assert isinstance(first, Started)
    return first, [event for event in rest if isinstance(event, ReplyEvent)]


def ids_of(events: list[ReplyEvent], choice: int = 0) -> list[int]:
    return [
        id
        for event in events
        if event.choice == choice and isinstance(event.event, Text)
        for id in event.event.ids
    ]


def dones(events: list[ReplyEvent]) -> list[Done]:
    return [event.event for event in events if isinstance(event.event, Done)]


async def test_a_call_is_started_then_answered(make: Callable[..., Bench]):
    """Loading included, for the first; the second finds the model there."""
    dispatcher = make().dispatcher
    started, events = await answered(dispatcher, CALL)
    again, others = await answered(dispatcher, CALL)
    assert (started.model, started.prompt_tokens) == ("tiny", 20)
    assert started.model_load_ms > 0
    assert again.model_load_ms == 0
    assert [len(ids_of(each)) for each in (events, others)] == [24, 24]
    assert ids_of(events) == ids_of(others)
    assert dones(others)[0].usage.cached_tokens == 19


@pytest.mark.parametrize("is_kept", [False, True], ids=["without", "with"])
async def test_choices_share_one_prefill(make: Callable[..., Bench], is_kept: bool):
    """Each with its own noise and its number, with a prefix cache and without one."""
    call = replace(CALL, n=3, sampling={"temperature": 1.0, "seed": 5})
    _, events = await answered(make(settings=Settings(kv_prefix_cache=is_kept)).dispatcher, call)
    replies = [ids_of(events, choice) for choice in range(3)]
    assert len({tuple(reply) for reply in replies}) == 3
    assert [done.usage.cached_tokens for done in dones(events)] == [0, 19, 19]


@pytest.mark.parametrize("speculation", ["auto", "on", "off"])
async def test_a_seed_gives_the_same_reply_however_it_is_decoded(
    make: Callable[..., Bench], speculation: Any
):
    """Cold or warm, drafted or not."""
    dispatcher = make().dispatcher
    call = replace(CALL, sampling={"temperature": 0.9, "seed": 11})
    _, plain = await answered(make().dispatcher, replace(call, speculation="off"))
    for _ in range(2):
        _, events = await answered(dispatcher, replace(call, speculation=speculation))
        assert ids_of(events) == ids_of(plain)
        assert (
            bool(dones(events)[0].timing.drafted) == (speculation == "on") or speculation == "auto"
        )


async def test_drafting_that_can_not_be_had_is_said(make: Callable[..., Bench]):
    """Switched off in the settings, it is off for a call that insists, too."""
    dispatcher = make(settings=Settings(speculative_decoding="off")).dispatcher
    started, events = await answered(dispatcher, replace(CALL, speculation="on"))
    assert started.notice is not None
    assert started.notice[0] == "speculation_unavailable"
    assert dones(events)[0].timing.drafted == 0


WHY_OFF = [
    (Settings("off"), Platform(), "switched off in the worker's settings"),
    (Settings(run_requests_together=True), Platform(), "pause while Run requests together is on"),
    (Settings("off"), Platform("off", "Acme"), "switched off by Acme"),
    (Settings("off", True, True), Platform("unavailable"), "not offered to this worker's"),
]


@pytest.mark.parametrize(("settings", "platform", "why"), WHY_OFF)
async def test_drafting_that_is_off_is_off_for_those_who_insist(
    make: Callable[..., Bench], settings: Settings, platform: Platform, why: str
):
    """And they are told by whom."""
    dispatcher = make(settings=settings).dispatcher
    dispatcher.set_platform(platform)
    started, events = await answered(dispatcher, replace(CALL, speculation="on"))
    assert started.notice is not None
    assert started.notice[0] == "speculation_unavailable"
    assert why in started.notice[1]
    assert dones(events)[0].timing.drafted == 0


async def test_the_line_follows_settings_and_platform(make: Callable[..., Bench]):
    """From the next look on; the settings are as they were once the platform's switch is back."""
    dispatcher = make().dispatcher
    await dispatcher.preload(["tiny"])

    def line() -> str | None:
        (model,) = dispatcher.status()["models"]
        return model["speculation"]

    assert line() == "Automatic"
    await dispatcher.change({"run_requests_together": True})
    assert line() == "Paused"
    assert dispatcher.status()["paused"] is True
    await dispatcher.change({"speculative_decoding": "off"})
    assert line() == "Off (worker's Settings)"
    dispatcher.set_platform(Platform("off", "Acme", 3))
    assert line() == "Off (by Acme)"
    assert dispatcher.status()["platform"]["revision"] == 3
    dispatcher.set_platform(Platform("unavailable"))
    assert line() is None
    dispatcher.set_platform(Platform())
    assert line() == "Off (worker's Settings)"
    assert dispatcher.status()["settings_revision"] == 2


async def test_the_platforms_switch_holds_from_the_next_call_on(make: Callable[..., Bench]):
    """Off and on again; nothing of it is kept."""
    bench = make()
    on = replace(CALL, speculation="on")
    bench.dispatcher.set_platform(Platform("off"))
    _, events = await answered(bench.dispatcher, on)
    assert dones(events)[0].timing.drafted == 0
    bench.dispatcher.set_platform(Platform())
    _, events = await answered(bench.dispatcher, on)
    assert dones(events)[0].timing.drafted > 0
    assert bench.dispatcher.settings() == Settings()


async def test_a_change_from_elsewhere_that_is_older_is_not_obeyed(make: Callable[..., Bench]):
    """The settings in force are the answer either way."""
    dispatcher = make().dispatcher
    assert (await dispatcher.change({"kv_prefix_cache": False}, 5)).kv_prefix_cache is False
    assert (await dispatcher.change({"kv_prefix_cache": True}, 5)).kv_prefix_cache is False
    assert dispatcher.status()["settings_revision"] == 5


async def test_a_file_that_breaks_meanwhile_counts_as_off(
    make: Callable[..., Bench], tmp_path: Path
):
    """From the first change on that could not be kept; it is shown, and not written over."""
    dispatcher, file = make().dispatcher, tmp_path / "policies.json"
    await dispatcher.change({"kv_prefix_cache": True})
    file.write_text("{broken")
    with pytest.raises(ConfigError):
        await dispatcher.change({"speculative_decoding": "auto"})
    assert dispatcher.settings().speculative_decoding == "off"
    assert "can't be read" in dispatcher.status()["settings_problem"]
    assert file.read_text() == "{broken"


async def test_a_change_that_can_not_be_written_is_shown_until_one_is(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
):
    """What was in force stays so; a full disk, or a folder that is read only, is no Off."""
    dispatcher = make().dispatcher

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(policies, "write_whole", full)
        with pytest.raises(ConfigError, match="can't be written: No space left"):
            await dispatcher.change({"kv_prefix_cache": False})
    assert dispatcher.settings() == Settings()
    assert "can't be written" in dispatcher.status()["settings_problem"]
    await dispatcher.change({"kv_prefix_cache": False})
    assert dispatcher.status()["settings_problem"] is None


async def test_logprobs_come_with_the_bytes_of_their_ids(make: Callable[..., Bench]):
    """Of the chosen ids and of their rivals; of nothing where none were asked for."""
    dispatcher = make().dispatcher
    _, events = await answered(dispatcher, replace(CALL, sampling={"logprobs": 2}))
    for event in events:
        if isinstance(event.event, Text):
            assert event.event.logprobs is not None
            named = {one.id for one in event.event.logprobs}
            named |= {id for one in event.event.logprobs for id, _ in one.top}
            assert set(event.tokens) == named
    _, bare = await answered(dispatcher, CALL)
    assert not any(event.tokens for event in bare)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (replace(CALL, model="other"), UnknownModel),
        (replace(CALL, max_tokens=10_000_000), InvalidParameter),
        (replace(CALL, sampling={"top_p": 7.0}), InvalidParameter),
    ],
)
async def test_what_can_not_be_asked_is_refused_before_it_starts(
    make: Callable[..., Bench], call: Call, error: type[Exception]
):
    """And the worker goes on with the next."""
    dispatcher = make().dispatcher
    with pytest.raises(error):
        await answered(dispatcher, call)
    _, events = await answered(dispatcher, CALL)
    assert len(ids_of(events)) == 24
    assert dispatcher.status()["queue"] == {"running": 0, "waiting": 0, "limit": 32}


async def first_text(events: Any) -> None:
    async for event in events:
        if isinstance(event, ReplyEvent) and isinstance(event.event, Text):
            return


async def test_who_leaves_frees_the_engine(make: Callable[..., Bench]):
    """In the middle of a long reply; the next one waits a round, not the rest of it."""
    dispatcher = make().dispatcher
    long = replace(CALL, max_tokens=4000)
    async with aclosing(dispatcher.submit(long)) as events:
        await first_text(events)
        assert dispatcher.status()["queue"]["running"] == 1
    assert dispatcher.status()["queue"]["running"] == 0
    _, events = await answered(dispatcher, CALL)
    assert len(ids_of(events)) == 24


async def test_the_line_has_an_end(make: Callable[..., Bench]):
    """Those in it are served in their order; who comes too late is told when to come again."""
    bench = make(Limits(waiting=2))
    bench.gate.clear()
    order: list[int] = []

    async def ask(n: int) -> None:
        async for event in bench.dispatcher.submit(CALL):
            if isinstance(event, Started):
                order.append(n)

    asked = [asyncio.create_task(ask(n)) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await ask(2)
    assert refused.value.retry_after_s >= 1
    bench.gate.set()
    await asyncio.gather(*asked)
    assert order == [0, 1]


async def test_who_leaves_the_line_makes_room(make: Callable[..., Bench]):
    """For the next, and is never answered."""
    bench = make(Limits(waiting=1))
    bench.gate.clear()
    gone = asyncio.create_task(answered(bench.dispatcher, CALL))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    asked = asyncio.create_task(answered(bench.dispatcher, CALL))
    await asyncio.sleep(0)
    bench.gate.set()
    started, _ = await asked
    assert started.queue_wait_ms > 0
    assert bench.dispatcher.status()["queue"]["waiting"] == 0


async def test_a_call_that_takes_too_long_ends(make: Callable[..., Bench]):
    """With the limit named, and the next is served."""
    bench = make(Limits(call_s=0.05))
    bench.gate.clear()
    with pytest.raises(TimedOut, match=r"0\.05 s"):
        await answered(bench.dispatcher, CALL)
    bench.gate.set()
    assert bench.dispatcher.status()["queue"] == {"running": 0, "waiting": 0, "limit": 32}


async def test_the_deadline_never_cuts_what_the_reader_does(make: Callable[..., Bench]):
    """It used to strike the reader in its own work, whose client then heard nothing."""
    bench = make(Limits(call_s=0.5))
    await bench.dispatcher.preload(["tiny"])
    async with aclosing(bench.dispatcher.submit(replace(CALL, max_tokens=4000))) as events:
        await anext(events)
        await asyncio.sleep(0.6)
        with pytest.raises(TimedOut):
            async for _ in events:
                pass


async def test_a_stuck_engine_is_noticed(make: Callable[..., Bench]):
    """Health turns red, whoever waits is told, and nobody else is let in."""
    bench = make(Limits(silence_s=0.05, loading_s=0.05))
    bench.gate.clear()
    asked = asyncio.create_task(answered(bench.dispatcher, CALL))
    trouble = await bench.dispatcher.watch()
    assert "no progress" in trouble
    with pytest.raises(EngineDied, match="no progress"):
        await asked
    assert not bench.dispatcher.health().is_ok
    with pytest.raises(EngineDied):
        await answered(bench.dispatcher, CALL)


async def test_a_model_that_loads_slowly_is_not_stuck(make: Callable[..., Bench]):
    """Loading has a limit of its own."""
    bench = make(Limits(silence_s=0.01, loading_s=60))
    bench.gate.clear()
    asked = asyncio.create_task(answered(bench.dispatcher, CALL))
    await asyncio.to_thread(threading.Event().wait, 0.1)
    assert bench.dispatcher.health().is_ok
    bench.gate.set()
    await asked


async def test_draining_finishes_what_is_there(make: Callable[..., Bench]):
    """And takes nothing new."""
    dispatcher = make().dispatcher
    asked = asyncio.create_task(answered(dispatcher, CALL))
    await asyncio.sleep(0)
    drained = asyncio.create_task(dispatcher.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await answered(dispatcher, CALL)
    assert dispatcher.status()["state"] == "draining"
    assert not dispatcher.health().is_ok
    _, events = await asked
    assert len(ids_of(events)) == 24
    assert await drained


async def test_what_does_not_fit_into_draining_is_told(make: Callable[..., Bench]):
    """As something to try again, elsewhere or later."""
    bench = make()
    bench.gate.clear()
    asked = asyncio.create_task(answered(bench.dispatcher, CALL))
    await asyncio.sleep(0)
    assert not await bench.dispatcher.drain(0.02)
    with pytest.raises(ShuttingDown):
        await asked


async def test_progress_shows_while_a_long_prompt_is_read(make: Callable[..., Bench]):
    """A chunk at a time, so that leaving is possible between them."""
    long = replace(CALL, prompt=tuple(40 + n % 200 for n in range(1200)))
    _, events = await answered(make().dispatcher, long)
    done = [e.event.prompt_tokens_done for e in events if isinstance(e.event, Progress)]
    assert len(done) >= 3
    assert done == sorted(done)
    assert done[-1] == 1200


async def test_status_shows_the_model_and_its_draft(make: Callable[..., Bench]):
    """Before the load by name alone, after it with its figures."""
    dispatcher = make().dispatcher
    (before,) = dispatcher.status()["models"]
    assert (before["id"], before["is_loaded"], before["speculation"]) == ("tiny", False, None)
    await dispatcher.preload(["tiny"])
    (loaded,) = dispatcher.status()["models"]
    assert loaded["speculation"] == "Automatic"
    await answered(dispatcher, CALL)
    (after,) = dispatcher.status()["models"]
    assert after["speculation"] == "Measuring"
    assert after["kv_prefix_cache"]["requests"] == 1


async def test_settings_hold_from_the_next_call_on(make: Callable[..., Bench]):
    """Drafting and the prefix cache, off and on again, without a restart; and they are kept."""
    bench = make()
    dispatcher = bench.dispatcher
    on = replace(CALL, speculation="on")
    await answered(dispatcher, on)
    await dispatcher.change({"speculative_decoding": "off", "kv_prefix_cache": False})
    started, events = await answered(dispatcher, on)
    assert started.notice is not None
    assert dones(events)[0].timing.drafted == 0
    assert dones(events)[0].usage.cached_tokens == 0
    (model,) = dispatcher.status()["models"]
    assert model["speculation"] == "Off (worker's Settings)"
    await dispatcher.change({"speculative_decoding": "auto", "kv_prefix_cache": True})
    await answered(dispatcher, on)
    _, events = await answered(dispatcher, on)
    assert dones(events)[0].timing.drafted > 0
    assert dones(events)[0].usage.cached_tokens == 19


async def test_a_request_that_can_not_fit_is_refused_before_it_starts(make: Callable[..., Bench]):
    """With what it needs and what there is; a smaller one is served."""
    dispatcher = make(budget=3_000_000).dispatcher
    with pytest.raises(NotEnoughMemory, match=r"tokens need [\d,]+ MB; this worker has [\d,]+ MB"):
        await answered(dispatcher, replace(CALL, prompt=(40,) * 2000, max_tokens=1000))
    _, events = await answered(dispatcher, CALL)
    assert len(ids_of(events)) == 24
    assert dispatcher.health().is_ok


# --- models that come and go ------------------------------------------------------------------


def named(*ids: str) -> dict[str, ModelEntry]:
    return {id: ModelEntry(id=id) for id in ids}


def listed(bench: Bench) -> dict[str, bool]:
    return {model.id: model.is_loaded for model in bench.dispatcher.models()}


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110  (nothing wakes us)
            await asyncio.sleep(0.005)


async def test_a_model_that_has_just_come_is_found(make: Callable[..., Bench]):
    """By the first request that names it, before anyone looked."""
    bench = make()
    bench.offered.append(named("tiny", "new"))
    started, _ = await answered(bench.dispatcher, replace(CALL, model="new"))
    assert started.model == "new"
    with pytest.raises(UnknownModel, match="'newer', served here: tiny, new"):
        await answered(bench.dispatcher, replace(CALL, model="newer"))


async def test_an_unknown_name_does_not_wait_for_what_is_being_written(make: Callable[..., Bench]):
    """Nor does looking for what came, though what went is freed only then."""
    bench = make()
    stream = bench.dispatcher.submit(replace(CALL, max_tokens=3000))
    async with aclosing(stream):
        await anext(stream)
        bench.offered.append(named("other"))
        with pytest.raises(UnknownModel, match="served here: other"):
            async with asyncio.timeout(1):
                await answered(bench.dispatcher, replace(CALL, model="x"))
        assert listed(bench) == {"other": False}
        assert isinstance(await anext(stream), ReplyEvent)
    active = bench.dispatcher.status()["memory"]["active_bytes"]
    await until(lambda: not bench.roster.loaded)
    assert bench.dispatcher.status()["memory"]["active_bytes"] <= active


async def test_models_that_can_not_be_looked_up_stay(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
):
    """Someone writes their record by hand, for instance; the log says so."""
    bench = make()

    def broken() -> None:
        raise ConfigError("models.json: can't be read")

    monkeypatch.setattr(bench.dispatcher, "_changed", broken)
    await bench.dispatcher.refresh_models()
    assert listed(bench) == {"tiny": False}


async def test_a_model_is_forgotten_with_its_memory(make: Callable[..., Bench]):
    """It is served no more, whatever it was called by."""
    bench = make()
    await answered(bench.dispatcher, CALL)
    assert listed(bench) == {"tiny": True}
    await bench.dispatcher.forget("tiny")
    assert listed(bench) == {}
    assert bench.roster.loaded == []
    for model in ("tiny", None):
        with pytest.raises(UnknownModel):
            await answered(bench.dispatcher, replace(CALL, model=model))
    with pytest.raises(UnknownModel):
        await bench.dispatcher.forget("tiny")


async def test_a_model_in_use_is_not_forgotten(make: Callable[..., Bench]):
    """While a request with it runs or waits, also while it is loaded for it."""
    bench = make()
    bench.gate.clear()
    first = asyncio.create_task(answered(bench.dispatcher, CALL))
    second = asyncio.create_task(answered(bench.dispatcher, CALL))
    await until(lambda: bench.dispatcher.status()["queue"]["waiting"] == 2)
    with pytest.raises(ModelInUse, match="tiny: 2 requests running or waiting"):
        await bench.dispatcher.forget("tiny")
    bench.gate.set()
    await asyncio.gather(first, second)
    await bench.dispatcher.forget("tiny")
    assert listed(bench) == {}


async def test_models_are_loaded_before_they_are_asked_for(make: Callable[..., Bench]):
    """Those that are named, in turn."""
    bench = make()
    bench.offered.append(named("tiny", "new"))
    await bench.dispatcher.refresh_models()
    await bench.dispatcher.preload(["new"])
    assert listed(bench) == {"tiny": False, "new": True}


# --- the machine ------------------------------------------------------------------------------


class Nap:
    """A machine that is told of one activity at a time, and bears no misuse."""

    def __init__(self) -> None:
        self.is_told = False
        self.n_told = 0
        self._thread = threading.get_ident()

    def begin(self, reason: str) -> str:
        assert not self.is_told
        assert threading.get_ident() == self._thread
        self.is_told, self.n_told = True, self.n_told + 1
        return reason

    def end(self, token: str) -> None:
        assert self.is_told
        assert threading.get_ident() == self._thread
        self.is_told = False


@pytest.mark.parametrize("ending", ["answered", "refused", "cancelled", "left", "drained"])
async def test_the_machine_is_told_that_a_call_is_here_until_it_ends(
    make: Callable[..., Bench], ending: str
):
    """However it ends."""
    nap = Nap()
    bench = make(activity=Activity(nap))
    long = replace(CALL, max_tokens=40 if ending == "answered" else 4000)
    if ending == "refused":
        with pytest.raises(InvalidParameter):
            await answered(bench.dispatcher, replace(CALL, sampling={"temperature": -1.0}))
    elif ending in ("answered", "left"):
        async with aclosing(bench.dispatcher.submit(long)) as events:
            async for _ in events:
                assert nap.is_told
                if ending == "left":
                    break
    else:
        bench.gate.clear()
        call = asyncio.create_task(answered(bench.dispatcher, long))
        while not nap.is_told:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if ending == "cancelled":
            call.cancel()
        else:
            assert not await bench.dispatcher.drain(0.01)
        bench.gate.set()
        with pytest.raises((asyncio.CancelledError, ShuttingDown)):
            await call
    assert not nap.is_told
    assert nap.n_told == 1


async def test_calls_beside_each_other_are_told_once(make: Callable[..., Bench]):
    """The last one ends it."""
    nap = Nap()
    dispatcher = make(activity=Activity(nap)).dispatcher
    await asyncio.gather(*(answered(dispatcher, CALL) for _ in range(3)))
    assert (nap.is_told, nap.n_told) == (False, 1)


async def test_what_happens_to_the_machine_reaches_the_reply_that_is_written(
    make: Callable[..., Bench],
):
    """It is measured no more; what the machine says is shown."""
    heard = threading.Event()
    bench = make(model=lambda: Held(heard))
    call = replace(CALL, max_tokens=400, speculation="auto")
    async with aclosing(bench.dispatcher.submit(call)) as events:
        n_texts = 0
        async for event in events:
            n_texts += isinstance(event, ReplyEvent) and isinstance(event.event, Text)
            if n_texts == HELD_AT:
                break
        power = Power(is_on_battery=True, is_low_power=True)
        bench.dispatcher.hear_machine(power, [Disturbance("power source", lasts=True)])
        heard.set()
        async for _ in events:
            pass
    status = bench.dispatcher.status()
    assert status["power"] == {"is_on_battery": True, "thermal": None, "is_low_power": True}
    assert status["models"][0]["measured"]["state"] == "measuring"
    assert status["models"][0]["measured"]["requests"] == 0
