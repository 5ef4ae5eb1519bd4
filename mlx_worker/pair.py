"""The Python door: `from mlx_worker import load`.

Owns the handful of calls that a script or a notebook makes. Everything runs on an engine thread of
its own; ids, text and numpy arrays come back, never MLX arrays.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlx_worker.control.controller import Controller
from mlx_worker.control.status import WHY_AUTOMATIC
from mlx_worker.decisions import DecisionLog
from mlx_worker.engine import probe, validate
from mlx_worker.engine.costs import cost_curve
from mlx_worker.engine.draft import Position
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.prefix import BUDGET_BYTES, PrefixCache
from mlx_worker.engine.session import generate_events
from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import InvalidParameter
from mlx_worker.records import (
    MAX_DEPTH,
    Acceptance,
    Done,
    Event,
    GenerationRequest,
    Pacer,
    Sampling,
    Speculation,
    Status,
    Text,
    Traffic,
    effective_status,
)

DEFAULT_MAX_TOKENS = 512
_LISTS = {
    "prompt": "a list of messages or of token ids",
    "stop": "a text or a list of texts",
    "suppress_tokens": "a list of token ids",
}


def load(
    model: str = "demo",
    draft: str | None = "auto",
    *,
    position: Position = "last_cached",
    depth: int | None = None,
    decision_log: Path | str | None = None,
    kv_prefix_cache: bool = True,
) -> "Pair":
    """Load a model and its draft.

    model     a folder in Hugging Face format, a hub id, or "demo" for the pair in the package
    draft     auto: the matching one where there is one; None or "none"; "lookup"; a folder or id
    position  where an assistant's query stands: last_cached, or newest as transformers does
    depth     the only depth that `speculation="auto"` may use; None: the one that pays
    decision_log  a folder for what `auto` measured and decided; None keeps no log
    kv_prefix_cache  keep the keys and values of replies, so that a prompt that goes on from one
              prefills only what is new; up to 1 GiB, the least recently used go first

    Raises ModelError, whose subclass and message say what is wrong, where, and what to do;
    InvalidParameter for a bad argument.
    Next: `close` the pair to free its memory, or use it as a context manager.
    """
    engine = EngineThread()
    try:
        wanted = None if draft is None else str(draft)
        decider = _Decider(depth, None if decision_log is None else Path(decision_log))
        prefixes = PrefixCache(BUDGET_BYTES if kv_prefix_cache else 0)
        return Pair(engine, _Holder(engine, str(model), wanted, position, prefixes), decider)
    except BaseException:
        engine.close()
        raise


class _Holder:
    """Keeps the loaded pair and its prefix cache reachable from the engine thread alone."""

    def __init__(
        self,
        engine: EngineThread,
        model: str,
        draft: str | None,
        position: Position,
        prefixes: PrefixCache,
    ) -> None:
        self.pair: LoadedPair | None = None
        self.prefixes = prefixes
        self.vocab_size = 0

        def job() -> None:
            self.pair = load_pair(model, draft, position=position)
            self.vocab_size = self.pair.target.vocab_size

        engine.call(job)

    def get(self) -> LoadedPair:
        assert self.pair is not None, "a closed engine takes no jobs"
        return self.pair

    def drop(self) -> None:
        self.pair = None
        self.prefixes.clear()
        gc.collect()  # what a network's modules hold of each other is freed here too


class _Decider:
    """The controller of a pair, made when `auto` is first asked for, and its log."""

    def __init__(self, depth: int | None, folder: Path | None) -> None:
        if depth is not None and not 1 <= depth <= MAX_DEPTH:
            raise InvalidParameter("depth", depth, f"1 to {MAX_DEPTH}, or None")
        self._depths = range(1, MAX_DEPTH + 1) if depth is None else [depth]
        self._folder = folder
        self._log: DecisionLog | None = None
        self.controller: Controller | None = None

    def pacer(self, pair: LoadedPair, request: GenerationRequest) -> Pacer | None:
        """Who paces this request; None where nothing is to be decided. Engine thread."""
        if request.speculation != "auto" or pair.draft_kind is None:
            return None
        controller = self.controller or self._made(pair)
        traffic = Traffic(len(request.prompt_ids), request.sampling.temperature)
        return controller.await_request(traffic, time.time())

    def flush(self) -> None:
        """Write the log. Not on the engine thread."""
        if self._log:
            self._log.flush()

    def close(self) -> None:
        if self._log:
            self._log.close()

    @property
    def status(self) -> Status:
        return self.controller.status if self.controller else Status("automatic", why=WHY_AUTOMATIC)

    def _made(self, pair: LoadedPair) -> Controller:
        if self._folder is not None:
            self._log = DecisionLog(self._folder, {"model": pair.name, "draft": pair.draft_name})
        hear = self._log.hear if self._log else _ignore
        self.controller = Controller(curve=cost_curve(pair), depths=self._depths, on_concluded=hear)
        if self._log:
            self._log.attach(self.controller)
        return self.controller


def _ignore(_: object) -> None: ...


class Pair:
    """A loaded target with its draft. Safe to use from any thread; one reply at a time."""

    def __init__(self, engine: EngineThread, holder: _Holder, decider: _Decider) -> None:
        self._engine = engine
        self._holder = holder
        self._decider = decider
        self._last: Done | None = None

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory and end the engine thread; a reply in progress fails. Safe to repeat."""
        self._engine.close(self._holder.drop)
        self._decider.close()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """One full pass without a cache. ids: L of them → (L, vocab_size) float32."""
        return self._engine.call(lambda: probe.logits(self._holder.get(), ids))

    def propose(
        self, ids: Sequence[int], depth: int, position: Position | None = None
    ) -> list[int]:
        """The draft's greedy chain after `ids` and the target's own next id.

        position  where an assistant's query stands; None: as the pair was loaded

        Returns up to `depth` ids; prompt lookup may find fewer.
        Raises RequestError where there is no draft.
        """
        return self._engine.call(lambda: probe.propose(self._holder.get(), ids, depth, position))

    def generate(
        self,
        prompt: Sequence[Mapping[str, Any]] | Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        speculation: Speculation = "auto",
        depth: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        suppress_tokens: Sequence[int] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        ignore_eos: bool = False,
        acceptance: Acceptance = "coupled",
        enable_thinking: bool = False,
    ) -> Generator[Text | Done, None, None]:
        """Write a reply: Text pieces, then one Done, which has no text.

        prompt       messages ({"role", "content"}), or token ids, which skip the chat template
        speculation  on: draft in every round; off: never; auto: compare the two inside the first
                     requests, and draft once that is shown to be faster here. The first such
                     request also times the draft's costs, for a second or two
        depth        drafted ids a round with `on`; None: the default
        logprobs     None, or how many rivals to report beside each chosen id (0: none)

        Sampling left at None is the model's own generation_config, else greedy.
        Raises RequestError for a value it can't take, GenerationFailed if the model breaks.
        Closing the iterator cancels.
        """
        given: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias,
            "suppress_ids": _tuple("suppress_tokens", suppress_tokens),
        }
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"seed": seed, "logprobs": logprobs}
        items = _prompt_items(prompt)
        request = GenerationRequest(
            prompt_ids=cast(tuple[int, ...], items if validate.is_whole(items[0]) else (0,)),
            max_tokens=max_tokens,
            sampling=Sampling(**given),
            stop=(stop,) if isinstance(stop, str) else _tuple("stop", stop) or (),
            ignore_eos=ignore_eos,
            speculation=speculation,
            depth=depth,
            acceptance=acceptance,
        )
        validate.validate(request, self._holder.vocab_size)

        def make() -> Iterator[Event]:
            pair = self._holder.get()
            ids = request.prompt_ids
            if isinstance(items[0], Mapping):
                messages = cast(Sequence[Mapping[str, Any]], items)
                ids = pair.encode_chat(messages, enable_thinking=enable_thinking)
            sampling = _sampling(pair, given)
            whole = replace(request, prompt_ids=ids, sampling=sampling)
            pacer = self._decider.pacer(pair, whole)
            return generate_events(pair, whole, pacer, self._holder.prefixes)

        return self._events(make)

    def _events(self, make: Callable[[], Iterator[Event]]) -> Generator[Text | Done, None, None]:
        try:
            for event in self._engine.stream(make):
                if isinstance(event, Done):
                    self._last = event
                if isinstance(event, Text | Done):
                    yield event
        finally:
            self._decider.flush()

    def status(self) -> dict[str, Any]:
        """What is loaded, and what the last reply measured. Plain values."""
        facts = self._engine.call(lambda: _facts(self._holder.get(), self._holder.prefixes))
        measured = self._decider.status
        shown = effective_status(measured, has_draft=facts["draft_kind"] is not None)
        facts["speculation"] = shown.text
        facts["measured"] = asdict(shown)
        timing = self._last.timing if self._last else None
        facts["last_reply"] = timing and {
            "tokens_per_second": timing.tokens_per_s,
            "draft_acceptance_rate": timing.acceptance,
            "tokens_per_round": timing.tokens_per_round,
            "drafted": timing.drafted,
            "accepted": timing.accepted,
        }
        return facts


def _facts(pair: LoadedPair, prefixes: PrefixCache) -> dict[str, Any]:
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


def _tuple(name: str, value: object) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidParameter(name, value, _LISTS[name])
    return tuple(value)


def _prompt_items(prompt: object) -> tuple[Mapping[str, Any] | int, ...]:
    """The prompt's messages, or its ids as plain ints. Raises InvalidParameter for what is none."""
    items = _tuple("prompt", prompt)
    if items is None:
        raise InvalidParameter("prompt", None, _LISTS["prompt"])
    if not items:
        raise InvalidParameter("prompt", prompt, "at least one message or token id")
    if all(isinstance(item, Mapping) for item in items):
        return items
    if all(validate.is_whole(item) for item in items):
        return tuple(int(item) for item in items)
    raise InvalidParameter("prompt", prompt, "all messages or all token ids")


def _sampling(pair: LoadedPair, given: Mapping[str, Any]) -> Sampling:
    defaults = pair.generation_defaults
    suppress = (*defaults.suppress_ids, *given.get("suppress_ids", ()))
    return replace(defaults, **{**given, "suppress_ids": suppress})
