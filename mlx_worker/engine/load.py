"""Target, draft and tokenizer from disk, checked against each other.

Owns what "a loaded pair" is. Leaves the files themselves to checkpoint.py and the networks to
mlx-lm and assistant.py. Must run on the thread that will generate: MLX streams belong to threads.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.engine.arrays import module_arrays
from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.chat import ChatEncoder
from mlx_worker.engine.checkpoint import (
    ASSISTANT_TYPES,
    DEMO_FOLDER,
    Checkpoint,
    bad_value,
    folder_of,
)
from mlx_worker.engine.constraint import Constraint
from mlx_worker.engine.draft import (
    AssistantDrafter,
    Drafter,
    DraftKind,
    LookupDrafter,
    ModelDrafter,
    Position,
)
from mlx_worker.engine.grammar import GrammarTables
from mlx_worker.engine.markers import Markers, markers_of, opening, text_protocol
from mlx_worker.engine.pairing import check_vocabulary, load_assistant
from mlx_worker.engine.room import Room
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.target import Target
from mlx_worker.engine.text import TokenBytes
from mlx_worker.engine.validate import check_sampling, check_word, is_whole
from mlx_worker.engine.weights import build_error, no_network, read_tokenizer, settle
from mlx_worker.errors import (
    InvalidParameter,
    ModelError,
    UnsupportedModel,
)
from mlx_worker.records import GenerationRequest, Sampling, Source, TextProtocol

DEFAULT_CONTEXT_TOKENS = 8192  # where a config names no limit
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class LoadedPair:
    """A target in memory, its tokenizer, and the draft that goes with it, if any.

    source         where it came from, if it was not a folder or the demo pair
    draft_problem  why there is no draft although one was looked for
    """

    name: str
    path: Path
    model_type: str
    target: Target
    tokenizer: TokenizerWrapper
    eos_ids: frozenset[int]
    generation_defaults: Sampling
    dtype: str
    quantization: str | None
    draft_kind: DraftKind | None = None
    draft_name: str | None = None
    draft_problem: str | None = None
    draft_network: Assistant | Target | None = None
    position: Position = "last_cached"
    source: Source | None = None

    @property
    def target_bytes(self) -> int:
        return self.target.nbytes

    @property
    def draft_bytes(self) -> int:
        network = self.draft_network
        return 0 if network is None else network.nbytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.target.kv_bytes_per_token

    def drafter(
        self,
        timelines: Timelines,
        sampler: Sampler,
        own: Callable[[Timelines], Timelines] = lambda empty: empty,
    ) -> Drafter | None:
        """A fresh drafter for one reply; None where this pair has no draft.

        own  empty caches of a draft that has some of its own → those to use in their place
        """
        if timelines.unrewindable:
            return None
        if isinstance(self.draft_network, Assistant):
            network = self.draft_network
            return AssistantDrafter(network, self.target, timelines, sampler, self.position)
        if isinstance(self.draft_network, Target):
            network = self.draft_network
            return ModelDrafter(network, sampler, own(Timelines(network.model)))
        return LookupDrafter(self.target.vocab_size) if self.draft_kind == "lookup" else None

    def with_draft(self, draft: str | Source | None) -> "LoadedPair":
        """The same target with another draft: auto, none, lookup, a folder or a source.

        Raises ModelError for a draft that is named but can't be used.
        """
        bare = replace(
            self, draft_kind=None, draft_name=None, draft_problem=None, draft_network=None
        )
        if draft in (None, "none"):
            return bare
        if draft == "lookup":
            return _with_lookup(bare)
        if draft == "auto":
            return _with_matching_draft(bare)
        return _with_named_draft(bare, draft)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        """Messages → prompt ids through the model's own chat template, reply turn opened.

        Text inside a message that looks like a control token stays text. Raises RequestError where
        the template refuses the messages, or there is none; ContextTooLong where they can't fit.
        """
        return self._chat_encoder.encode(messages, **options)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Prompt ids of a raw text: no template, and control tokens in it count as such.

        Raises ContextTooLong where it can't fit.
        """
        self._room.check_text(text)
        return tuple(self.tokenizer.encode(text))

    @cached_property
    def nameless_ids(self) -> tuple[int, ...]:
        """Ids that the network has a row for and the tokenizer no token: no reply may hold one."""
        named = set(self.tokenizer.get_vocab().values())
        return tuple(id for id in range(self.target.vocab_size) if id not in named)

    @cached_property
    def protocol(self) -> TextProtocol:
        """How its replies say what is thinking and what is a tool call."""
        return text_protocol(self.tokenizer)

    @cached_property
    def markers(self) -> Markers:
        return markers_of(self.protocol, self.tokenizer)

    def opening(self, prompt_ids: Sequence[int]) -> str:
        """The text that the prompt's end leaves open: a thinking marker and what follows it."""
        return self.tokenizer.decode(list(opening(prompt_ids, self.markers)))

    def constraint(self, request: GenerationRequest) -> Constraint | None:
        """What holds a reply to the request's grammar; None where it has none.

        The first one builds the tokenizer's tables: some seconds for a large vocabulary.
        """
        if request.grammar is None:
            return None
        markers = self.markers
        return Constraint(
            self._grammar_tables,
            request.grammar,
            think_open=markers.think_open,
            think_close=markers.think_close,
            call_open=markers.call_open,
            is_thinking=bool(opening(request.prompt_ids, markers)),
            may_think=request.may_think,
        )

    @cached_property
    def _grammar_tables(self) -> GrammarTables:
        size = self.target.vocab_size
        return GrammarTables(self.tokenizer, size, self.eos_ids, self.protocol)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """id → the bytes it stands for."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self._room)

    @cached_property
    def _room(self) -> Room:
        return Room(self.tokenizer, self.target.context_limit)


def load_pair(
    model: str | Source,
    draft: str | Source | None = "auto",
    *,
    position: Position = "last_cached",
    context_tokens: int | None = None,
    sampling: Mapping[str, float] | None = None,
) -> LoadedPair:
    """Load a target and its draft into memory, on this thread.

    model           a source, a folder, or "demo" for the pair that comes with the package
    draft           auto: the one that belongs to it where there is one; none; lookup; a folder or
                    a source
    position        where an assistant's query stands
    context_tokens  that a prompt and its reply may have; None: as many as the model was made for
    sampling        fields of Sampling in place of those of its generation_config

    Raises ModelError (a subclass names what is wrong and where).
    """
    check_word("position", position, get_args(Position))
    checkpoint = Checkpoint(folder_of(model))
    if checkpoint.model_type in ASSISTANT_TYPES:
        raise UnsupportedModel(
            f"{checkpoint.path} is a draft ({checkpoint.model_type}), not a model",
            hint="give its target as the model and this folder as --draft",
        )
    name = _name(model, checkpoint.path)
    target = _load_target(checkpoint)
    if context_tokens is not None:
        target.context_limit = _within(context_tokens, target.context_limit, name)
    tokenizer = read_tokenizer(checkpoint)
    defaults = _generation_defaults(checkpoint, target.vocab_size)
    bare = LoadedPair(
        name=name,
        path=checkpoint.path,
        model_type=checkpoint.model_type,
        target=target,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(checkpoint, tokenizer),
        generation_defaults=replace(defaults, **(sampling or {})),
        dtype=_dtype_name(target.model),
        quantization=_quantization(target.model),
        position=position,
        source=model if isinstance(model, Source) else None,
    )
    return bare.with_draft(draft)


def _within(context_tokens: int, own: int, name: str) -> int:
    """The context that is wanted. Raises ModelError where the model was made for less."""
    if context_tokens > own:
        raise ModelError(
            f"{name}: context_tokens: {context_tokens:,}, the model takes {own:,}",
            hint=f"lower it, or leave it out for {own:,}",
        )
    return context_tokens


def _name(model: str | Source, path: Path) -> str:
    if isinstance(model, Source):
        return model.name
    if path.is_relative_to(DEMO_FOLDER):
        return "demo" if path.name == "target" else f"demo-{path.name}"
    return model if not Path(model).expanduser().is_dir() else path.name


def _load_target(checkpoint: Checkpoint) -> Target:
    """The network in memory, tried out on one id: a config can be wrong in ways only that shows."""
    if not checkpoint.model_type:
        raise no_network(checkpoint)
    checkpoint.weight_files()
    try:
        model, config = mlx_lm_utils.load_model(
            checkpoint.path, lazy=True, model_config=checkpoint.config
        )
        settle(model)
        text = config.get("text_config") or config
        vocab_size = text.get("vocab_size") or config.get("vocab_size") or 0
        limit = text.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS
        target = Target(model, vocab_size, limit)
        logits = target.head(target.hidden(mx.array([[0]]), Timelines(model).layers)[0])
        mx.eval(logits)
    except Exception as error:  # mlx-lm builds whatever a config says, and fails in as many ways
        raise build_error(checkpoint, error) from error
    file = checkpoint.path / "config.json"
    if type(limit) is not int or limit < 1:
        raise bad_value(file, "max_position_embeddings", limit, "a whole number of at least 1")
    if logits.shape[-1] != vocab_size:
        raise bad_value(file, "vocab_size", vocab_size, f"{logits.shape[-1]}, as built")
    return target


def _eos_ids(checkpoint: Checkpoint, tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Every id that any of the folder's files calls an end."""
    found: set[int] = set()
    sources = (checkpoint.generation_config, checkpoint.config, checkpoint.text_config)
    for value in [source.get("eos_token_id") for source in sources] + [tokenizer.eos_token_id]:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int for id in ids):
            raise bad_value(
                checkpoint.path / "config.json", "eos_token_id", value, "an id or a list of ids"
            )
        found.update(ids)
    return frozenset(found)


def _generation_defaults(checkpoint: Checkpoint, vocab_size: int) -> Sampling:
    """What generation_config.json recommends; greedy where it says nothing.

    Suppressed ids outside the vocabulary are left out: a family's file may name its image tokens.
    """
    file = checkpoint.path / "generation_config.json"
    found = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
    wanted = {key: found[key] for key in SAMPLING_KEYS if key in found}
    if not found.get("do_sample", "temperature" in found):
        wanted["temperature"] = 0.0
    wanted.setdefault("temperature", 1.0)
    suppress = found.get("suppress_tokens", [])
    if not isinstance(suppress, list) or not all(is_whole(id) for id in suppress):
        raise bad_value(file, "suppress_tokens", suppress, "a list of ids")
    defaults = Sampling(suppress_ids=tuple(id for id in suppress if id < vocab_size), **wanted)
    try:
        check_sampling(defaults, vocab_size)
    except InvalidParameter as error:
        raise bad_value(file, error.param or "", error.value, error.limit) from error
    return defaults


def _dtype_name(model: nn.Module) -> str:
    """The dtype most floating weights have."""
    counts: dict[str, int] = {}
    for array in module_arrays(model).values():
        name = str(array.dtype).removeprefix("mlx.core.")
        counts[name] = counts.get(name, 0) + array.nbytes
    floats = {name: n for name, n in counts.items() if "float" in name}
    return max(floats or counts, key=lambda name: counts[name])


def _quantization(model: nn.Module) -> str | None:
    """How most quantised weights are packed, whatever the config says; None where none is."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        bits, group_size = getattr(module, "bits", None), getattr(module, "group_size", None)
        if bits and group_size:
            n_bytes = sum(array.nbytes for array in module_arrays(module).values())
            counts[f"{bits}-bit, groups of {group_size}"] += n_bytes
    return counts.most_common(1)[0][0] if counts else None


def _with_lookup(pair: LoadedPair) -> LoadedPair:
    _require_rewindable(pair)
    return replace(pair, draft_kind="lookup", draft_name="lookup")


def _require_rewindable(pair: LoadedPair) -> None:
    odd = Timelines(pair.target.model).unrewindable
    if odd:
        raise UnsupportedModel(
            f"{pair.name} keeps its context in a {odd}, which can't take back a rejected draft",
            hint="use --draft none",
        )


def _with_matching_draft(pair: LoadedPair) -> LoadedPair:
    """The pair with the draft that belongs to its target, or with the reason why not."""
    source = pair.source
    draft = (source and source.draft) or _matching_draft(pair)
    if draft is None:
        return replace(pair, draft_problem=source and source.draft_problem)
    try:
        return _with_named_draft(pair, draft)
    except ModelError as error:
        return replace(pair, draft_problem=str(error))


def _matching_draft(pair: LoadedPair) -> str | None:
    """Where the matching draft of the demo pair or of a folder is: beside it."""
    if pair.name == "demo":
        return str(DEMO_FOLDER / "assistant")
    beside = pair.path.parent / f"{pair.path.name}-assistant"
    return str(beside) if beside.is_dir() else None


def _with_named_draft(pair: LoadedPair, draft: str | Source) -> LoadedPair:
    _require_rewindable(pair)
    checkpoint = Checkpoint(folder_of(draft))
    check_vocabulary(pair.target, pair.tokenizer, checkpoint)
    name = _name(draft, checkpoint.path)
    if checkpoint.model_type in ASSISTANT_TYPES:
        network: Assistant | Target = load_assistant(checkpoint, pair.target)
        return replace(pair, draft_kind="assistant", draft_name=name, draft_network=network)
    network = _load_target(checkpoint)
    odd = Timelines(network.model).unrewindable
    if odd:
        raise UnsupportedModel(f"{name} as a draft: its {odd} can't be rewound")
    return replace(pair, draft_kind="model", draft_name=name, draft_network=network)
