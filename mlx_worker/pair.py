"""The Python door: `from mlx_worker import load`.

Owns the handful of calls that a script or a notebook makes. Everything runs on an engine thread of
its own; ids, text and numpy arrays come back, never MLX arrays.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlx_worker.engine import probe, validate
from mlx_worker.engine.draft import Position
from mlx_worker.engine.load import load_pair
from mlx_worker.engine.prefix import BUDGET_BYTES, PrefixCache
from mlx_worker.engine.thread import EngineThread
from mlx_worker.errors import InvalidParameter
from mlx_worker.loaded_model import Decider, LoadedModel, collect
from mlx_worker.models.locate import locate, locate_draft
from mlx_worker.records import (
    Acceptance,
    Done,
    Event,
    GenerationRequest,
    Sampling,
    Speculation,
    Text,
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
    context_tokens: int | None = None,
    sampling: Mapping[str, float] | None = None,
) -> "Pair":
    """Load a model and its draft.

    model     a name of the catalogue or a hub id, of a model that was pulled; a folder in Hugging
              Face format; or "demo" for the pair in the package
    draft     auto: the matching one where there is one; None or "none"; "lookup"; a name or folder
    position  where an assistant's query stands: last_cached, or newest as transformers does
    depth     the only depth that `speculation="auto"` may use; None: the one that pays
    decision_log  a folder for what `auto` measured and decided; None keeps no log
    kv_prefix_cache  keep the keys and values of replies, so that a prompt that goes on from one
              prefills only what is new; up to 1 GiB, the least recently used go first
    context_tokens  that a prompt and its reply may have; None: as many as the model was made for
    sampling  what `generate` doesn't say, in place of the model's own generation_config

    Raises ModelError, whose subclass and message say what is wrong, where, and what to do;
    InvalidParameter for a bad argument.
    Next: `close` the pair to free its memory, or use it as a context manager.
    """
    engine = EngineThread()
    try:
        wanted = None if draft is None else str(draft)
        decider = Decider(depth, None if decision_log is None else Path(decision_log))

        def make() -> LoadedModel:
            prefixes = PrefixCache(BUDGET_BYTES if kv_prefix_cache else 0)
            pair = load_pair(
                locate(str(model)),
                locate_draft(wanted),
                position=position,
                context_tokens=context_tokens,
                sampling=sampling,
            )
            return LoadedModel(pair, prefixes, decider)

        return Pair(engine, _Holder(engine, make), decider)
    except BaseException:
        engine.close()
        raise


class _Holder:
    """Keeps the loaded model reachable from the engine thread alone."""

    def __init__(self, engine: EngineThread, make: Callable[[], LoadedModel]) -> None:
        self.model: LoadedModel | None = None
        self.vocab_size = 0

        def job() -> None:
            self.model = make()
            self.vocab_size = self.model.pair.target.vocab_size

        engine.call(job)

    def get(self) -> LoadedModel:
        assert self.model is not None, "a closed engine takes no jobs"
        return self.model

    def drop(self) -> None:
        if self.model is not None:
            self.model.prefixes.clear()
        self.model = None
        collect()


class Pair:
    """A loaded target with its draft. Safe to use from any thread; one reply at a time."""

    def __init__(self, engine: EngineThread, holder: _Holder, decider: Decider) -> None:
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
        return self._engine.call(lambda: probe.logits(self._holder.get().pair, ids))

    def propose(
        self, ids: Sequence[int], depth: int, position: Position | None = None
    ) -> list[int]:
        """The draft's greedy chain after `ids` and the target's own next id.

        position  where an assistant's query stands; None: as the pair was loaded

        Returns up to `depth` ids; prompt lookup may find fewer.
        Raises RequestError where there is no draft.
        """
        return self._engine.call(
            lambda: probe.propose(self._holder.get().pair, ids, depth, position)
        )

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
            model = self._holder.get()
            pair, ids = model.pair, request.prompt_ids
            if isinstance(items[0], Mapping):
                messages = cast(Sequence[Mapping[str, Any]], items)
                ids = pair.encode_chat(messages, enable_thinking=enable_thinking)
            sampling = model.sampling(given)
            return model.events(replace(request, prompt_ids=ids, sampling=sampling))

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
        facts = self._engine.call(lambda: self._holder.get().facts())
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
