"""The worker: builds its parts, starts them, waits, and stops them in order.

Owns the order of things and the exit code; the only file that names all parts. Leaves each part
to its own file. Main thread, whose event loop it runs.

    start   bind the address, then load the model, so that /health is there to be asked
    wait    for a signal, or for the engine to be lost
            The link to a gateway, if there is one, runs beside; whatever becomes of it, the local
            API goes on
    stop    tell the gateway, take no more requests, finish those that are here, end the link, free
            the model; at once while the model is still being loaded
"""

import asyncio
import logging
import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from aiohttp import web

from mlx_worker.activity import activity_here
from mlx_worker.config import Config, ModelEntry
from mlx_worker.decisions import default_folder
from mlx_worker.dispatcher import Dispatcher
from mlx_worker.engine import memory
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.prefix import PrefixCache
from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import ConfigError, ModelError, ModelNotFound, WorkerError
from mlx_worker.http.bind import bind
from mlx_worker.http.connection import allow_open_files
from mlx_worker.link.client import Link
from mlx_worker.loaded_model import Decider, LoadedModel, settle
from mlx_worker.models.locate import DEMO, locate, locate_draft
from mlx_worker.policies import Policies, default_path
from mlx_worker.power import Watch
from mlx_worker.presence import Presence
from mlx_worker.records import Settings, Source
from mlx_worker.roster import Roster
from mlx_worker.server.app import Runner, make_app
from mlx_worker.server.counted import Counted
from mlx_worker.server.keys import METRICS
from mlx_worker.server.metrics import Metrics
from mlx_worker.serving import Offer, drafts, preloaded
from mlx_worker.state import Phase

logger = logging.getLogger(__name__)

DRAIN_S = 25.0  # that requests get to finish once the worker is told to stop
LEAVE_S = 1.0  # that a connection gets after that, twice: to end, and to be ended
TOLD_S = 15.0  # between two writes of what drafting brings, where it changed
CHORES_S = 2.0  # between two writes of the decision log, and two looks at what was pulled
LOST = 70  # the exit code when the engine is lost, so that a supervisor starts it anew
TELL_S = 0.5  # for those who wait to be told of it before the process goes


def serve(
    config: Config,
    on_ready: Callable[[str], None],
    say: Callable[[str], None],
    *,
    is_demo_named: bool = False,
    presence: Presence | None = None,
) -> int:
    """Serve until told to stop; returns the exit code.

    on_ready       hears the console's address once requests can be served
    say            hears what else whoever started it should know
    is_demo_named  somebody wants the demo pair, which a gateway isn't offered otherwise
    presence       tells others on this machine what becomes of it

    Raises ConfigError for an address that can't be used, ModelError for a model that isn't here or
    can't load.
    """
    allow_open_files()
    hidden = frozenset[str]() if is_demo_named else frozenset({DEMO})
    presence = presence or Presence()
    worker = Worker(config, say, hidden, presence)
    code = asyncio.run(worker.run(on_ready))
    presence.is_stuck = worker.is_loading  # its thread is in a load that nothing can end
    return code


class Worker:
    """The parts of one worker.

    is_loading  it was told to stop while its model was loaded, which goes on
    """

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        hidden: frozenset[str] = frozenset(),
        presence: Presence | None = None,
    ) -> None:
        """Reads files, so before the loop runs. Raises ConfigError, ModelError.

        hidden    models that a gateway isn't offered
        presence  None, or one that holds no folder, says nothing
        """
        check_gateway(config)
        self._presence = presence or Presence()
        self._told: Any = None  # the models' texts in state.json
        self._told_s = -math.inf
        self._config = config
        self._hidden = hidden
        self._say = say
        limits = config.limits
        self._budget_bytes = budget = memory.budget_bytes(limits.memory_gb)
        offer = Offer(config)
        locate(next(iter(offer.models.values())).id)  # fails if the default isn't here
        self._preloaded = preloaded(offer.models, limits.loaded)
        self._roster = Roster(
            offer.models,
            self._load,
            budget_bytes=budget,
            size_of=lambda id: memory.model_bytes(locate(id)),
            most=limits.loaded,
            least_stay_s=limits.least_stay_s,
            is_current=is_current,
        )
        self._thread = EngineThread()
        self._thread.call(lambda: memory.hold_to(budget))
        policies = Policies(default_path(), default_settings(config))
        kept = policies.read()
        if kept.problem:
            logger.error("drafting is off: %s", kept.problem)
            say(f"drafting is off: {kept.problem}")
        self._dispatcher = Dispatcher(
            self._thread,
            self._roster,
            config,
            policies,
            kept,
            offer.changed,
            activity_here(),
        )
        self._link: Link | None = None  # made on the loop
        self._watch = Watch()
        self._stop, self._is_hasty = asyncio.Event(), asyncio.Event()
        self.is_loading = False

    async def run(self, on_ready: Callable[[str], None]) -> int:
        app = make_app(
            self._dispatcher,
            self._config.server,
            drafts=drafts(self._config),
            budget_bytes=self._budget_bytes,
            link=lambda: self._link.shown() if self._link else None,
        )
        self._link = self._linked(app[METRICS])
        runner = Runner(app, shutdown_timeout=LEAVE_S)
        tasks: list[asyncio.Task[object]] = []
        try:
            address = await self._bind(runner)
            await self._tell("starting", address=address)
            self._listen_to_signals()
            if not await self._is_loaded():
                return 0
            await self._tell("ready", error=None)
            tasks = [asyncio.create_task(self._do_chores())]
            logger.info("serving on %s", address)
            on_ready(address)
            self._dial()
            return await self._wait()
        finally:
            for task in tasks:
                task.cancel()
            if self._link:
                await self._link.close()
            await runner.cleanup()
            if not self.is_loading:
                await asyncio.to_thread(self._close)

    def _linked(self, metrics: Metrics) -> Link | None:
        """The link to the gateway, not dialled yet; None: there is none."""
        if not self._config.gateway.is_set:
            return None
        return Link(
            Counted(self._dispatcher, metrics),
            self._config.gateway,
            hidden=self._hidden,
            budget_bytes=self._budget_bytes,
            say=self._say,
        )

    def _dial(self) -> None:
        if self._link is None:
            return
        if all(model.id in self._hidden for model in self._dispatcher.models()):
            self._say(
                "gateway: no model is offered to it: pull one, or name the demo pair with "
                "--model demo"
            )
        self._link.start()

    async def _bind(self, runner: web.AppRunner) -> str:
        settings = self._config.server
        await runner.setup()
        _, address = await bind(runner, settings.host, settings.port, section="server")
        return address

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop)

    def _told_to_stop(self) -> None:
        """The first time it finishes what it can, the second time it doesn't wait for that."""
        if self._stop.is_set():
            self._is_hasty.set()
        else:
            self._say(f"stopping: what was begun has {DRAIN_S:g} s to finish; again stops at once")
        self._stop.set()

    async def _is_loaded(self) -> bool:
        """Load what is preloaded; False: it was told to stop meanwhile, and who waits is told."""
        loading = asyncio.create_task(self._dispatcher.preload(self._preloaded))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([loading, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if loading.done():
            await loading
            return True
        self.is_loading = True
        logger.info("stopping before the model is loaded")
        await self._dispatcher.drain(0)
        loading.cancel()
        return False

    async def _wait(self) -> int:
        """Until it is told to stop, and what was begun is finished; or the engine is lost."""
        watch = asyncio.create_task(self._dispatcher.watch())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([watch, stop], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            await self._tell("lost", error=f"the engine was lost: {watch.result()}")
            await asyncio.sleep(TELL_S)
            logging.shutdown()
            os._exit(LOST)  # the thread is stuck in a call that nothing can end
        watch.cancel()
        logger.info("stopping")
        await self._tell("draining", models=self._texts())
        if self._link:
            self._link.drain()
        drain = asyncio.create_task(self._dispatcher.drain(DRAIN_S))
        hasty = asyncio.create_task(self._is_hasty.wait())
        await asyncio.wait([drain, hasty], return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await self._dispatcher.drain(0)
        hasty.cancel()
        return 0

    async def _do_chores(self) -> None:
        """Write what was decided, and see what was pulled; off the engine's thread and the loop."""
        while True:
            await asyncio.sleep(CHORES_S)
            await asyncio.to_thread(self._roster.flush)
            await self._dispatcher.refresh_models()
            await self._look_at_power()
            await self._tell_of_models()

    async def _tell_of_models(self) -> None:
        """For those who look once it is down."""
        if monotonic() - self._told_s < TOLD_S:
            return
        models = self._texts()
        if models != self._told or self._presence.is_failing:
            self._told, self._told_s = models, monotonic()
            await self._tell(models=models)

    def _texts(self) -> tuple[tuple[str, str | None], ...]:
        """What drafting brings each model."""
        shown = self._dispatcher.status()["models"]
        return tuple((model["id"], model["speculation"]) for model in shown)

    async def _tell(self, phase: Phase | None = None, **fields: Any) -> None:
        await asyncio.to_thread(self._presence.say, phase, **fields)

    async def _look_at_power(self) -> None:
        disturbances = await asyncio.to_thread(self._watch.look)
        self._dispatcher.hear_machine(self._watch.power, disturbances)

    def _close(self) -> None:
        with suppress(Exception):
            self._thread.close(self._roster.close)

    def _load(self, entry: ModelEntry) -> LoadedModel:
        speculation = self._config.speculation

        def load(source: str | Source) -> LoadedPair:
            return load_pair(
                source,
                locate_draft(entry.draft, of=entry.id),
                position=speculation.assistant_position,
                context_tokens=entry.context_tokens,
                sampling=entry.sampling.given,
            )

        source = locate(entry.id)
        try:
            pair = load(source)
        except ModelError:
            if locate(entry.id) == source:
                raise
            pair = load(locate(entry.id))  # a newer revision took its place meanwhile
        depth = speculation.depth or None
        model = LoadedModel(pair, PrefixCache(), Decider(depth, default_folder()))
        settle()
        return model


def check_gateway(config: Config) -> None:
    """Raises ConfigError where half of what is needed is set."""
    gateway = config.gateway
    if gateway.url is not None and gateway.key is None:
        raise ConfigError(
            "gateway.key: is missing beside gateway.url",
            hint="mlx-worker config set gateway.key - reads it from standard input",
        )
    if gateway.key is not None and gateway.url is None:
        raise ConfigError(
            "gateway.url: is missing beside gateway.key",
            hint="mlx-worker config set gateway.url wss://HOST",
        )


def is_current(entry: ModelEntry, model: LoadedModel) -> bool:
    """Whether the files that a model was loaded from are still those that its name means."""
    try:
        source = locate(entry.id)
    except ModelNotFound:
        return False
    except WorkerError:  # half of them are away; what is in memory is whole
        return True
    return not isinstance(source, Source) or source == model.pair.source


def default_settings(config: Config) -> Settings:
    """What config.yaml says of the settings that policies.json doesn't name.

    Raises ConfigError for a mode that a worker doesn't have.
    """
    mode = config.speculation.mode
    if mode == "on":
        raise ConfigError(
            "speculation.mode: 'on', must be auto or off for a worker: it decides by measuring",
            hint='a single request may ask for "speculation": "on"',
        )
    return Settings(speculative_decoding=mode)
