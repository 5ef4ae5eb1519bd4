"""Under a grammar a reply is the target's own too, whatever drafts, and what was asked for."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from scipy.stats import chisquare

from mlx_worker.engine.draft import DraftKind, Drafts
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.round import Cursor
from mlx_worker.engine.sample import Sampler
from mlx_worker.engine.structure import calls_grammar, structure_grammar
from mlx_worker.records import Grammar, Sampling, Structure, Tools
from tests.demo_prompts import TOOLS, prompt_of
from tests.tiers import thinned
from tests.tiny import VOCAB, Guess, Script, Written, tiny_pair, write

PROMPT = [2, *range(40, 51)]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["animal", "building", "river"]},
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}},
        "is_old": {"type": "boolean"},
    },
    "required": ["kind", "name", "sizes", "is_old"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Paris", "Rome", "Lima"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, seed=7),
    "hot": Sampling(temperature=1.4, top_p=0.95, seed=-3),
    "penalised": Sampling(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, seed=1
    ),
    "penalised greedy": Sampling(repetition_penalty=1.5, frequency_penalty=0.9),
    "biased": Sampling(logit_bias={60: 2.0}, suppress_ids=(45,), temperature=0.9, seed=5),
}
DRAFTS = ["lookup", "assistant", "centroids", "same_weights", "other_seed"]


def held_to(schema: object) -> Grammar:
    grammar, notice = structure_grammar(Structure(json.dumps(schema)), None)
    assert notice is None
    return grammar


@pytest.fixture(scope="module")
def demo() -> LoadedPair:
    return load_pair("demo")


def tiny_reply(shape: str, draft: str | None, sampling: str, **request: Any) -> Written:
    whole = {"grammar": held_to(SCHEMA), "sampling": SAMPLINGS[sampling], **request}
    return write(tiny_pair(shape, draft), PROMPT, 96, **whole)


@cache
def plain_reply(shape: str, sampling: str) -> Written:
    return tiny_reply(shape, None, sampling)


def some_of_the_table() -> list[Any]:
    """Every draft, depth, sampling and shape meets several of the others; all in the long tier."""
    found = []
    for (i, draft), depth, (j, name), (k, shape) in product(
        enumerate(DRAFTS), (1, 2, 4, 8), enumerate(SAMPLINGS), enumerate(("own", "shared"))
    ):
        marks = [] if (3 * i + j + depth + 5 * k) % 40 == 0 else [pytest.mark.long]
        found.append(pytest.param(shape, draft, depth, name, marks=marks))
    return found


@pytest.mark.parametrize(("shape", "draft", "depth", "sampling"), some_of_the_table())
def test_the_reply_does_not_depend_on_the_drafter(
    shape: str, draft: str, depth: int, sampling: str
):
    """For any seed, with ids that the grammar forces among the drafts and without."""
    plain = plain_reply(shape, sampling)
    drafted = tiny_reply(shape, draft, sampling, speculation="on", depth=depth)
    assert (drafted.ids, drafted.text) == (plain.ids, plain.text)
    assert drafted.done.finish_reason == plain.done.finish_reason


@pytest.mark.parametrize("seed", thinned(range(4), every=4))
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_drafts_that_are_right_now_and_then_leave_the_reply_alone(depth: int, seed: int):
    """Legal and illegal ones in any order: the grammar is where the kept ids are, nowhere else."""
    plain = plain_reply("own", "sampled")
    chance = random.Random(seed)
    drafter = Guess(plain.ids, lambda i: chance.random() < 0.6)
    drafted = tiny_reply("own", None, "sampled", drafter=drafter, speculation="on", depth=depth)
    assert drafted.ids == plain.ids


def test_switching_between_plain_and_drafting_leaves_the_reply_alone():
    """The pacer may stop and start anywhere."""
    plain = plain_reply("own", "sampled")
    pacer = Script([(0, 3), (4, 9), (0, 1), (2, 5), (0, 4), (8, 99)])
    drafted = tiny_reply("own", "other_seed", "sampled", pacer=pacer)
    assert drafted.ids == plain.ids
    assert {round.depth for round in pacer.heard} == {0, 2, 4, 8}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_reply_that_ends_by_itself_satisfies_the_schema(sampling: str):
    """A random network has never seen JSON; the masks alone make it."""
    reply = plain_reply("own", sampling)
    if reply.done.finish_reason == "stop":
        Draft202012Validator(SCHEMA).validate(json.loads(reply.text))
        assert reply.done.notice is None
    else:
        assert reply.done.notice is not None
        assert reply.done.notice[0] == "truncated_during_structured_output"


def test_some_of_those_replies_end_by_themselves():
    """Or the test above would show little."""
    ends = [plain_reply("own", name).done.finish_reason for name in SAMPLINGS]
    assert ends.count("stop") >= 3


def test_forced_ids_count_in_neither_drafted_nor_accepted():
    """A draft that is always wrong has an acceptance of 0, whatever the grammar gave for free."""
    plain = plain_reply("own", "sampled")
    drafter = Guess(plain.ids, lambda i: False)
    reply = tiny_reply("own", None, "sampled", drafter=drafter, speculation="on", depth=4)
    timing = reply.done.timing
    assert reply.ids == plain.ids
    assert timing.drafted > 0
    assert timing.accepted == 0
    assert timing.tokens_per_round is not None
    assert timing.tokens_per_round > 1.2  # forced ids came along


def test_the_pacer_hears_of_forced_ids_apart():
    """They save time, so they are in the round; but they are no merit of the draft."""
    pacer = Script([(4, 999)])
    reply = tiny_reply("own", "other_seed", "sampled", pacer=pacer)
    assert sum(round.forced for round in pacer.heard) > 0
    assert sum(round.own[1] for round in pacer.heard) == reply.done.timing.accepted


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_cap_inside_the_document_says_so(speculation: str):
    """Half a document doesn't parse."""
    reply = tiny_reply("own", "lookup", "sampled", speculation=speculation)
    cut = write(
        tiny_pair("own", "lookup"),
        PROMPT,
        len(reply.ids) // 2,
        grammar=held_to(SCHEMA),
        sampling=SAMPLINGS["sampled"],
        speculation=speculation,
    )
    assert cut.ids == reply.ids[: len(cut.ids)]
    assert cut.done.finish_reason == "length"
    assert cut.done.notice is not None
    assert cut.done.notice[0] == "truncated_during_structured_output"


def test_a_stop_text_inside_the_document_says_so():
    """The client asked for both."""
    reply = tiny_reply("own", None, "sampled", stop=('"sizes"',))
    assert reply.done.finish_reason == "stop"
    assert reply.done.notice is not None
    assert reply.done.notice[0] == "truncated_during_structured_output"
    assert "stop text" in reply.done.notice[1]


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_the_demo_answers_in_the_form_that_was_asked_for(demo: LoadedPair, speculation: str):
    """Its own words, in the schema's order."""
    prompt = prompt_of(demo, "Write JSON for a person named Ada, age 36, city Paris.")
    reply = write(demo, prompt, 100, grammar=held_to(PERSON), speculation=speculation)
    assert json.loads(reply.text) == {"name": "Ada", "age": 36, "city": "Paris"}
    assert reply.done.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", ["off", "on"])
def test_the_demo_thinks_first_and_is_held_afterwards(
    demo: LoadedPair, speculation: str, temperature: float
):
    """Nothing masks the thinking; the answer is the document."""
    prompt = prompt_of(demo, "What is 32 + 21?", enable_thinking=True)
    reply = write(
        demo,
        prompt,
        200,
        grammar=held_to(SUM),
        may_think=True,
        reads_markers=True,
        sampling=Sampling(temperature=temperature, seed=3),
        speculation=speculation,
        depth=4,
    )
    thought, _, answer = reply.text.partition("<channel|>")
    assert thought.startswith("<|channel>thought\n")
    assert set(json.loads(answer)) == {"sum"}
    assert reply.done.usage.reasoning_tokens > 5


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_the_demo_calls_the_tool_that_it_must(demo: LoadedPair, speculation: str):
    """Even where nobody asked for it; the call is in the model's own syntax."""
    tools = Tools((TOOLS["start_timer"],), is_required=True)
    grammar, _ = calls_grammar(tools, demo.protocol)
    prompt = prompt_of(demo, "What is the capital of Portugal?", tools=tools.offered)
    reply = write(
        demo, prompt, 60, grammar=grammar, reads_markers=True, max_calls=1, speculation=speculation
    )
    assert reply.text.startswith("<|tool_call>call:start_timer{")
    assert reply.text.endswith("}<tool_call|>")
    assert reply.done.notice is None


STRICT = {
    "type": "function",
    "function": {
        "name": "start_timer",
        "description": "Set a timer",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"duration": {"enum": [100, 250]}},
            "required": ["duration"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_strict_tool_is_called_by_its_schema(demo: LoadedPair, speculation: str):
    """Though nothing has to be called: the grammar holds from the marker on."""
    reply = with_strict_tool(demo, "Wake me in 25 minutes.", speculation)
    assert reply.text == "<|tool_call>call:start_timer{duration:250}<tool_call|>"
    assert (reply.done.finish_reason, reply.done.notice) == ("stop", None)


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_a_reply_that_calls_no_strict_tool_is_free(demo: LoadedPair, speculation: str):
    """It is what it is without the grammar."""
    text = "What is the capital of Portugal?"
    free = write(demo, prompt_of(demo, text, tools=[STRICT]), 60, reads_markers=True)
    assert "call" not in free.text
    assert with_strict_tool(demo, text, speculation).ids == free.ids


def with_strict_tool(demo: LoadedPair, text: str, speculation: str) -> Written:
    tools = Tools((STRICT,))
    grammar, notice = calls_grammar(tools, demo.protocol)
    assert grammar.is_optional
    assert notice is None
    prompt = prompt_of(demo, text, tools=tools.offered)
    held = {"grammar": grammar, "reads_markers": True}
    return write(demo, prompt, 60, **held, speculation=speculation, depth=4)


def test_a_stop_text_that_takes_the_documents_end_says_so(demo: LoadedPair):
    """What is left of it doesn't parse, though the model had finished."""
    prompt = prompt_of(demo, "Write JSON for a person named Ada, age 36, city Paris.")
    reply = write(demo, prompt, 100, grammar=held_to(PERSON), stop=("}",))
    assert reply.done.finish_reason == "stop"
    assert reply.done.notice is not None
    assert reply.done.notice[0] == "truncated_during_structured_output"


def test_a_number_that_the_cap_may_have_cut_says_so(demo: LoadedPair):
    """12 is whole, but 1234 was on its way."""
    prompt = prompt_of(demo, "What is 32 + 21?")
    grammar = held_to({"type": "integer"})
    cut = write(demo, prompt, 1, grammar=grammar)
    assert cut.done.finish_reason == "length"
    assert cut.done.notice is not None
    assert cut.done.notice[0] == "truncated_during_structured_output"


def test_a_document_that_ends_at_the_cap_is_whole(demo: LoadedPair):
    """Nothing could have followed."""
    prompt = prompt_of(demo, "Write JSON for a person named Ada, age 36, city Paris.")
    whole = write(demo, prompt, 100, grammar=held_to(PERSON))
    cut = write(demo, prompt, len(whole.ids) - 1, grammar=held_to(PERSON))
    assert (cut.text, cut.done.finish_reason) == (whole.text, "length")
    assert cut.done.notice is None


LETTERS = ["a", "b", "c"]


class Skewed:
    """Drafts one of two ids by a coin: one that is allowed, too often, and one that never is."""

    kind: DraftKind = "model"
    nbytes = 0

    def __init__(self, ids: Sequence[int], sampler: Sampler) -> None:
        flags = mx.arange(VOCAB)[:, None] == mx.array(list(ids))
        self._law = mx.sum(flags.astype(mx.float32), axis=-1) / len(ids)
        self._sampler = sampler

    def begin(self, prompt_ids: Sequence[int]) -> None: ...

    def propose(
        self, depth: int, cursor: Cursor, *, with_laws: bool = False, forced: Sequence[int] = ()
    ) -> Drafts:
        id = self._sampler.draw(self._law, "draft", cursor.position)
        return Drafts(id[None], self._law[None] if with_laws else None)

    def commit(self, ids: Sequence[int], n_accepted: int) -> None: ...


@pytest.mark.parametrize("n_draws", [120, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("acceptance", ["coupled", "standard"])
def test_replies_under_a_grammar_follow_the_masked_law(acceptance: str, n_draws: int):
    """Also where drafts are forbidden. Under the standard rule these used to be left out, so that
    what came in their place was drawn from p and not from the residual."""
    pair = tiny_pair("own")
    encode = pair.tokenizer.encode
    letters = [encode(letter, add_special_tokens=False)[0] for letter in LETTERS]
    quote = encode('"', add_special_tokens=False)
    hidden = pair.target.hidden(mx.array([[*PROMPT, *quote]]), None)[0, -1:]
    logits = np.array(pair.target.head(hidden)[0])[letters].astype(float)
    level = dict(zip(letters, (logits.min() - logits).tolist(), strict=True))  # all alike likely
    counts = Counter[str]()
    for seed in range(n_draws):
        sampling = Sampling(temperature=1.0, seed=seed, logit_bias=level)
        reply = write(
            pair,
            PROMPT,
            4,
            drafter=Skewed([letters[0], 200], Sampler(sampling, VOCAB, PROMPT)),
            grammar=held_to({"enum": LETTERS}),
            sampling=sampling,
            speculation="on",
            depth=1,
            acceptance=acceptance,
        )
        counts[reply.text.strip('"')] += 1
    drawn = [counts[letter] for letter in LETTERS]
    assert sum(drawn) == n_draws
    assert chisquare(drawn).pvalue > 1e-6
