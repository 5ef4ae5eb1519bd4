"""Drafters propose what they should, and read no more than they must."""

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_worker.engine import draft as draft_module
from mlx_worker.engine.arrays import ints
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.costs import draft_step_ms
from mlx_worker.engine.draft import Drafts, LookupDrafter, ModelDrafter
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.target import Target
from mlx_worker.records import Sampling
from tests.tiny import VOCAB, Script, tiny_pair, tiny_target, write

PROMPT = [2, *range(40, 51)]
NOWHERE = Cursor(0, mx.zeros((1, 1, 32)), 1, None)  # lookup needs no cursor


# --- prompt lookup ----------------------------------------------------------------------------


def lookup(prompt: Sequence[int], *committed: Sequence[int]) -> LookupDrafter:
    drafter = LookupDrafter(VOCAB)
    drafter.begin(prompt)
    for ids in committed:
        drafter.commit(ids, 0)
    return drafter


def test_lookup_copies_what_followed_the_same_ids():
    """As many as are asked for, if there are that many."""
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    assert lookup(prompt).copy(3) == [3, 4, 5]
    assert lookup(prompt).copy(1) == [3]


def test_the_longest_match_wins():
    """Four ids of context over two, though the shorter match is more recent."""
    prompt = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert lookup(prompt).copy(1) == [50]


def test_of_equal_matches_the_latest_wins():
    """What was written last is likeliest to go on as it did."""
    prompt = [3, 4, 50, 9, 3, 4, 60, 8, 3, 4]
    assert lookup(prompt).copy(1) == [60]


def test_a_copy_that_runs_into_itself_repeats_its_period():
    """Three ids in a loop go on in the loop, however many are asked for."""
    assert lookup([7, 8, 9, 7, 8, 9, 7, 8]).copy(8) == [9, 7, 8, 9, 7, 8, 9, 7]


@pytest.mark.parametrize("prompt", [[], [5], [5, 6], [1, 2, 3, 4], [5, 1, 5, 2, 5]])
def test_without_two_ids_that_came_before_nothing_is_proposed(prompt: list[int]):
    """One id matches nearly everywhere and is nearly always wrong."""
    drafts = lookup(prompt).propose(4, NOWHERE)
    assert (drafts.ids, drafts.n) == (None, 0)


def test_committed_ids_are_matched_and_copied_too():
    """Within a reply, across pieces of any size."""
    drafter = lookup([1], [20, 21], [22], [], [23, 20, 21])
    assert drafter.copy(2) == [22, 23]


def test_the_ids_just_committed_decide():
    """The match is with the end of the reply, not of the prompt."""
    drafter = lookup([1, 2, 3, 9, 1, 2])
    assert drafter.copy(1) == [3]
    drafter.commit([8], 0)
    assert drafter.copy(1) == []


def test_a_new_reply_forgets_the_last_one():
    """One conversation's text is never proposed in another."""
    drafter = lookup([1, 2, 3, 1, 2])
    drafter.begin([1, 2])
    assert drafter.copy(1) == []


def test_ten_thousand_ids_are_indexed_and_matched_at_once():
    """The work for an id does not grow with the conversation."""
    started = time.process_time()
    drafter = lookup(range(10_000))
    for id in range(10_000):
        drafter.commit([id % 50], 0)
        drafter.copy(8)
    assert time.process_time() - started < 2.0  # 0.1 on an idle core


def test_a_lookup_is_certain_of_its_ids():
    """Under the standard rule its law is a point."""
    drafts = lookup([5, 6, 7, 8, 5, 6]).propose(2, NOWHERE, with_laws=True)
    assert drafts.ids is not None
    assert drafts.laws is not None
    assert ints(drafts.ids) == [7, 8]
    assert ints(mx.argmax(drafts.laws, axis=-1)) == [7, 8]
    assert ints(mx.sum(drafts.laws, axis=-1).astype(mx.int32)) == [1, 1]


# --- a smaller model --------------------------------------------------------------------------


class Counting(Target):
    """A target that notes how many ids each pass of it reads."""

    def __init__(self, shape: str = "own") -> None:
        inner = tiny_target(shape, 5)
        super().__init__(inner.model, inner.vocab_size, inner.context_limit)
        self.passes: list[int] = []

    def hidden(self, ids: mx.array, caches: Sequence[Any] | None) -> mx.array:
        self.passes.append(ids.shape[1])
        return super().hidden(ids, caches)


def drafting_with(model: Target, shape: str = "own") -> Any:
    return tiny_pair(shape, "other_seed", draft_network=model)


def test_a_model_drafter_reads_each_id_once():
    """After plain segments it catches up with what is new; the prompt is never read again."""
    model = Counting()
    pacer = Script([(0, 5), (3, 8), (0, 6), (2, 3), (0, 4), (4, 9)])
    reply = write(drafting_with(model), PROMPT, 40, pacer=pacer, ignore_eos=True)
    rounds = [heard for heard in pacer.heard if heard.drafted]
    assert len(rounds) > 5
    # The last draft of a chain is not read; of the others, those that were kept are not read again.
    n_rejected = sum(max(0, heard.drafted - 1 - heard.accepted) for heard in rounds)
    assert sum(model.passes) <= len(PROMPT) + len(reply.ids) + n_rejected


def test_a_reply_without_rounds_costs_a_model_drafter_nothing():
    """Its prefill waits until it is asked."""
    model = Counting()
    write(drafting_with(model), PROMPT, 12, pacer=Script([(0, 99)]), ignore_eos=True)
    assert model.passes == []


def test_a_model_drafter_reads_a_long_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """A draft must not undo what chunked prefill saves: one long pass can exhaust memory."""
    monkeypatch.setattr(draft_module, "PREFILL_CHUNK_TOKENS", 16)
    model = Counting()
    prompt = [3 + i % 200 for i in range(70)]
    drafted = write(drafting_with(model), prompt, 8, ignore_eos=True, speculation="on", depth=2)
    assert max(model.passes) == 16
    assert drafted.ids == write(tiny_pair("own"), prompt, 8, ignore_eos=True).ids


def test_a_model_without_a_separate_head_projects_few_rows(monkeypatch: pytest.MonkeyPatch):
    """Its logits of a whole chunk used to be built for the last row's sake."""
    computed: list[int] = []
    head = Counting.head

    def counted(self: Counting, hidden: mx.array) -> mx.array:
        computed.append(self.passes[-1])
        return head(self, hidden)

    monkeypatch.setattr(Counting, "head", counted)
    model = Counting("llama")
    prompt = [3 + i % 200 for i in range(70)]
    pair = drafting_with(model, "llama")
    write(pair, prompt, 8, ignore_eos=True, speculation="on", depth=2)
    assert max(computed) <= draft_module.INSEPARABLE_TOKENS < len(prompt)


def chain(drafter: ModelDrafter, bonus: int, n: int) -> list[int]:
    drafts = drafter.propose(n, Cursor(bonus, mx.zeros((1, 1, 32)), 1, None))
    assert drafts.ids is not None
    return ints(drafts.ids)


def greedy(model: Target, ids: Sequence[int], n: int) -> list[int]:
    """The model's own greedy continuation, without a cache."""
    known = list(ids)
    for _ in range(n):
        hidden = model.hidden(mx.array([known]), None)[0, -1:]
        known += ints(mx.argmax(model.head(hidden), axis=-1))
    return known[len(ids) :]


@pytest.mark.parametrize("n_accepted", [0, 1, 2, 3])
def test_a_model_drafter_goes_on_from_what_was_chosen(n_accepted: int):
    """However much of its proposal was kept, rejected drafts leave no trace."""
    model = tiny_target("own", 5)
    drafter = ModelDrafter(model, Sampler(Sampling(), VOCAB, []))
    drafter.begin(PROMPT)
    drafter.commit([60], 0)
    first = chain(drafter, 60, 3)
    assert first == greedy(model, [*PROMPT, 60], 3)
    chosen = [*first[:n_accepted], 99]
    drafter.commit(chosen, n_accepted)
    assert chain(drafter, 99, 3) == greedy(model, [*PROMPT, 60, *chosen], 3)


def test_a_model_drafter_can_follow_one_of_its_own_drafts():
    """A reply may end on an accepted draft, and the next turn go on from there."""
    model = tiny_target("own", 5)
    drafter = ModelDrafter(model, Sampler(Sampling(), VOCAB, []))
    drafter.begin(PROMPT)
    first = chain(drafter, PROMPT[-1], 4)
    drafter.commit(first[:2], 2)
    assert chain(drafter, first[1], 3) == greedy(model, [*PROMPT, *first[:2]], 3)


def test_a_proposal_may_be_asked_for_again():
    """Timing a draft step does so; a model drafter used to fail at the second."""
    drafter = ModelDrafter(tiny_target("own", 5), Sampler(Sampling(), VOCAB, []))
    drafter.begin(PROMPT)
    first = chain(drafter, PROMPT[-1], 3)
    drafter.commit([], 0)
    assert chain(drafter, PROMPT[-1], 3) == first


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed"])
def test_the_step_of_every_network_can_be_timed(draft: str):
    """What bench's facts card shows."""
    ms = draft_step_ms(tiny_pair("own", draft), context_tokens=8)
    assert ms is not None
    assert ms > 0


# --- what all have in common ------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed", "lookup"])
@pytest.mark.parametrize("depth", [1, 4])
def test_under_the_standard_rule_every_draft_brings_its_law(draft: str, depth: int):
    """One distribution over the vocabulary for each id, which the id could come from."""
    prompt = [2, 40, 41, 42, 43, 40, 41]
    drafts = proposed(draft, prompt, depth)
    assert drafts.ids is not None
    assert drafts.laws is not None
    laws = np.array(drafts.laws)
    assert laws.shape == (drafts.n, VOCAB)
    assert np.abs(laws.sum(axis=-1) - 1).max() < 1e-5
    assert all(laws[row, id] > 0 for row, id in enumerate(ints(drafts.ids)))


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed", "lookup"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_no_drafter_proposes_more_than_it_was_asked_for(draft: str, depth: int):
    """Fewer is allowed."""
    assert 0 < proposed(draft, [2, 40, 41, 42, 43, 40, 41], depth).n <= depth


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed", "lookup"])
@pytest.mark.parametrize("n_forced", [1, 2, 3])
def test_ids_that_are_known_come_first_and_the_rest_follows_from_them(draft: str, n_forced: int):
    """Told what it would have said anyway, a drafter goes on as it did; its laws too."""
    prompt = [2, 40, 41, 42, 43, 40, 41]
    free = proposed(draft, prompt, 4)
    assert free.ids is not None
    ids = ints(free.ids)
    told = proposed(draft, prompt, 4, forced=ids[:n_forced])
    assert told.ids is not None
    assert told.laws is not None
    assert free.laws is not None
    assert ints(told.ids) == ids
    gaps = np.abs(np.array(told.laws[n_forced:]) - np.array(free.laws[n_forced:]))
    assert gaps.max() < 1e-5
    assert ints(mx.argmax(told.laws[:n_forced], axis=-1)) == ids[:n_forced]


@pytest.mark.parametrize("draft", ["assistant", "centroids", "other_seed"])
def test_other_ids_that_are_known_change_what_follows(draft: str):
    """They are not only written over the drafter's own."""
    prompt = [2, 40, 41, 42, 43, 40, 41]
    forced = [200, 201, 202]
    told = proposed(draft, prompt, 8, forced=forced)
    free = proposed(draft, prompt, 8)
    assert told.ids is not None
    assert free.ids is not None
    assert ints(told.ids)[:3] == forced
    assert ints(told.ids)[3:] != ints(free.ids)[3:]


@pytest.mark.parametrize("n_accepted", [0, 1, 2, 3, 4])
def test_a_model_drafter_goes_on_after_ids_it_was_told(n_accepted: int):
    """Kept or not, they leave no trace but what was chosen."""
    model = tiny_target("own", 5)
    drafter = ModelDrafter(model, Sampler(Sampling(), VOCAB, []))
    drafter.begin(PROMPT)
    drafter.commit([60], 0)
    drafts = drafter.propose(4, Cursor(60, mx.zeros((1, 1, 32)), 1, None), forced=[70, 71])
    assert drafts.ids is not None
    ids = ints(drafts.ids)
    assert ids == [70, 71, *greedy(model, [*PROMPT, 60, 70, 71], 2)]
    chosen = [*ids[:n_accepted], 99]
    drafter.commit(chosen, n_accepted)
    assert chain(drafter, 99, 3) == greedy(model, [*PROMPT, 60, *chosen], 3)


def proposed(draft: str, prompt: list[int], depth: int, forced: Sequence[int] = ()) -> Drafts:
    """What a drafter says after the prompt, sampling, with its laws."""
    pair = tiny_pair("own", draft)
    timelines = Timelines(pair.target.model)
    sampler = Sampler(Sampling(temperature=1.0, seed=3), VOCAB, prompt)
    drafter = pair.drafter(timelines, sampler)
    assert drafter is not None
    *cached, bonus = prompt
    hidden = pair.target.hidden(mx.array([cached]), timelines.layers)[:, -1:]
    timelines.commit(cached)
    drafter.begin(prompt)
    cursor = Cursor(bonus, hidden, 1, sampler.start)
    return drafter.propose(depth, cursor, with_laws=True, forced=forced)


def test_only_a_model_drafter_holds_memory_for_a_conversation():
    """An assistant reads the target's keys and values."""
    sampler = Sampler(Sampling(), VOCAB, [])
    drafter = ModelDrafter(tiny_target("own", 5), sampler)
    assert drafter.nbytes == 0
    drafter.begin(PROMPT)
    chain(drafter, PROMPT[-1], 1)
    assert drafter.nbytes > 0
    pair = tiny_pair("own", "assistant")
    other = pair.drafter(Timelines(pair.target.model), sampler)
    assert other is not None
    assert other.nbytes == 0
