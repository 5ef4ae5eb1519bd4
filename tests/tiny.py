"""Real tiny models for the tests: a few layers, a few hundred ids, fixed seeds, built in memory.

Each is mlx-lm's own network with random weights, scaled so that its greedy text wanders instead of
repeating one id. The tokenizer is a real byte-level one: an id for every byte, no merges.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import gemma4_text, llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.draft import Drafter, DraftKind, Drafts
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.session import Session
from mlx_worker.engine.target import Target
from mlx_worker.records import Done, GenerationRequest, Pacer, Plan, Round, Sampling, Text

VOCAB = 272
WINDOW = 8
EOS = 1

SHAPES: dict[str, dict[str, Any]] = {
    # sliding and full layers, KV-shared layers, per-layer embeddings, double-wide MLP: as E2B
    "shared": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "use_double_wide_mlp": True,
    },
    # own K/V everywhere, keys that are values in the full layers: as 31B
    "own": {
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}


def gemma_args(shape: str, **changes: Any) -> gemma4_text.ModelArgs:
    """The arguments of a tiny Gemma 4 text model."""
    common = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": WINDOW,
        "max_position_embeddings": 4096,
    }
    return gemma4_text.ModelArgs(**{**common, **SHAPES[shape], **changes})


@cache
def tiny_target(shape: str = "shared", seed: int = 0) -> Target:
    """A tiny target: "shared" or "own" (Gemma 4), or "llama" (another family, full layers only)."""
    if shape == "llama":
        args = llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
        )
        model: nn.Module = llama.Model(args)
    else:
        model = gemma4_text.Model(gemma_args(shape))
    return Target(randomised(model, seed), VOCAB, 4096)


@cache
def tiny_assistant(shape: str = "shared", seed: int = 7, centroids: bool = False) -> Assistant:
    """A tiny assistant for `tiny_target(shape)`, random: its drafts are mostly wrong."""
    args = gemma_args(
        shape,
        hidden_size=16,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        use_double_wide_mlp=False,
    )
    network = Assistant(args, 32, 16 if centroids else 0, 4 if centroids else 0)
    randomised(network, seed)
    if centroids:
        network.masked_embedding.token_ordering = mx.random.permutation(
            VOCAB, key=mx.random.key(seed)
        )
    evaluate(network)
    return network


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Weights drawn anew, large enough that the next id depends on the context."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))

    def draw(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        if array.ndim == 1:
            return 1.0 + 0.1 * mx.random.normal(array.shape, key=next(keys))
        scale = 0.3 if "embed" in path else 1.2 * array.shape[-1] ** -0.5
        return scale * mx.random.normal(array.shape, key=next(keys))

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    evaluate(model)
    return model


def evaluate(model: nn.Module) -> None:
    """All that it holds, what is no parameter of it included: any thread may use it afterwards.

    Another thread can't compute what was only queued on this one.
    """
    mx.eval([array for part in model.modules() for _, array in tree_flatten(dict(part.items()))])


def byte_core(vocab_size: int = VOCAB) -> Tokenizer:
    """An id for every byte, no merges; the first three are free for control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<eos>", "<bos>", *alphabet]
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


@cache
def tiny_tokenizer(vocab_size: int = VOCAB) -> TokenizerWrapper:
    """Three control tokens, the bytes as ids 3…258 in the alphabet's order, then unused ids."""
    core = byte_core(vocab_size)
    core.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    return TokenizerWrapper(fast)


def tiny_pair(shape: str = "shared", draft: str | None = None, **changes: Any) -> LoadedPair:
    """A pair in memory. draft: None, lookup, assistant, centroids, same_weights, other_seed."""
    networks = {
        "assistant": lambda: tiny_assistant(shape),
        "centroids": lambda: tiny_assistant(shape, centroids=True),
        "same_weights": lambda: tiny_target(shape, 0),
        "other_seed": lambda: tiny_target(shape, 5),
    }
    kinds = {"assistant": "assistant", "centroids": "assistant", "lookup": "lookup", None: None}
    facts: dict[str, Any] = {
        "name": "tiny",
        "path": Path("tiny"),
        "model_type": "gemma4_text",
        "target": tiny_target(shape),
        "tokenizer": tiny_tokenizer(),
        "eos_ids": frozenset({EOS}),
        "generation_defaults": Sampling(),
        "dtype": "float32",
        "quantization": None,
        "draft_kind": kinds.get(draft, "model"),
        "draft_name": draft,
        "draft_network": networks[draft]() if draft in networks else None,
    }
    return LoadedPair(**{**facts, **changes})


class Guess:
    """A drafter that knows the reply and proposes each id of it, or a wrong one, as told.

    reply  the ids that plain decoding gives
    right  called with the index of an id in the reply; False proposes another id there
    """

    kind: DraftKind = "model"
    nbytes = 0

    def __init__(self, reply: Sequence[int], right: Any) -> None:
        self._reply = list(reply)
        self._right = right
        self._n_known = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._n_known = 0

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        assert 1 <= depth, "a round that drafts nothing asks no drafter"
        assert len(forced) < depth, "nothing is left to propose"
        first = cursor.position + len(forced)
        span = range(first, min(cursor.position + depth, len(self._reply)))
        own = [self._reply[i] if self._right(i) else (self._reply[i] + 1) % VOCAB for i in span]
        ids = [*forced, *own]
        return Drafts(mx.array(ids) if ids else None)

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        assert 0 <= n_accepted <= len(ids)
        self._n_known += len(ids)


class Script:
    """A pacer that plays a list of plans, then repeats the last."""

    def __init__(self, plans: Sequence[tuple[int, int]]) -> None:
        self._plans = [Plan(depth, tokens) for depth, tokens in plans]
        self.heard: list[Round] = []
        self.n_ends = 0

    def plan(self) -> Plan:
        return self._plans.pop(0) if len(self._plans) > 1 else self._plans[0]

    def observe(self, round: Round) -> None:
        assert not self.n_ends, "a reply is over"
        self.heard.append(round)

    def end(self) -> None:
        self.n_ends += 1


class Written:
    """A whole reply: its ids, text, logprobs and Done."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.events = list(session.events())
        texts = [event for event in self.events if isinstance(event, Text)]
        self.ids = [id for event in texts for id in event.ids]
        self.text = "".join(event.text for event in texts)
        self.logprobs = [entry for event in texts for entry in event.logprobs or ()]
        done = self.events[-1]
        assert isinstance(done, Done)
        self.done = done


def write(
    pair: LoadedPair,
    prompt: Sequence[int],
    max_tokens: int = 32,
    *,
    pacer: Pacer | None = None,
    drafter: Drafter | None = None,
    chunk_tokens: int = 512,
    **request: Any,
) -> Written:
    """Run one session to its end. Other keywords are GenerationRequest's."""
    whole = GenerationRequest(tuple(prompt), max_tokens, **request)
    session = Session(pair, whole, pacer, chunk_tokens=chunk_tokens)
    if drafter is not None:
        session.drafter = drafter
    return Written(session)


def cached_now(target: Target, ids: Sequence[int], timelines: Timelines) -> mx.array:
    """Logits (L, V) of ids appended to the timelines, which keep them."""
    hidden = target.hidden(mx.array([list(ids)]), timelines.layers)[0]
    timelines.commit(ids)
    return target.head(hidden)
