"""An oracle drafter: any acceptance at will, on real timings.

The reply is decoded plainly first, so that it is known; the oracle then proposes along it, each id
right with the probability asked for. `random_target` is a target to go with it whose steps are
bound by reading weights, as a real model's are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gemma4_text

from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.draft import Drafter, DraftKind, Drafts
from mlx_worker.engine.load import LoadedPair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.session import generate_events
from mlx_worker.engine.target import Target
from mlx_worker.records import GenerationRequest, Source, Text
from tests.tiny import VOCAB, gemma_args, randomised, tiny_pair

Ids = tuple[int, ...]
Acceptance = float | tuple[float, ...]  # of every drafted id, or of the i-th of a round

LAYER_MB = 60.8  # one layer of random_target in float32
EMBED_SHRINK = 0.016  # else the tied head sees little but the last id, and repeats it for ever
CONTEXT_LIMIT = 4096


class Oracle:
    """A drafter that knows the reply.

    replies     prompt → the ids that plain decoding writes after it
    acceptance  probability that an id is right; one number, or one per position in the round
    vocab_size  wrong ids are below it too
    seed        of the draws, which also depend on the prompt: the same reply meets the same ones
    charged     a drafter whose steps are run for their time and thrown away

    A wrong id is the right one plus 1, modulo vocab_size. Raises AssertionError for a prompt that
    it doesn't know and for a reply that departs from the known one.
    """

    kind: DraftKind = "model"

    def __init__(
        self,
        replies: dict[Ids, Ids],
        acceptance: Acceptance,
        vocab_size: int,
        seed: int = 0,
        charged: Drafter | None = None,
    ) -> None:
        self._replies = replies
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._seed = seed
        self._charged = charged
        self._n_heard = self._n_proposed = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        prompt = tuple(prompt_ids)
        assert prompt in self._replies, f"no known reply to these {len(prompt)} prompt ids"
        self._reply = self._replies[prompt]
        self._draws = np.random.default_rng([self._seed, *prompt])
        self._n_heard = self._n_proposed = 0
        if self._charged is not None:
            self._charged.begin(prompt_ids)

    def propose(
        self,
        depth: int,
        cursor: Cursor,
        *,
        with_laws: bool = False,
        forced: Sequence[int] = (),
    ) -> Drafts:
        """The next `depth` ids of the known reply, or as many as it has, some of them wrong."""
        assert not forced, "its replies are under no grammar"
        assert depth >= 1, "a round that drafts nothing asks no drafter"
        assert not with_laws, "the reply under the standard rule is not known beforehand"
        assert cursor.position == self._n_heard, f"asked at {cursor.position}, at {self._n_heard}"
        is_right = self._draws.random(depth) < self._chances(depth)
        known = self._reply[cursor.position : cursor.position + depth]
        self._n_proposed = len(known)
        if not known:
            return Drafts(None)
        ids = [id if right else self.wrong(id) for id, right in zip(known, is_right, strict=False)]
        return Drafts(mx.array(ids, mx.int32) + self._work(depth, cursor))

    def commit(self, ids: Sequence[int], n_accepted: int) -> None:
        assert 0 <= n_accepted <= min(self._n_proposed, len(ids)), (n_accepted, self._n_proposed)
        known = self._reply[self._n_heard : self._n_heard + len(ids)]
        assert tuple(ids[: len(known)]) == known, "the reply departs from the known one"
        self._n_heard += len(ids)
        self._n_proposed = 0
        if self._charged is not None:
            self._charged.commit(ids, n_accepted)

    @property
    def nbytes(self) -> int:
        return 0 if self._charged is None else self._charged.nbytes

    def wrong(self, id: int) -> int:
        """Another id than this one."""
        return (id + 1) % self._vocab_size

    def _chances(self, depth: int) -> float | np.ndarray:
        if not isinstance(self._acceptance, tuple):
            return self._acceptance
        n_positions = len(self._acceptance)
        assert depth <= n_positions, f"depth {depth}, acceptance given for {n_positions} positions"
        return np.array(self._acceptance[:depth])

    def _work(self, depth: int, cursor: Cursor) -> mx.array:
        """A zero (), int32, that takes the charged drafter's steps to compute."""
        ids = None if self._charged is None else self._charged.propose(depth, cursor).ids
        return mx.array(0) if ids is None else mx.sum(ids).astype(mx.int32) * 0


@dataclass(frozen=True)
class OraclePair(LoadedPair):
    """A pair whose drafter is an Oracle; made by oracle_pair. Fields beyond LoadedPair's: Oracle's.

    charge  run the steps of the pair's own draft in every round, for their time
    """

    replies: dict[Ids, Ids] = field(default_factory=dict)
    acceptance: Acceptance = 1.0
    seed: int = 0
    charge: bool = False

    def __post_init__(self) -> None:
        each = self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)
        assert each, "acceptance of no position"
        assert all(0 <= chance <= 1 for chance in each), f"acceptance {self.acceptance}, not 0..1"
        assert self.draft_kind or not self.charge, f"{self.name} has no draft to charge for"

    def drafter(
        self,
        timelines: Timelines,
        sampler: Sampler,
        own: Callable[[Timelines], Timelines] = lambda empty: empty,
    ) -> Drafter:
        assert not timelines.unrewindable, f"a {timelines.unrewindable} can't be drafted for"
        charged = super().drafter(timelines, sampler, own) if self.charge else None
        return Oracle(self.replies, self.acceptance, self.target.vocab_size, self.seed, charged)

    def with_draft(self, draft: str | Source | None) -> LoadedPair:
        """The target with a real draft, or none: no oracle any more."""
        facts = {one.name: getattr(self, one.name) for one in fields(LoadedPair)}
        return LoadedPair(**facts).with_draft(draft)


def oracle_pair(
    loaded: LoadedPair,
    requests: Sequence[GenerationRequest],
    acceptance: Acceptance,
    *,
    seed: int = 0,
    charge: bool = False,
) -> OraclePair:
    """Decode the requests plainly; return the pair with an oracle that knows their replies.

    acceptance  of every drafted id, or one for each position in the round
    seed        of the draws that make ids right or wrong
    charge      run the steps of the pair's own draft in every round and throw them away

    `dataclasses.replace` gives the same oracle another acceptance or seed without decoding again.
    Raises AssertionError for requests that it could not know: two with the same prompt, sampled
    ones without a seed, or sampled ones under the standard rule.
    """
    replies: dict[Ids, Ids] = {}
    for request in requests:
        assert request.prompt_ids not in replies, "two requests with the same prompt"
        replies[request.prompt_ids] = _plain_reply(loaded, request)
    facts = {one.name: getattr(loaded, one.name) for one in fields(LoadedPair)}
    if not charge:
        facts |= {"draft_kind": "model", "draft_name": "oracle", "draft_network": None}
    return OraclePair(**facts, replies=replies, acceptance=acceptance, seed=seed, charge=charge)


def _plain_reply(loaded: LoadedPair, request: GenerationRequest) -> Ids:
    if request.sampling.temperature > 0:
        assert request.sampling.seed is not None, "a random seed: the reply will be another"
        assert request.acceptance == "coupled", "sampled under the standard rule: another reply"
    events = generate_events(loaded, replace(request, speculation="off"))
    return tuple(id for event in events if isinstance(event, Text) for id in event.ids)


def random_target(megabytes: float = 300, seed: int = 0, **changes: Any) -> LoadedPair:
    """A Gemma 4 text target of random float32 weights, with the tiny tokenizer and no draft.

    megabytes  of weights, rounded to whole layers of LAYER_MB, at least one; every fifth layer and
               the last attend to everything
    changes    other fields of LoadedPair
    """
    n_layers = max(1, round(megabytes / LAYER_MB))
    kinds = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(n_layers)]
    args = gemma_args(
        "own",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=n_layers,
        layer_types=[*kinds[:-1], "full_attention"],
        num_attention_heads=8,
        head_dim=128,
        global_head_dim=128,
        sliding_window=512,
        max_position_embeddings=CONTEXT_LIMIT,
    )
    model: Any = randomised(gemma4_text.Model(args), seed)
    embedding = model.model.embed_tokens
    embedding.weight = EMBED_SHRINK * embedding.weight
    mx.eval(embedding.weight)
    target = Target(model, VOCAB, CONTEXT_LIMIT)
    return tiny_pair("own", name="random", target=target, **changes)
