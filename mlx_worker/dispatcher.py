"""The engine as the doors see it: calls wait in line, one at a time is answered, any may leave.

Owns the line (its limit, its order, who waits), the deadline of a call, and the watch over the
engine thread. Leaves answering to loaded_model.py, which model to roster.py, and the crossing
between the threads to engine/thread.py. Event loop only, but for `_answers`, which the engine
thread runs.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from time import perf_counter
from typing import Any

from mlx_worker.activity import Activity
from mlx_worker.calls import check_form, has_form, opening_of, request_of, token_names
from mlx_worker.config import Config, ModelEntry
from mlx_worker.engine import memory
from mlx_worker.engine.session import check
from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import (
    ConfigError,
    EngineDied,
    ModelInUse,
    Overloaded,
    ShuttingDown,
    TimedOut,
    WorkerError,
)
from mlx_worker.policies import Kept, Policies
from mlx_worker.power import Power
from mlx_worker.records import (
    Call,
    Disturbance,
    Done,
    Health,
    Platform,
    Progress,
    ReplyEvent,
    ServedModel,
    Settings,
    Started,
    Status,
    Text,
    effective_status,
    status_text,
)
from mlx_worker.roster import Entry, Roster

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # between two looks at the engine thread
RECENT_CALLS = 16  # that say how long one takes, for whoever is told to come again
FIRST_GUESS_S = 2.0  # of that, before there was a call


class Dispatcher:
    """Answers calls with the models of a roster. A records.Engine.

    policies, kept  the file of the settings, and what it said
    power    what the machine last said of it
    activity told while calls run or wait, so that the machine doesn't slow them
    changed  which models there are now, if not those that there were; blocking; raises ConfigError

    Next: keep `watch` running, and `drain` it before its thread is closed.
    """

    def __init__(
        self,
        thread: EngineThread,
        roster: Roster,
        config: Config,
        policies: Policies,
        kept: Kept,
        changed: Callable[[], Mapping[str, ModelEntry] | None] = lambda: None,
        activity: Activity | None = None,
    ) -> None:
        self.power = Power()
        self._activity = activity or Activity()
        self._thread = thread
        self._roster = roster
        self._config = config
        self._limits = config.limits
        self._policies = policies
        self._kept = kept
        self._platform = Platform()
        self._changed = changed
        self._refreshing, self._changing = asyncio.Lock(), asyncio.Lock()
        self._tidying: asyncio.Task[None] | None = None  # kept, so that it isn't collected
        self._calls: Counter[str] = Counter()  # that run or wait, of each model
        self._n_waiting = self._n_running = 0
        self._took_s: deque[float] = deque([FIRST_GUESS_S], RECENT_CALLS)
        self._trouble: str | None = None
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def submit(self, call: Call) -> AsyncGenerator[Started | ReplyEvent, None]:
        self._admit()
        id = await self._known(call.model)
        self._admit()  # others may have come meanwhile
        submitted = perf_counter()
        is_running = False
        self._activity.begin()
        self._n_waiting += 1
        self._calls[id] += 1
        self._is_idle.clear()
        try:
            if has_form(call):
                await asyncio.to_thread(check_form, call)
            answers = self._thread.events(
                lambda: self._answers(id, call, submitted),
                (self._limits.call_s, TimedOut(self._limits.call_s)),
                is_urgent=lambda event: call.is_streamed or not is_piece(event),
            )
            async with aclosing(answers):
                async for event in answers:
                    if not is_running:
                        is_running = True
                        self._n_waiting -= 1
                        self._n_running += 1
                    yield event
            self._took_s.append(perf_counter() - submitted)
        finally:
            self._calls[id] -= 1
            if is_running:
                self._n_running -= 1
            else:
                self._n_waiting -= 1
            self._activity.end()
            if not self._n_waiting + self._n_running:
                self._is_idle.set()

    def models(self) -> list[ServedModel]:
        return [entry.served for entry in self._roster.entries.values()]

    def health(self) -> Health:
        trouble = self._trouble or self._found_trouble()
        if trouble is None and self._is_draining:
            trouble = "the worker is shutting down"
        return Health(trouble is None, trouble or "")

    def status(self) -> dict[str, Any]:
        health = self.health()
        return {
            "state": self._state(health),
            "why": health.why,
            "queue": {
                "running": self._n_running,
                "waiting": self._n_waiting,
                "limit": self._limits.waiting,
            },
            "memory": memory.used(),
            "power": asdict(self.power),
            "settings": asdict(self._kept.settings),
            "settings_revision": self._kept.revision,
            "settings_problem": self._kept.problem,
            "paused": self._kept.settings.run_requests_together,
            "platform": asdict(self._platform),
            "models": [self._model(entry) for entry in self._roster.entries.values()],
        }

    def hear_machine(self, power: Power, disturbances: Sequence[Disturbance]) -> None:
        """How the machine is now, and what happened to it, so that no timing of it is believed."""
        self.power = power
        for disturbance in disturbances:
            logger.info("the machine: %s, now %s", disturbance.reason, asdict(power))
            self._roster.disturb(disturbance)

    def settings(self) -> Settings:
        return self._kept.settings

    async def change(self, changes: Mapping[str, Any], revision: int | None = None) -> Settings:
        async with self._changing:  # so that the last to be written is the one in force
            try:
                kept = await asyncio.to_thread(self._policies.change, changes, revision)
            except ConfigError as error:
                self._adopt_problem(await asyncio.to_thread(self._policies.read), str(error))
                raise
            self._kept = kept
        logger.info("settings: %s, revision %d", asdict(kept.settings), kept.revision)
        return kept.settings

    def _adopt_problem(self, found: Kept, why: str) -> None:
        """A file that was broken meanwhile counts as Off, as one that was broken at the start.

        why  the change could not be kept; shown until one is
        """
        if found.problem:
            logger.error("drafting is off: %s", found.problem)
            self._kept = found._replace(revision=self._kept.revision)
        else:
            logger.error("a change of settings was not kept: %s", why)
            self._kept = self._kept._replace(problem=why)

    def set_platform(self, platform: Platform) -> None:
        if platform != self._platform:
            logger.info("platform: %s", asdict(platform))
        self._platform = platform

    @property
    def _why_off(self) -> str | None:
        """Why no call of the whole worker is drafted now; None: such as may be are."""
        settings, platform = self._kept.settings, self._platform
        if platform.speculative_decoding == "unavailable":
            return "drafting is not offered to this worker's organisation"
        if platform.speculative_decoding == "off":
            return f"drafting is switched off by {platform.display_name}"
        if settings.speculative_decoding == "off":
            return "drafting is switched off in the worker's settings"
        if settings.run_requests_together:
            return "drafts pause while Run requests together is on in the worker's settings"
        return None

    def _model(self, entry: Entry) -> dict[str, Any]:
        """One model as /status shows it."""
        shown = None
        if entry.status is not None:
            shown = self._effective(entry.status, entry.facts["draft_kind"] is not None)
        return {
            "id": entry.served.id,
            "is_loaded": entry.served.is_loaded,
            "load_problem": entry.problem,
            **entry.facts,
            "speculation": shown and status_text(shown, self._platform.display_name),
            "measured": shown and asdict(shown),
        }

    def _effective(self, measured: Status, has_draft: bool) -> Status:
        settings, platform = self._kept.settings, self._platform
        return effective_status(
            measured,
            has_draft=has_draft and platform.speculative_decoding != "unavailable",
            is_off_by_platform=platform.speculative_decoding == "off",
            is_off_by_settings=settings.speculative_decoding == "off",
            is_paused=settings.run_requests_together,
        )

    def _state(self, health: Health) -> str:
        if self._is_draining:
            return "draining"
        return "ready" if health.is_ok else "failing"

    async def preload(self, ids: Sequence[str]) -> None:
        """Load models before the first call asks for them. Raises ModelError."""
        for id in ids:
            await self._run(lambda id=id: self._preload(id))

    async def refresh_models(self) -> None:
        """Serve what came, and no more what is gone, whose memory is freed once it is idle."""
        async with self._refreshing:
            try:
                models = await asyncio.to_thread(self._changed)
            except ConfigError as error:
                logger.error("the models stay as they were: %s", error)
                return
            if models is None:
                return
            self._roster.refresh(models)
            logger.info("models: %s", ", ".join(models))
        self._tidying = asyncio.create_task(self._tidy())  # after the reply that is being written

    async def _tidy(self) -> None:
        with suppress(WorkerError):  # a lost engine is what `watch` tells of
            await self._run(self._roster.tidy)

    async def forget(self, id: str) -> None:
        id = await self._known(id)
        if n_requests := self._calls[id]:
            raise ModelInUse(id, n_requests=n_requests)
        self._roster.drop(id)
        await self._run(self._roster.tidy)

    async def _known(self, name: str | None) -> str:
        """The id of a model; one that has just come is found. Raises UnknownModel."""
        if name is None or name in self._roster.entries:
            return self._roster.known(name)
        await self.refresh_models()
        return await asyncio.to_thread(self._roster.known, name)

    async def _run(self, job: Callable[[], None]) -> None:
        """One job on the engine thread, after those that are there. Raises what it raises."""

        def steps() -> Iterator[None]:
            job()
            yield None

        async for _ in self._thread.events(steps):
            pass

    async def watch(self) -> str:
        """Ends with what is wrong, should the engine stop or get stuck; every call fails then."""
        while (trouble := self._found_trouble()) is None:  # noqa: ASYNC110  (nothing can wake us)
            await asyncio.sleep(WATCH_S)
        self._trouble = trouble
        logger.critical("the engine is lost: %s", trouble)
        self._thread.abandon(EngineDied(trouble, hint="the worker restarts; try again"))
        return trouble

    async def drain(self, within_s: float) -> bool:
        """Take no more calls, and finish those that are here; whether that was done in time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()
        except TimeoutError:
            logger.warning("%d calls were cut off", self._n_running + self._n_waiting)
            self._thread.abandon(ShuttingDown())
            return False
        return True

    def _admit(self) -> None:
        if self._is_draining:
            raise ShuttingDown
        if not (health := self.health()).is_ok:
            raise EngineDied(health.why, hint="the worker restarts; try again")
        if self._n_waiting >= self._limits.waiting:
            wait_s = sum(self._took_s) / len(self._took_s) * self._n_waiting
            raise Overloaded(
                f"{self._n_waiting} requests wait already, {self._limits.waiting} are the limit",
                retry_after_s=max(1.0, wait_s),
            )

    def _found_trouble(self) -> str | None:
        if not self._thread.is_alive:
            return "the engine thread has ended"
        is_loading = self._roster.loading is not None
        limit_s = self._limits.loading_s if is_loading else self._limits.silence_s
        silent_s = self._thread.silent_s
        if silent_s > limit_s:
            return f"no progress for {silent_s:.0f} s, {limit_s:.0f} s are the limit"
        return None

    # --- on the engine thread

    def _preload(self, id: str) -> None:
        model, _ = self._roster.take(id, is_asked_for=False)
        if model.pair.draft_kind is not None:
            model.decider.prepare(model.pair)

    def _answers(self, id: str, call: Call, submitted: float) -> Iterator[Started | ReplyEvent]:
        queue_wait_ms = (perf_counter() - submitted) * 1000
        model, model_load_ms = self._roster.take(id)
        model.keep_prefixes(self._kept.settings.kv_prefix_cache)
        request, notice = request_of(model, call, self._config, self._why_off)
        check(model.pair, request)
        self._roster.admit(model, len(request.prompt_ids) + request.max_tokens)
        choices = model.choices(request, call.n, call.scope)
        try:
            yield Started(
                id,
                len(request.prompt_ids),
                queue_wait_ms,
                model_load_ms,
                notice,
                **opening_of(model, request),
            )
            for choice, event in choices:
                if isinstance(event, Progress | Text | Done):
                    yield ReplyEvent(choice, event, token_names(model, event))
        finally:
            choices.close()
            self._roster.publish(id)


def is_piece(event: Started | ReplyEvent) -> bool:
    """Whether it is a part of a reply, of which a whole one's client sees nothing yet."""
    return isinstance(event, ReplyEvent) and isinstance(event.event, Text)
