"""A model in memory with all that it takes to answer: pair, prefix cache, verdict and its log.

Owns what lives exactly as long as the model is loaded, so that a fresh load measures afresh. Leaves
one reply to engine/session.py, decisions to control/, and the thread to its owner: everything runs
on the engine thread, but for `status`, `disturb`, `flush` and `close`, which any thread may call.
"""

import gc
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_worker.control.controller import Controller
from mlx_worker.control.status import WHY_AUTOMATIC
from mlx_worker.decisions import DecisionLog
from mlx_worker.engine.costs import cost_curve
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.prefix import BUDGET_BYTES, PrefixCache
from mlx_worker.engine.session import generate_events
from mlx_worker.errors import InvalidParameter
from mlx_worker.records import (
    LOCAL,
    MAX_DEPTH,
    Disturbance,
    Event,
    GenerationRequest,
    Pacer,
    Sampling,
    Status,
    Traffic,
)


class Decider:
    """The controller of a pair, made when `auto` is first asked for, and its log.

    depth   the only one that `auto` may use; None: it chooses
    folder  of the log; None keeps none
    """

    def __init__(self, depth: int | None = None, folder: Path | None = None) -> None:
        if depth is not None and not 1 <= depth <= MAX_DEPTH:
            raise InvalidParameter("depth", depth, f"1 to {MAX_DEPTH}, or None")
        self._depths: Sequence[int] = range(1, MAX_DEPTH + 1) if depth is None else [depth]
        self._folder = folder
        self._log: DecisionLog | None = None
        self._controller: Controller | None = None

    def prepare(self, pair: LoadedPair) -> Controller:
        """The controller; the first time, the draft's costs are timed for a second or two."""
        if self._controller is None:
            if self._folder is not None:
                self._log = DecisionLog(
                    self._folder, {"model": pair.name, "draft": pair.draft_name}
                )
            hear: Callable[[Any], None] = self._log.hear if self._log else _ignore
            self._controller = Controller(
                curve=cost_curve(pair), depths=self._depths, on_concluded=hear
            )
            if self._log:
                self._log.attach(self._controller)
        return self._controller

    def pacer(self, pair: LoadedPair, request: GenerationRequest) -> Pacer | None:
        """Who paces this request; None where nothing is to be decided."""
        if request.speculation != "auto" or pair.draft_kind is None:
            return None
        has_grammar = request.grammar is not None
        traffic = Traffic(len(request.prompt_ids), request.sampling.temperature, has_grammar)
        return self.prepare(pair).await_request(traffic, time.time())

    @property
    def status(self) -> Status:
        if self._controller is None:
            return Status("automatic", why=WHY_AUTOMATIC)
        return self._controller.status

    def disturb(self, disturbance: Disturbance) -> None:
        """What decodes now says nothing of the draft. Any thread."""
        if self._controller is not None:
            self._controller.disturb(disturbance)

    def flush(self) -> None:
        """Write the log. Not on the engine thread."""
        if self._log:
            self._log.flush()

    def close(self) -> None:
        if self._log:
            self._log.close()


class LoadedModel:
    """Answers requests with one loaded pair."""

    def __init__(self, pair: LoadedPair, prefixes: PrefixCache, decider: Decider) -> None:
        self.pair = pair
        self.prefixes = prefixes
        self.decider = decider

    def events(
        self, request: GenerationRequest, scope: str = LOCAL, prefixes: PrefixCache | None = None
    ) -> Generator[Event, None, None]:
        """One reply, as session.py writes it.

        scope     whose earlier conversations it may go on from
        prefixes  those, where they aren't the model's own

        Raises RequestError at once for what this model can't be asked.
        """
        pacer = self.decider.pacer(self.pair, request)
        kept = self.prefixes if prefixes is None else prefixes
        return generate_events(self.pair, request, pacer, kept, scope)

    def choices(
        self, request: GenerationRequest, n: int, scope: str = LOCAL
    ) -> Generator[tuple[int, Event], None, None]:
        """n replies to one prompt, one after the other, with the number of each; one prefill."""
        prefixes = self.prefixes
        if n > 1 and not prefixes.budget_bytes:
            prefixes = PrefixCache(BUDGET_BYTES)  # for this prompt alone
        for choice in range(n):
            with closing(self.events(replace(request, choice=choice), scope, prefixes)) as events:
                for event in events:
                    yield choice, event

    def sampling(self, given: Mapping[str, Any]) -> Sampling:
        """The model's own generation_config with the fields of Sampling that were given."""
        own = self.pair.generation_defaults
        suppress = (*own.suppress_ids, *given.get("suppress_ids", ()))
        return replace(own, **{**given, "suppress_ids": suppress})

    def keep_prefixes(self, is_wanted: bool) -> None:
        """Whether conversations are kept from now on; those that were are forgotten if not."""
        if not is_wanted:
            self.prefixes.clear()
        self.prefixes.budget_bytes = BUDGET_BYTES if is_wanted else 0

    @property
    def status(self) -> Status:
        """What was measured of its draft. Any thread."""
        return self.decider.status

    def close(self) -> None:
        """End its log and forget its conversations; its arrays go with the last reference."""
        self.prefixes.clear()
        self.decider.close()

    def facts(self) -> dict[str, Any]:
        """What is loaded, and what its prefix cache did. Plain values."""
        pair, prefixes = self.pair, self.prefixes
        return {
            "model": pair.name,
            "model_type": pair.model_type,
            "path": str(pair.path),
            "dtype": pair.dtype,
            "quantization": pair.quantization,
            "vocab_size": pair.target.vocab_size,
            "context_limit": pair.target.context_limit,
            "target_bytes": pair.target_bytes,
            "kv_bytes_per_token": pair.kv_bytes_per_token,
            "draft": pair.draft_name,
            "draft_kind": pair.draft_kind,
            "draft_bytes": pair.draft_bytes,
            "draft_problem": pair.draft_problem,
            "kv_prefix_cache": {
                "requests": prefixes.n_requests,
                "hits": prefixes.n_hits,
                "saved_tokens": prefixes.n_tokens,
                "bytes": prefixes.nbytes,
            },
        }


def settle() -> None:
    """Leave what is loaded out of every later collection.

    With a model there are some 320,000 objects. Walking them takes 0.15 s, and no thread runs then.
    """
    gc.collect()
    gc.freeze()


def collect() -> None:
    """Free what networks that were let go of still hold of each other."""
    gc.unfreeze()
    gc.collect()


def _ignore(_: object) -> None: ...
