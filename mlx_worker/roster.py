"""Which of the configured models are in memory: loaded on demand, the least recently used let go.

Owns loading and letting go, and the least stay that keeps two models from driving each other out
for ever. Leaves answering to loaded_model.py, and what memory there is to engine/memory.py. Engine
thread only, but for `entries` and `loading`, which any thread may read.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from mlx_worker.engine import memory
from mlx_worker.errors import ModelTooLarge, NotEnoughMemory, Overloaded, UnknownModel
from mlx_worker.loaded_model import LoadedModel, collect
from mlx_worker.records import ServedModel, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One configured model, as others see it.

    model, draft  as they were configured; served  what clients may ask for
    facts         of the last load, as of its last reply; empty before the first
    status        of its draft; None: not loaded
    """

    model: str
    draft: str | None
    served: ServedModel
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    status: Status | None = None


@dataclass
class Place:
    """A loaded model, and since when it is there."""

    model: LoadedModel
    loaded_s: float
    used_s: float


def model_id(model: str) -> str:
    """What clients call it: a hub id or a name as it is, a folder by its last part."""
    path = Path(model).expanduser()
    return Path(os.path.abspath(path)).name if path.is_dir() else model


class Roster:
    """Keeps up to `most` models loaded, if so many fit.

    models        what clients call it → (model, draft) as configured, the default first
    load          makes one of them; raises ModelError
    budget_bytes  what models, requests and prefix caches may hold together
    size_of       what a model's weights will take; raises ModelNotFound
    least_stay_s  how long one stays once it is loaded, whatever else is asked for
    clock         seconds that only ever grow
    """

    def __init__(
        self,
        models: Mapping[str, tuple[str, str | None]],
        load: Callable[[str, str | None], LoadedModel],
        *,
        budget_bytes: int,
        size_of: Callable[[str], int] = memory.model_bytes,
        most: int = 1,
        least_stay_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert models, "a roster needs a model"
        now = int(time.time())
        self.entries = {
            id: Entry(model, draft, ServedModel(id, now, is_loaded=False))
            for id, (model, draft) in models.items()
        }
        self.loading: str | None = None
        self._load = load
        self.budget_bytes = budget_bytes
        self._size_of = size_of
        self._most = most
        self._least_stay_s = least_stay_s
        self._clock = clock
        self._places: dict[str, Place] = {}

    def known(self, name: str | None) -> str:
        """The id of the model that is asked for; None: the default. Any thread.

        Raises UnknownModel.
        """
        if name is None:
            return next(iter(self.entries))
        if name not in self.entries:
            raise UnknownModel(name, self.entries)
        return name

    def take(self, id: str, *, is_asked_for: bool = True) -> tuple[LoadedModel, float]:
        """The model with this id, and the ms that loading it took; 0 where it was there.

        is_asked_for  False: nobody did yet, so it may go at once for one that is

        Raises ModelError where it can't be loaded, Overloaded where no other may go yet.
        """
        took_ms = 0.0
        if id not in self._places:
            self._make_room(id)
            began = perf_counter()
            self._places[id] = self._loaded(id)
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
        served = replace(
            self.entries[id].served,
            context_tokens=facts["context_limit"],
            draft=facts["draft"],
            is_loaded=True,
        )
        self._change(id, served=served, facts=facts, status=model.status)

    def let_go(self, id: str) -> None:
        """Free a model's memory, and its draft's and prefix cache's with it."""
        place = self._places.pop(id)
        place.model.close()
        del place
        collect()
        served = replace(self.entries[id].served, is_loaded=False)
        self._change(id, served=served, status=None)
        logger.info("let go of %s", id)

    def flush(self) -> None:
        """Write the decision logs of what is loaded. Not on the engine thread."""
        for place in list(self._places.values()):
            place.model.decider.flush()

    def close(self) -> None:
        for id in list(self._places):
            self.let_go(id)

    def _change(self, id: str, **changes: Any) -> None:
        self.entries = {**self.entries, id: replace(self.entries[id], **changes)}

    def _loaded(self, id: str) -> Place:
        self.loading = id
        try:
            entry = self.entries[id]
            model = self._load(entry.model, entry.draft)
        finally:
            self.loading = None
        now = self._clock()
        return Place(model, now, now)

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

    def _make_room(self, id: str) -> None:
        """For a model that is to be loaded. Raises ModelTooLarge, Overloaded."""
        need = self._size_of(self.entries[id].model)
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
