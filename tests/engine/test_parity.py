"""Agreement with an independent implementation: Hugging Face transformers, on tiny random pairs.

The vectors come from scripts/make_parity_vectors.py; its docstring says what each array holds.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_worker.engine import probe
from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.cache import Timelines
from mlx_worker.engine.checkpoint import Checkpoint
from mlx_worker.engine.load import LoadedPair, load_pair
from tests.tiny import tiny_tokenizer, write

FOLDER = Path(__file__).parent.parent / "vectors" / "parity"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
FAMILIES = sorted(MANIFEST["families"])
TOLERANCE = 1e-4
DRAFT_TOLERANCE = 1e-3  # a chain of six steps adds up what each one rounds
POSITIONS = ("last_cached", "newest")


def naming_all(checkpoint: Checkpoint) -> TokenizerWrapper:
    return tiny_tokenizer(checkpoint.text_config["vocab_size"])


class Case:
    """One family's pair, loaded as any user's would be, and its recorded arrays."""

    def __init__(self, family: str) -> None:
        folder = FOLDER / family
        with pytest.MonkeyPatch.context() as patch:
            # These folders hold no tokenizer: parity is about ids, of which each needs a token.
            patch.setattr("mlx_worker.engine.load.read_tokenizer", naming_all)
            self.pair: LoadedPair = load_pair(str(folder / "target"), str(folder / "assistant"))
        arrays = mx.load(str(folder / "vectors.safetensors"))
        assert isinstance(arrays, dict)
        self.arrays = {name: np.array(array) for name, array in arrays.items()}
        self.prompt: list[int] = self.arrays["prompt_ids"].tolist()
        self.greedy: list[int] = self.arrays["greedy_ids"].tolist()
        self.sequence = self.prompt + self.greedy

    @property
    def assistant(self) -> Assistant:
        network = self.pair.draft_network
        assert isinstance(network, Assistant)
        return network


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def worst(ours: Any, theirs: np.ndarray) -> float:
    return float(np.abs(np.array(ours) - theirs).max())


def test_the_committed_files_are_the_ones_the_script_made():
    """Nobody edits a vector by hand."""
    for name, facts in MANIFEST["files"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == facts["sha256"], name


def test_every_member_of_the_family_is_covered():
    """Each shape the family comes in, each way of naming it, both heads of the assistant."""
    assert FAMILIES == ["12b", "26b", "31b", "e2b", "e4b"]
    specs = [MANIFEST["families"][family]["spec"] for family in FAMILIES]
    assert {spec["model_type"] for spec in specs} == {"gemma4", "gemma4_text", "gemma4_unified"}
    assert {bool(spec["centroids"]) for spec in specs} == {True, False}


def test_target_logits_agree(case: Case):
    """Every recorded row of a full pass, in float32."""
    ours = probe.logits(case.pair, case.sequence)
    assert worst(ours[case.arrays["logit_rows"]], case.arrays["logits"]) < TOLERANCE


def test_hidden_states_agree(case: Case):
    """What the assistant is fed: the state after the final norm, at every position."""
    hidden = case.pair.target.hidden(mx.array([case.sequence]), None)[0]
    assert worst(hidden, case.arrays["hidden"]) < TOLERANCE


def test_shared_keys_and_values_agree(case: Case):
    """What the assistant reads: the donor layers' keys and values, as far back as they are kept."""
    timelines = Timelines(case.pair.target.model)
    case.pair.target.hidden(mx.array([case.sequence]), timelines.layers)
    for kind, index in case.pair.target.donor_layers.items():
        window = case.assistant.window if kind == "sliding_attention" else None
        keys, values = timelines.layers[index].recent(window)
        n = keys.shape[2]
        assert worst(keys[0], case.arrays[f"keys.{kind}"][:, -n:]) < TOLERANCE
        assert worst(values[0], case.arrays[f"values.{kind}"][:, -n:]) < TOLERANCE


@pytest.mark.parametrize("most", [24, pytest.param(None, marks=pytest.mark.long)])
def test_greedy_continuations_agree_past_the_window(case: Case, most: int | None):
    """The same ids, plainly and with the assistant drafting."""
    greedy = case.greedy[:most]
    n = len(greedy)
    assert n + len(case.prompt) > 3 * case.assistant.window
    plain = write(case.pair, case.prompt, n, ignore_eos=True, speculation="off")
    drafted = write(case.pair, case.prompt, n, ignore_eos=True, speculation="on", depth=5)
    assert plain.ids == greedy
    assert drafted.ids == greedy


@pytest.mark.parametrize("axis", [0, 1], ids=POSITIONS)
def test_draft_chains_agree_at_both_positions(case: Case, axis: int):
    """Six chained ids after each cut, on keys and values cut to the committed ids."""
    for row, cut in enumerate(case.arrays["cuts"]):
        proposed = probe.propose(case.pair, case.sequence[:cut], 6, POSITIONS[axis])
        assert proposed == case.arrays["draft_ids"][row, axis].tolist(), f"cut at {cut}"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("axis", [0, 1], ids=POSITIONS)
def test_draft_steps_agree_in_numbers(case: Case, axis: int, every: int):
    """The first step's logits where it has any, and the state handed on by every step."""
    for row, cut in list(enumerate(case.arrays["cuts"]))[::every]:
        logits, states = draft_numbers(case, int(cut), axis)
        ids, first = logits
        assert worst(first, case.arrays["draft_logits"][row, axis, ids]) < DRAFT_TOLERANCE
        assert worst(states, case.arrays["draft_hidden"][row, axis]) < DRAFT_TOLERANCE
        if "draft_candidates" in case.arrays:
            assert sorted(ids) == case.arrays["draft_candidates"][row, axis].tolist()


def draft_numbers(
    case: Case, cut: int, axis: int
) -> tuple[tuple[list[int], np.ndarray], np.ndarray]:
    """((candidate ids, their first-step logits), states (6, H)) of the chain after `cut` ids."""
    target, assistant = case.pair.target, case.assistant
    timelines = Timelines(target.model)
    hidden = target.hidden(mx.array([case.sequence[:cut]]), timelines.layers)[:, -1:]
    token = mx.argmax(target.head(hidden[0]), axis=-1)[None]
    shared = {
        kind: timelines.layers[i].recent(assistant.window if kind.startswith("sliding") else None)
        for kind, i in target.donor_layers.items()
    }
    states, first = [], None
    for _ in range(6):
        state, hidden = assistant.step(
            target.embed(token), hidden, shared, mx.array(cut - 1 + axis)
        )
        logits, candidates = assistant.candidates(state)
        ids = np.array(candidates if candidates is not None else mx.arange(logits.shape[0]))
        first = first or (ids.tolist(), np.array(logits))
        token = mx.array(ids)[mx.argmax(logits)].reshape(1, 1)
        states.append(np.array(hidden.reshape(-1)))
    assert first is not None
    return first, np.stack(states)


def test_the_two_positions_really_differ(case: Case):
    """The setting is live: what is recorded at one position is not what the other gives."""
    cut = len(case.prompt)
    other = replace(case.pair, position="newest")
    assert probe.propose(case.pair, case.sequence[:cut], 6) != probe.propose(
        other, case.sequence[:cut], 6
    )


@pytest.mark.parametrize("part", ["target", "assistant"])
def test_both_spellings_of_the_full_layers_shape_give_one_config(part: str):
    """`per_layer_config`, and `global_head_dim` with `num_global_key_value_heads`."""
    folder = FOLDER / "31b" / part
    new = Checkpoint(folder).text_config
    legacy = Checkpoint(folder, "config.legacy.json").text_config
    for key in ("global_head_dim", "num_global_key_value_heads", "head_dim", "vocab_size"):
        assert new[key] == legacy[key], key
