"""Target, draft and tokenizer from disk, checked against each other.

Owns what "a loaded pair" is. Leaves the files themselves to checkpoint.py and the networks to
mlx-lm and assistant.py. Must run on the thread that will generate: MLX streams belong to threads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.engine.arrays import module_arrays
from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.checkpoint import (
    ASSISTANT_TYPES,
    DEMO_FOLDER,
    REPAIR_HINT,
    Checkpoint,
    find,
)
from mlx_worker.engine.draft import (
    AssistantDrafter,
    Drafter,
    DraftKind,
    LookupDrafter,
    ModelDrafter,
    Position,
)
from mlx_worker.engine.pairing import check_vocabulary, load_assistant
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.target import Target
from mlx_worker.engine.weights import build_error, read_tokenizer, settle
from mlx_worker.errors import CheckpointError, ModelNotFound, PairMismatch, UnsupportedModel
from mlx_worker.records import Sampling

DEFAULT_CONTEXT_TOKENS = 8192  # where a config names no limit


@dataclass(frozen=True)
class LoadedPair:
    """A target in memory, its tokenizer, and the draft that goes with it, if any.

    draft_problem says why there is no draft although one was looked for.
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

    def drafter(self, timelines: Timelines, sampler: Sampler) -> Drafter | None:
        """A fresh drafter for one reply; None where this pair has no draft."""
        if timelines.unrewindable:
            return None
        if isinstance(self.draft_network, Assistant):
            network = self.draft_network
            return AssistantDrafter(network, self.target, timelines, sampler, self.position)
        if isinstance(self.draft_network, Target):
            return ModelDrafter(self.draft_network, sampler)
        return LookupDrafter(self.target.vocab_size) if self.draft_kind == "lookup" else None

    def with_draft(self, draft: str | None) -> "LoadedPair":
        """The same target with another draft: auto, none, lookup, a folder or a hub id.

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

        Text inside a message that looks like a control token stays text.
        """
        options.setdefault("enable_thinking", False)
        mark = _unused_mark(messages)
        messages = [_defused(message, self._control_tokens(), mark) for message in messages]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        pieces = [
            self.tokenizer.encode(part, add_special_tokens=False) for part in text.split(mark)
        ]
        return tuple(id for piece in pieces for id in piece)

    def _control_tokens(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if len(token.content) > 1]


def load_pair(
    model: str, draft: str | None = "auto", *, position: Position = "last_cached"
) -> LoadedPair:
    """Load a target and its draft into memory, on this thread.

    model     a folder, a hub id, or "demo" for the pair that comes with the package
    draft     auto: the matching one where there is one; none; lookup; a folder or hub id
    position  where an assistant's query stands

    Raises ModelError (a subclass names what is wrong and where).
    """
    checkpoint = Checkpoint(find(model))
    if checkpoint.model_type in ASSISTANT_TYPES:
        raise UnsupportedModel(
            f"{checkpoint.path} is a draft ({checkpoint.model_type}), not a model",
            hint="give its target as the model and this folder as --draft",
        )
    target = _load_target(checkpoint)
    tokenizer = read_tokenizer(checkpoint)
    bare = LoadedPair(
        name=_name(model, checkpoint.path),
        path=checkpoint.path,
        model_type=checkpoint.model_type,
        target=target,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(checkpoint, tokenizer),
        generation_defaults=_generation_defaults(checkpoint),
        dtype=_dtype_name(target.model),
        quantization=_quantization(checkpoint.config),
        position=position,
    )
    return bare.with_draft(draft)


def _name(model: str, path: Path) -> str:
    if path.is_relative_to(DEMO_FOLDER):
        return "demo"
    return model if not Path(model).expanduser().is_dir() else path.name


def _load_target(checkpoint: Checkpoint) -> Target:
    checkpoint.weight_files()
    try:
        model, config = mlx_lm_utils.load_model(
            checkpoint.path, lazy=True, model_config=checkpoint.config
        )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise build_error(checkpoint, error) from error
    settle(model)
    text = config.get("text_config") or config
    vocab_size = text.get("vocab_size") or config.get("vocab_size")
    limit = text.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS
    if not vocab_size:
        raise CheckpointError(checkpoint.path / "config.json", "names no vocab_size", REPAIR_HINT)
    return Target(model, vocab_size, limit)


def _eos_ids(checkpoint: Checkpoint, tokenizer: TokenizerWrapper) -> frozenset[int]:
    found: set[int] = set()
    sources = (checkpoint.generation_config, checkpoint.config, checkpoint.text_config)
    for value in [source.get("eos_token_id") for source in sources] + [tokenizer.eos_token_id]:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _generation_defaults(checkpoint: Checkpoint) -> Sampling:
    """What generation_config.json recommends; greedy where it says nothing."""
    found = checkpoint.generation_config
    suppress = tuple(found.get("suppress_tokens") or ())
    if not found.get("do_sample", "temperature" in found):
        return Sampling(suppress_ids=suppress)
    return Sampling(
        suppress_ids=suppress,
        temperature=found.get("temperature") or 1.0,
        top_k=found.get("top_k") or 0,
        top_p=found.get("top_p") or 1.0,
        min_p=found.get("min_p") or 0.0,
        repetition_penalty=found.get("repetition_penalty") or 1.0,
    )


def _dtype_name(model: nn.Module) -> str:
    """The dtype most floating weights have."""
    counts: dict[str, int] = {}
    for array in module_arrays(model).values():
        name = str(array.dtype).removeprefix("mlx.core.")
        counts[name] = counts.get(name, 0) + array.nbytes
    floats = {name: n for name, n in counts.items() if "float" in name}
    return max(floats or counts, key=lambda name: counts[name])


def _quantization(config: Mapping[str, Any]) -> str | None:
    found = config.get("quantization")
    return f"{found['bits']}-bit, groups of {found['group_size']}" if found else None


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
    path = _matching_draft(pair)
    if path is None:
        return pair
    try:
        return _with_named_draft(pair, str(path))
    except (PairMismatch, CheckpointError, UnsupportedModel) as error:
        return replace(pair, draft_problem=str(error))


def _matching_draft(pair: LoadedPair) -> Path | None:
    """Where the matching draft is: beside the folder, or the hub's `<id>-assistant`."""
    if pair.name == "demo":
        return DEMO_FOLDER / "assistant"
    beside = pair.path.parent / f"{pair.path.name}-assistant"
    if beside.is_dir():
        return beside
    if "/" not in pair.name:
        return None
    try:
        return find(f"{pair.name}-assistant")
    except ModelNotFound:
        return None


def _with_named_draft(pair: LoadedPair, draft: str) -> LoadedPair:
    _require_rewindable(pair)
    checkpoint = Checkpoint(find(draft))
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


def _unused_mark(messages: Sequence[Mapping[str, Any]]) -> str:
    """A character that no message contains; Unicode keeps U+FDD0–U+FDEF free for such uses."""
    text = json.dumps(list(messages), ensure_ascii=False, default=str)
    return next(chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text)


def _defused(
    message: Mapping[str, Any], control_tokens: Sequence[str], mark: str
) -> Mapping[str, Any]:
    """The message with every control token in its text cut in two by `mark`."""
    content = message.get("content")
    if message.get("role") == "assistant" or not isinstance(content, str):
        return message
    for token in control_tokens if "<" in content else ():
        content = content.replace(token, token[0] + mark + token[1:])
    return {**message, "content": content}
