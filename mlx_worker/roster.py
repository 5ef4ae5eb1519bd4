"""Which of the models that are served are in memory: loaded on demand, the least recently used go.

Owns loading and letting go, and the least stay that keeps two models from driving each other out
for ever. Leaves answering to loaded_model.py, what memory there is to engine/memory.py, and which
models there are to serving.py. Engine thread only, but for `entries` and `loading`, which any
thread may read, and `known`, `refresh`, `drop` and `disturb`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import Any

from mlx_worker.config import ModelEntry
from mlx_worker.engine import memory
from mlx_worker.errors import ModelError, ModelTooLarge, NotEnoughMemory, Overloaded, UnknownModel
from mlx_worker.loaded_model import LoadedModel, collect
from mlx_worker.models import catalogue
from mlx_worker.records import Disturbance, ServedModel, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One model, as others see it.

    model   as it is configured; served  what clients may ask for
    facts   of the last load, as of its last reply; empty before the first
    status  of its draft; None: not loaded
    problem why it couldn't be loaded when it was last wanted; None: it could, or never was
    """

    model: ModelEntry
    served: ServedModel
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    status: Status | None = None
    problem: str | None = None


@dataclass
class Place:
    """A loaded model, what it was loaded as, and since when it is there."""

    entry: ModelEntry
    model: LoadedModel
    loaded_s: float
    used_s: float


class Roster:
    """Keeps up to `most` models loaded, if so many fit.

    models        what clients call it → how it is served, the default first
    load          makes one of them; raises ModelError
    budget_bytes  what models, requests and prefix caches may hold together
    size_of       what the weights of a model with this id will take; raises ModelNotFound
    least_stay_s  how long one stays once it is loaded, whatever else is asked for
    clock         seconds that only ever grow
    is_current    whether a loaded one is still what its entry means
    """

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        load: Callable[[ModelEntry], LoadedModel],
        *,
        budget_bytes: int,
        size_of: Callable[[str], int] = memory.model_bytes,
        most: int = 1,
        least_stay_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        is_current: Callable[[ModelEntry, LoadedModel], bool] = lambda *_: True,
    ) -> None:
        assert models, "a roster needs a model"
        self._lock = Lock()  # from reading the entries to replacing them
        self.entries: dict[str, Entry] = {}
        self.refresh(models)
        self.loading: str | None = None
        self._load = load
        self.budget_bytes = budget_bytes
        self._size_of = size_of
        self._most = most
        self._least_stay_s = least_stay_s
        self._clock = clock
        self._is_current = is_current
        self._places: dict[str, Place] = {}

    def known(self, name: str | None) -> str:
        """The id of the model that is asked for, by it or another of its names; None: the default.

        Any thread; for another name reads files once. Raises UnknownModel.
        """
        entries = self.entries
        if name is None and entries:
            return next(iter(entries))
        if name in entries:
            return name
        id = catalogue.canonical(name) if name else ""
        if id not in entries:
            raise UnknownModel(name or "", entries)
        return id

    def refresh(self, models: Mapping[str, ModelEntry]) -> None:
        """Serve these from now on. Any thread.

        Next: `tidy` on the engine thread, which frees those that are no more.
        """
        now = int(time.time())
        with self._lock:
            old = self.entries
            self.entries = {
                id: old[id]
                if id in old and old[id].model == model
                else Entry(model, ServedModel(id, now, is_loaded=False))
                for id, model in models.items()
            }

    def drop(self, id: str) -> None:
        """Serve it no more. Any thread. Next: `tidy`."""
        with self._lock:
            self.entries = {name: entry for name, entry in self.entries.items() if name != id}

    @property
    def loaded(self) -> list[str]:
        """The ids of what is in memory. Any thread."""
        return list(self._places)

    def tidy(self) -> None:
        """Let go of what is loaded and not served any more, or not as it is now."""
        for id, place in list(self._places.items()):
            is_same = id in self.entries and self.entries[id].model == place.entry
            if not is_same or not self._is_current(place.entry, place.model):
                self.let_go(id)

    def take(self, id: str, *, is_asked_for: bool = True) -> tuple[LoadedModel, float]:
        """The model with this id, and the ms that loading it took; 0 where it was there.

        is_asked_for  False: nobody did yet, so it may go at once for one that is

        Raises ModelError where it can't be loaded, Overloaded where no other may go yet,
        UnknownModel where it was taken out meanwhile.
        """
        took_ms = 0.0
        entries = self.entries
        if id not in entries:
            raise UnknownModel(id, entries)
        entry = entries[id].model
        if id in self._places and self._places[id].entry != entry:
            self.let_go(id)
        if id not in self._places:
            with self._remembered(id):
                self._make_room(id, entry)
                began = perf_counter()
                self._places[id] = self._loaded(id, entry)
            if not is_asked_for:
                self._places[id].loaded_s = -math.inf
            took_ms = (perf_counter() - began) * 1000
            logger.info("loaded %s in %.0f ms", id, took_ms)
        place = self._places[id]
        place.used_s = self._clock()
        self.publish(id)
        return place.model, took_ms

    def publish(self, id: str) -> None:
        """Let others see how a loaded model is now."""
        model = self._places[id].model
        facts = model.facts()
        served = {"context_tokens": facts["context_limit"], "draft": facts["draft"]}
        served["is_loaded"] = True
        self._change(id, served, facts=facts, status=model.status, problem=None)

    def let_go(self, id: str) -> None:
        """Free a model's memory, and its draft's and prefix cache's with it."""
        place = self._places.pop(id)
        place.model.close()
        del place
        collect()
        self._change(id, {"is_loaded": False}, status=None)
        logger.info("let go of %s", id)

    def flush(self) -> None:
        """Write the decision logs of what is loaded. Not on the engine thread."""
        for place in list(self._places.values()):
            place.model.decider.flush()

    def disturb(self, disturbance: Disturbance) -> None:
        """Something happened to the machine: what decodes now says nothing. Any thread."""
        for place in list(self._places.values()):
            place.model.decider.disturb(disturbance)

    def close(self) -> None:
        for id in list(self._places):
            self.let_go(id)

    def _change(self, id: str, served: Mapping[str, Any], **changes: Any) -> None:
        """Of the entry; one that is no more stays so."""
        with self._lock:
            if id in self.entries:
                entry = self.entries[id]
                changed = replace(entry, served=replace(entry.served, **served), **changes)
                self.entries = {**self.entries, id: changed}

    @contextmanager
    def _remembered(self, id: str) -> Iterator[None]:
        """What loading it fails for can be seen as long as it isn't loaded."""
        try:
            yield
        except ModelError as error:
            self._change(id, {}, problem=str(error))
            raise

    def _loaded(self, id: str, entry: ModelEntry) -> Place:
        self.loading = id
        try:
            model = self._load(entry)
        finally:
            self.loading = None
        now = self._clock()
        return Place(entry, model, now, now)

    def admit(self, model: LoadedModel, n_tokens: int) -> None:
        """Make room for a prompt and its reply: of prefix caches, then of other models.

        Raises NotEnoughMemory where it can never be had, Overloaded where no other may go yet.
        """
        need = memory.request_bytes(model.pair, n_tokens)
        room = self.budget_bytes - model.pair.target_bytes - model.pair.draft_bytes
        if need > room:
            raise NotEnoughMemory(tokens=n_tokens, need_bytes=need, room_bytes=max(0, room))
        for place in sorted(self._places.values(), key=lambda place: place.used_s):
            place.model.prefixes.let_go(need - self._free_bytes)
        while need > self._free_bytes and len(self._places) > 1:
            self._let_go_oldest(model)

    @property
    def _free_bytes(self) -> int:
        return self.budget_bytes - memory.used()["active_bytes"]

    def _make_room(self, id: str, entry: ModelEntry) -> None:
        """For a model that is to be loaded. Raises ModelTooLarge, Overloaded."""
        need = self._size_of(entry.id)
        if need > self.budget_bytes:
            raise ModelTooLarge(id, need_bytes=need, budget_bytes=self.budget_bytes)
        while self._places and (len(self._places) >= self._most or need > self._free_bytes):
            self._let_go_oldest()

    def _let_go_oldest(self, but: LoadedModel | None = None) -> None:
        """Of all but one, the least recently used. Raises Overloaded while it must stay."""
        others = [id for id, place in self._places.items() if place.model is not but]
        id = min(others, key=lambda id: self._places[id].used_s)
        left_s = self._places[id].loaded_s + self._least_stay_s - self._clock()
        if left_s > 0:
            raise Overloaded(
                f"{id} was loaded a moment ago and stays for {left_s:.0f} s more "
                f"(limits.loaded: {self._most}, limits.least_stay_s: {self._least_stay_s:g})",
                retry_after_s=left_s,
            )
        self.let_go(id)
