"""A quantised copy of a draft: what is in its folder, and that it drafts as the original does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils as mlx_lm_utils

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.checkpoint import Checkpoint
from mlx_worker.engine.load import load_pair
from mlx_worker.engine.pairing import read_assistant
from mlx_worker.engine.quantize import quantize_assistant
from mlx_worker.errors import (
    CheckpointError,
    InvalidParameter,
    UnsupportedModel,
    WorkerError,
)
from tests.drafts import saved_pair
from tests.tiny import tiny_tokenizer, write

PARITY = Path(__file__).parent.parent / "vectors" / "parity"
PROMPT = [2, *range(40, 51)]


class Pair:
    """A target, its draft, and where copies of the draft go."""

    def __init__(self, root: Path, *, has_centroids: bool) -> None:
        self.model, self.draft = saved_pair(root, has_centroids=has_centroids)
        self.place = root / "drafts" / "copy"

    def network(self, folder: Path) -> Assistant:
        network = load_pair(str(self.model), str(folder)).draft_network
        assert isinstance(network, Assistant)
        return network


@pytest.fixture(params=[False, True], ids=["tied", "centroids"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(tmp_path, has_centroids=request.param)


@pytest.fixture
def tied(tmp_path: Path) -> Pair:
    return Pair(tmp_path, has_centroids=False)


def full_row(network: Assistant) -> np.ndarray:
    """Logits of every id after one step over a made-up context; those without one are 0."""
    keys = iter(mx.random.split(mx.random.key(3), 6))

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    shared = {
        "sliding_attention": (drawn(1, 1, 6, 32), drawn(1, 1, 6, 32)),
        "full_attention": (drawn(1, 1, 6, 64), drawn(1, 1, 6, 64)),
    }
    state, _ = network.step(drawn(1, 1, 64), drawn(1, 1, 64), shared, mx.array(5))
    logits, ids = network.candidates(state)
    if ids is None:
        return np.array(logits)
    row = mx.zeros(network.args.vocab_size)
    row[ids] = logits
    return np.array(row)


# --- the copy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "likeness"), [(8, 0.999), (4, 0.75)])
def test_the_copy_scores_ids_as_the_original_does(pair: Pair, bits: int, likeness: float):
    """Tied and with centroids, whose rows come from a quantised embedding."""
    quantize_assistant(pair.draft, pair.place, bits)
    before, after = full_row(pair.network(pair.draft)), full_row(pair.network(pair.place))
    both = (before != 0) & (after != 0)
    assert both.sum() >= 0.5 * (before != 0).sum()
    assert np.corrcoef(before[both], after[both])[0, 1] > likeness


def test_centroid_logits_are_those_of_the_dequantised_rows(tmp_path: Path):
    """Packed rows are narrower than the hidden state: gathered as they are they can't be used."""
    pair = Pair(tmp_path, has_centroids=True)
    quantize_assistant(pair.draft, pair.place)
    network = pair.network(pair.place)
    hidden = mx.random.normal((1, 1, 64), key=mx.random.key(9))
    logits, ids = network.candidates(hidden)
    assert ids is not None
    everything = network.model.embed_tokens.as_linear(hidden).reshape(-1)
    assert network.model.embed_tokens.weight.shape[-1] == 8
    assert np.abs(np.array(logits) - np.array(everything[ids])).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_copy_changes_no_reply(pair: Pair, temperature: float):
    """A draft changes speed only, however coarse it is."""
    copy = quantize_assistant(pair.draft, pair.place, 2, 32)
    loaded = load_pair(str(pair.model), str(copy.folder))
    options: dict[str, Any] = {"ignore_eos": True}
    options["sampling"] = type(loaded.generation_defaults)(temperature=temperature, seed=5)
    plain = write(loaded, PROMPT, 16, **options)
    drafted = write(loaded, PROMPT, 16, **options, speculation="on", depth=3)
    assert drafted.ids == plain.ids
    assert drafted.done.timing.drafted > 0


def test_the_folder_is_what_mlx_lm_would_write(pair: Pair):
    """Its config names the packing under both keys and keeps every other key as it was."""
    copy = quantize_assistant(pair.draft, pair.place, 4, 64)
    before = json.loads((pair.draft / "config.json").read_text())
    after = mlx_lm_utils.load_config(copy.folder)
    packing = {"group_size": 64, "bits": 4, "mode": "affine"}
    assert after.pop("quantization") == after.pop("quantization_config") == packing
    assert after == before
    weights = mx.load(str(copy.folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert weights["pre_projection.weight"].dtype == mx.uint32
    assert weights["pre_projection.scales"].dtype == mx.bfloat16
    assert (copy.left, copy.n_bytes * 3 < copy.before_bytes) == ((), True)


def test_other_files_come_along_and_old_weights_do_not(tied: Pair):
    """A tokenizer is needed to check the pair; an index of shards would be wrong."""
    (tied.draft / "generation_config.json").write_text("{}")
    (tied.draft / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    shutil.copy(tied.model / "tokenizer.json", tied.draft)
    quantize_assistant(tied.draft, tied.place)
    assert sorted(file.name for file in tied.place.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((tied.place / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}


@pytest.mark.parametrize("family", ["e2b", "12b"])
def test_layers_that_groups_do_not_divide_stay_as_they_are(tmp_path: Path, family: str):
    """Genuine files whose hidden size, 24, no group divides: the rest is quantised, and loads."""
    folder = PARITY / family
    copy = quantize_assistant(folder / "assistant", tmp_path / "copy", 4, 32)
    assert "model.embed_tokens" in copy.left
    assert copy.n_layers > 0
    pair = load_pair(str(with_tokenizer(folder / "target", tmp_path)), str(copy.folder))
    plain = write(pair, PROMPT, 8, ignore_eos=True)
    drafted = write(pair, PROMPT, 8, ignore_eos=True, speculation="on", depth=2)
    assert drafted.ids == plain.ids


def with_tokenizer(model: Path, root: Path) -> Path:
    folder = Path(shutil.copytree(model, root / "model"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_every_width_that_mlx_has_loads(pair: Pair, bits: int):
    """4 and 8 are above."""
    quantize_assistant(pair.draft, pair.place, bits, 32)
    assert np.isfinite(full_row(pair.network(pair.place))).all()


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]
)
def test_drafts_that_others_quantised_in_another_mode_load(
    pair: Pair, mode: str, group_size: int, bits: int
):
    """As they are published; the codes of these modes have no biases."""
    network = read_assistant(Checkpoint(pair.draft), lambda module: mx.eval(module.parameters()))
    config = json.loads((pair.draft / "config.json").read_text())
    _, config = mlx_lm_utils.quantize_model(network, config, group_size, bits, mode=mode)
    mlx_lm_utils.save_model(pair.place, network)
    mlx_lm_utils.save_config(config, pair.place / "config.json")
    loaded = load_pair(str(pair.model), str(pair.place))
    plain = write(loaded, PROMPT, 12, ignore_eos=True)
    drafted = write(loaded, PROMPT, 12, ignore_eos=True, speculation="on", depth=3)
    assert drafted.ids == plain.ids
    assert drafted.done.timing.drafted > 0


# --- the folder is whole or not there ---------------------------------------------------------


def test_a_new_copy_takes_the_place_of_the_old(tied: Pair):
    """And leaves nothing beside it."""
    quantize_assistant(tied.draft, tied.place, 8)
    quantize_assistant(tied.draft, tied.place, 4)
    assert mlx_lm_utils.load_config(tied.place)["quantization"]["bits"] == 4
    assert list(tied.place.parent.iterdir()) == [tied.place]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_that_fails_leaves_the_old_one(
    tied: Pair, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    """A full disk, or Ctrl-C, in the middle of writing."""
    quantize_assistant(tied.draft, tied.place, 8)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("mlx_worker.engine.quantize._copy_others", fail)
    with pytest.raises(
        (CheckpointError, KeyboardInterrupt), match=r"can't be written: No space|^$"
    ):
        quantize_assistant(tied.draft, tied.place, 4)
    assert mlx_lm_utils.load_config(tied.place)["quantization"]["bits"] == 8
    assert list(tied.place.parent.iterdir()) == [tied.place]


# --- what is refused --------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Pair], object], type[WorkerError], str]] = {
    "bits": (
        lambda pair: quantize_assistant(pair.draft, pair.place, 7),
        InvalidParameter,
        r"--bits: 7, must be one of 2, 3, 4, 5, 6, 8",
    ),
    "group size": (
        lambda pair: quantize_assistant(pair.draft, pair.place, 4, 16),
        InvalidParameter,
        r"--group-size: 16, must be one of 32, 64, 128",
    ),
    "wide groups": (
        lambda pair: quantize_assistant(PARITY / "e2b" / "assistant", pair.place, 4, 128),
        UnsupportedModel,
        r"no layer's width is divisible by the group size 128\. hint: --group-size 32",
    ),
    "quantised": (
        lambda pair: quantize_assistant(
            quantize_assistant(pair.draft, pair.place, 8, 32).folder, pair.place
        ),
        UnsupportedModel,
        r"is quantised already: 8-bit, groups of 32\. hint: ",
    ),
    "no assistant": (
        lambda pair: quantize_assistant(pair.model, pair.place),
        UnsupportedModel,
        r"is no assistant but a gemma4_text\. hint: ",
    ),
    "no folder": (
        lambda pair: quantize_assistant(pair.place, pair.place),
        CheckpointError,
        r"no config\.json in this folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantised_is_refused_with_the_reason(tied: Pair, case: str):
    """Each names the value and what to do."""
    attempt, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        attempt(tied)


def test_nothing_is_printed(tied: Pair, capsys: pytest.CaptureFixture[str]):
    """mlx-lm's own line would be in the middle of the JSON."""
    quantize_assistant(tied.draft, tied.place)
    assert capsys.readouterr().out == ""
