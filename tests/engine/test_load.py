"""A pair on disk becomes a pair in memory, or one clear error; what does not fit is not served."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, mamba
from mlx_lm.utils import quantize_model

from mlx_worker import cli
from mlx_worker.engine import probe
from mlx_worker.engine.arrays import module_arrays
from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.checkpoint import Checkpoint, find
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.weights import build_error, default_dtype
from mlx_worker.errors import (
    CheckpointError,
    InvalidParameter,
    ModelError,
    ModelNotFound,
    PairMismatch,
    UnsupportedModel,
)
from mlx_worker.records import Sampling, Source
from tests.tiny import (
    VOCAB,
    gemma_args,
    randomised,
    tiny_target,
    tiny_tokenizer,
    write,
)

PARITY = Path(__file__).parent.parent / "vectors" / "parity"
PROMPT = [2, *range(40, 51)]

Change = Callable[[dict[str, Any]], object]
Fault = Callable[["Folders"], object]


class Folders:
    """A genuine pair of one family on disk, with a tokenizer, to be changed."""

    def __init__(self, root: Path, family: str) -> None:
        self.model = Path(shutil.copytree(PARITY / family / "target", root / "model"))
        self.draft = Path(shutil.copytree(PARITY / family / "assistant", root / "model-assistant"))
        tiny_tokenizer().save_pretrained(self.model)

    def load(self, draft: str | None = "named") -> LoadedPair:
        return load_pair(str(self.model), str(self.draft) if draft == "named" else draft)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, "e2b")


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file, or of its text_config where only that has the key; ... removes."""
    content = json.loads(file.read_text())
    for key, value in changes.items():
        nested = content.get("text_config") or {}
        place = nested if key in nested and key not in content else content
        if value is ...:
            del place[key]
        else:
            place[key] = value
    file.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    mx.eval(list(weights.values()))
    change(weights)
    file.unlink()
    mx.save_safetensors(str(file), weights)


def save(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> Path:
    """Write a network as mlx-lm does, without a tokenizer."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_model(folder: Path, model: nn.Module, config: Mapping[str, Any]) -> Path:
    """The same with the tests' tokenizer."""
    tiny_tokenizer().save_pretrained(save(folder, model, config))
    return folder


def refused(error: type[Exception], run: Callable[[], object]) -> str:
    """The message of the error it must raise; every one says what to do."""
    with pytest.raises(error) as raised:
        run()
    assert "hint: " in str(raised.value)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- a source ---------------------------------------------------------------------------------


def test_a_source_is_loaded_by_its_name_with_its_draft(folders: Folders):
    """Wherever its files are; the draft's name is its own, too."""
    draft = Source("org/small", folders.draft)
    pair = load_pair(Source("large", folders.model, draft))
    assert (pair.name, pair.draft_kind, pair.draft_name) == ("large", "assistant", "org/small")
    assert pair.with_draft("none").with_draft("auto").draft_name == "org/small"
    assert pair.with_draft(Source("another", folders.draft)).draft_name == "another"


def test_a_source_without_a_draft_says_why(folders: Folders):
    """Unless one lies beside its folder."""
    problem = "owner/large: its drafts are gated"
    source = Source("large", folders.model, draft_problem=problem)
    assert load_pair(source).draft_name == "model-assistant"
    shutil.rmtree(folders.draft)
    pair = load_pair(source)
    assert (pair.draft_kind, pair.draft_problem) == (None, problem)


def test_a_sources_draft_that_does_not_fit_leaves_the_model(folders: Folders):
    """With what is wrong with it."""
    (folders.draft / "config.json").unlink()
    pair = load_pair(Source("large", folders.model, Source("small", folders.draft)))
    assert pair.draft_kind is None
    assert "no config.json" in (pair.draft_problem or "")


def test_a_context_can_be_lowered_but_not_raised(folders: Folders):
    """The message has both numbers."""
    own = load_pair(str(folders.model), None).target.context_limit
    source = Source("large", folders.model)
    assert load_pair(source, None, context_tokens=own).target.context_limit == own
    assert load_pair(source, None, context_tokens=7).target.context_limit == 7
    message = refused(ModelError, lambda: load_pair(source, None, context_tokens=own + 1))
    assert message.startswith(f"large: context_tokens: {own + 1:,}, the model takes {own:,}. hint")


def test_sampling_that_is_configured_takes_the_place_of_the_models_own(folders: Folders):
    """Field by field, with every draft of it."""
    file = folders.model / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.7, "top_k": 64}')
    pair = load_pair(str(folders.model), sampling={"temperature": 0.2})
    assert pair.generation_defaults == Sampling(temperature=0.2, top_k=64)
    assert pair.with_draft("none").generation_defaults.temperature == 0.2


# --- a model that can't be used ---------------------------------------------------------------


def test_a_genuine_pair_loads(folders: Folders):
    """What the faults below are faults of."""
    pair = folders.load()
    assert (pair.name, pair.draft_kind, pair.draft_name) == (
        "model",
        "assistant",
        "model-assistant",
    )


def a_shape(weights: dict[str, mx.array]) -> None:
    weights["model.language_model.norm.weight"] = mx.zeros(7)


FAULTS: dict[str, tuple[Fault, str]] = {
    "missing tensor": (
        lambda f: edit_weights(f.model, lambda w: w.pop("model.language_model.norm.weight")),
        "Missing 1 parameters: language_model.model.norm.weight",
    ),
    "extra tensor": (
        lambda f: edit_weights(f.model, lambda w: w.update({"model.more": mx.zeros(1)})),
        "Received 1 parameters not in model: more",
    ),
    "wrong shape": (
        lambda f: edit_weights(f.model, a_shape),
        "Expected shape (32,) but received shape (7,)",
    ),
    "wrong size": (lambda f: edit(f.model / "config.json", hidden_size=64), "Expected shape"),
    "no heads": (lambda f: edit(f.model / "config.json", num_attention_heads=7), "shape"),
    "too many shared layers": (
        lambda f: edit(f.model / "config.json", num_kv_shared_layers=99),
        "does not fit its config.json",
    ),
    "a norm that is a text": (
        lambda f: edit(f.model / "config.json", rms_norm_eps="x"),
        "does not fit its config.json",
    ),
    "a softcap that is a text": (
        lambda f: edit(f.model / "config.json", final_logit_softcapping="x"),
        "does not fit its config.json",
    ),
    "no tokenizer": (
        lambda f: (f.model / "tokenizer.json").unlink(),
        "no tokenizer.json in this folder",
    ),
    "tokenizer that is no JSON": (
        lambda f: (f.model / "tokenizer.json").write_text('{"a":'),
        "its tokenizer can't be loaded: Failed to parse tokenizer.json",
    ),
    "tokenizer that is none": (
        lambda f: (f.model / "tokenizer.json").write_text("{}"),
        "its tokenizer can't be loaded",
    ),
    "tokenizer in bad UTF-8": (
        lambda f: (f.model / "tokenizer.json").write_bytes(b"\xff{}"),
        "its tokenizer can't be loaded",
    ),
    "tokenizer_config that is no JSON": (
        lambda f: (f.model / "tokenizer_config.json").write_text("{"),
        "its tokenizer can't be loaded",
    ),
    "an end that is no id": (
        lambda f: edit(f.model / "generation_config.json", eos_token_id=[[1]]),
        "eos_token_id is [[1]], must be an id or a list of ids",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_model_is_one_clear_error(folders: Folders, name: str):
    """Whatever a library would have raised: the folder, what is wrong, what to do."""
    fault, part = FAULTS[name]
    fault(folders)
    message = refused(CheckpointError, folders.load)
    assert str(folders.model) in message
    assert part in message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "nosuch"}, "model_type nosuch in"),
        ({"model_type": ...}, "model_type absent in"),
        ({"model_type": ""}, "model_type absent in"),
    ],
)
def test_an_unknown_kind_of_model_is_unsupported(
    folders: Folders, changes: dict[str, Any], part: str
):
    """A config without a type used to read "does not fit its config.json: 'model_type'"."""
    edit(folders.model / "config.json", **changes)
    message = refused(UnsupportedModel, folders.load)
    assert part in message
    assert "choose another model" in message


def test_code_in_a_model_folder_is_never_run(folders: Folders, tmp_path: Path):
    """A conversion with its own network is refused."""
    (folders.model / "net.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(folders.model / "config.json", model_file="net.py")
    message = refused(UnsupportedModel, folders.load)
    assert "needs its own Python code, which is never run here" in message
    assert not (tmp_path / "ran").exists()


def test_code_for_a_tokenizer_is_neither_run_nor_offered(
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """It used to ask "Do you wish to run the custom code? [y/N]", and a yes ran it."""
    (folders.model / "tok.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    settings = {"auto_map": {"AutoTokenizer": [None, "tok.T"]}, "tokenizer_class": "T"}
    edit(folders.model / "tokenizer_config.json", **settings)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    message = refused(UnsupportedModel, folders.load)
    assert "needs its own Python code, which is never run here" in message
    assert "[y/N]" not in "".join(capsys.readouterr())
    assert not (tmp_path / "ran").exists()


def test_a_draft_is_no_model(folders: Folders):
    """An easy slip, with its own hint."""
    message = refused(UnsupportedModel, lambda: load_pair(str(folders.draft)))
    assert "is a draft (gemma4_assistant), not a model" in message
    assert "give its target as the model and this folder as --draft" in message


def test_an_unknown_position_is_refused():
    """A misspelt one used to count as last_cached."""
    position: Any = "middle"
    with pytest.raises(InvalidParameter, match="position: 'middle', must be one of last_cached, n"):
        load_pair("demo", None, position=position)


@pytest.mark.parametrize(
    "fault",
    [
        lambda f: (f.model / "config.json").write_text("{"),
        lambda f: (f.model / "model.safetensors").write_bytes(b"cut"),
        lambda f: (f.model / "tokenizer.json").write_text("{}"),
        lambda f: edit(f.model / "config.json", model_type="nosuch"),
        lambda f: shutil.rmtree(f.model),
    ],
    ids=["config", "weights", "tokenizer", "type", "folder"],
)
def test_the_command_line_says_a_fault_in_one_line(
    folders: Folders,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Exit code 2, nothing on standard output, no traceback."""
    fault(folders)
    monkeypatch.setattr(sys, "argv", ["mlx-worker", "generate", "--model", str(folders.model), "x"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, talk = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert talk.splitlines()[-1].startswith("mlx-worker: ")
    assert str(folders.model) in talk
    assert "hint: " in talk
    assert "Traceback" not in talk


# --- a draft that can't be used ---------------------------------------------------------------


def set_ordering(folders: Folders, ordering: mx.array) -> None:
    edit_weights(folders.draft, lambda w: w.update({"masked_embedding.token_ordering": ordering}))


def break_dtype(folders: Folders) -> None:
    file = folders.draft / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F13"').replace(b'"BF16"', b'"BF13"'))


DRAFT_FAULTS: dict[str, tuple[Fault, str]] = {
    "missing tensor": (
        lambda f: edit_weights(f.draft, lambda w: w.pop("pre_projection.weight")),
        "Missing 1 parameters: pre_projection.weight",
    ),
    "extra tensor": (
        lambda f: edit_weights(f.draft, lambda w: w.update({"model.more": mx.zeros(1)})),
        "Received 1 parameters not in model: model.more",
    ),
    "unknown dtype": (break_dtype, "13"),
    "no weights": (lambda f: (f.draft / "model.safetensors").unlink(), "no model*.safetensors"),
    "no config": (lambda f: (f.draft / "config.json").unlink(), "no config.json"),
    "layers as a text": (
        lambda f: edit(f.draft / "config.json", num_hidden_layers="four"),
        "num_hidden_layers is 'four', must be a whole number",
    ),
    "no layers": (
        lambda f: edit(f.draft / "config.json", num_hidden_layers=...),
        "names no num_hidden_layers",
    ),
    "a norm that is a text": (
        lambda f: edit(f.draft / "config.json", rms_norm_eps="x"),
        "does not fit its config.json",
    ),
    "rotary settings that are a text": (
        lambda f: edit(f.draft / "config.json", rope_parameters="x"),
        "does not fit its config.json",
    ),
    "quantised how": (
        lambda f: edit(f.draft / "config.json", quantization="x"),
        "does not fit its config.json",
    ),
    "centroids as a text": (
        lambda f: edit(f.draft / "config.json", num_centroids="x"),
        "num_centroids is 'x', must be a divisor of vocab_size 256",
    ),
    "centroids that don't divide": (
        lambda f: edit(f.draft / "config.json", num_centroids=15),
        "num_centroids is 15, must be a divisor of vocab_size 256",
    ),
    "no centroids": (
        lambda f: edit(f.draft / "config.json", num_centroids=0),
        "num_centroids is 0, must be a divisor of vocab_size 256",
    ),
    "unnamed centroids": (
        lambda f: edit(f.draft / "config.json", num_centroids=...),
        "num_centroids is 2048, must be a divisor of vocab_size 256",
    ),
    "more clusters than there are": (
        lambda f: edit(f.draft / "config.json", centroid_intermediate_top_k=17),
        "centroid_intermediate_top_k is 17, must be 1 to num_centroids 16",
    ),
    "no clusters": (
        lambda f: edit(f.draft / "config.json", centroid_intermediate_top_k=0),
        "centroid_intermediate_top_k is 0, must be 1 to num_centroids 16",
    ),
    "an ordering with an id twice": (
        lambda f: set_ordering(f, mx.zeros(256, mx.int64)),
        "token_ordering does not hold every token id exactly once",
    ),
    "an ordering out of the vocabulary": (
        lambda f: set_ordering(f, mx.arange(256) + 1),
        "token_ordering does not hold every token id exactly once",
    ),
    "an ordering too short": (
        lambda f: set_ordering(f, mx.arange(200)),
        "Expected shape (256,) but received shape (200,)",
    ),
}


@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_a_fault_of_a_named_draft_is_one_clear_error(folders: Folders, name: str):
    """Most used to come through raw, some only when the draft was first asked."""
    fault, part = DRAFT_FAULTS[name]
    fault(folders)
    message = refused(CheckpointError, folders.load)
    assert str(folders.draft) in message
    assert part in message


def test_a_head_of_its_own_is_refused(folders: Folders):
    """An assistant's head is tied here; one that isn't would be ignored without a word."""
    edit(folders.draft / "config.json", use_ordered_embeddings=False, tie_word_embeddings=False)
    edit_weights(folders.draft, lambda w: w.update({"lm_head.weight": mx.zeros((256, 24))}))
    with pytest.raises(UnsupportedModel, match="an assistant with a head of its own"):
        folders.load()


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "backbone": ({"backbone_hidden_size": 48}, "backbone_hidden_size: target has 32, draft has 48"),
    "no backbone": (
        {"backbone_hidden_size": ...},
        "backbone_hidden_size: target has 32, draft has None",
    ),
    "window": ({"sliding_window": 8}, "sliding_window: target has 16, draft has 8"),
    "vocabulary": ({"vocab_size": 128}, "vocab_size: target has 256, draft has 128"),
    "head": ({"head_dim": 8}, "head_dim: target has 16, draft has 8"),
    "full head": (
        {"per_layer_config": {"3": {"head_dim": 64}}},
        "full-attention head_dim: target has 32, draft has 64",
    ),
    "heads": (
        {"num_key_value_heads": 2},
        "sliding_attention key/value heads: target has 1, draft has 2",
    ),
    "layer types": (
        {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
        "layer types: target has ['full_attention', 'sliding_attention'], "
        "draft has 'chunked_attention'",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_named_draft_for_another_target_is_refused_with_both_values(folders: Folders, name: str):
    """Each check has its own message."""
    changes, part = MISMATCHES[name]
    edit(folders.draft / "config.json", **changes)
    message = refused(PairMismatch, folders.load)
    assert message == f"{part}. hint: choose a draft made for this model, or --draft none"


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_matching_draft_for_another_target_is_left_aside_with_the_reason(
    folders: Folders, name: str
):
    """Automatic: the target serves alone and says why."""
    changes, part = MISMATCHES[name]
    edit(folders.draft / "config.json", **changes)
    pair = folders.load("auto")
    assert (pair.draft_kind, pair.draft_name, pair.draft_network) == (None, None, None)
    assert part in (pair.draft_problem or "")


@pytest.mark.parametrize("family", ["12b", "26b", "31b"])
def test_the_full_layers_key_value_heads_are_checked_apart(tmp_path: Path, family: str):
    """Where keys are values, full layers have fewer heads than the others."""
    folders = Folders(tmp_path, family)
    ours = folders.load().draft_network
    assert isinstance(ours, Assistant)
    assert ours.args.num_global_key_value_heads not in (None, ours.args.num_key_value_heads)
    layers = len(ours.args.layer_types or [])
    shape = {"head_dim": ours.args.global_head_dim, "num_key_value_heads": 7}
    edit(folders.draft / "config.json", per_layer_config={str(layers - 1): shape})
    with pytest.raises(
        PairMismatch, match=r"full_attention key/value heads: target has \d, draft has 7"
    ):
        folders.load()


def test_an_assistant_needs_a_target_of_its_family(folders: Folders, tmp_path: Path):
    """Another network has nothing that it could read."""
    args = {**LLAMA, "vocab_size": 256}
    other = save_model(tmp_path / "llama", llama(256), args)
    with pytest.raises(PairMismatch, match="model family: target has 'not Gemma 4', draft has"):
        load_pair(str(other), str(folders.draft))


def test_a_missing_draft_is_not_found(folders: Folders):
    """A named one; looked for automatically it is no problem at all."""
    shutil.rmtree(folders.draft)
    with pytest.raises(ModelNotFound, match=r"model-assistant\. hint: give a folder"):
        folders.load()
    pair = folders.load("auto")
    assert (pair.draft_kind, pair.draft_problem) == (None, None)


def test_a_broken_matching_draft_is_left_aside_with_the_reason(folders: Folders):
    """Automatic never keeps a whole model from serving."""
    (folders.draft / "model.safetensors").write_bytes(b"cut")
    assert "is not a whole safetensors file" in (folders.load("auto").draft_problem or "")


# --- tokenizers of a pair ---------------------------------------------------------------------


def test_a_draft_without_a_tokenizer_is_normal(folders: Folders):
    """Then the vocabulary's size alone is compared."""
    assert not (folders.draft / "tokenizer.json").exists()
    assert folders.load().draft_kind == "assistant"


def test_a_draft_with_the_same_vocabulary_in_other_files_passes(folders: Folders):
    """Content counts, not bytes: other formatting, other settings beside it."""
    content = json.loads((folders.model / "tokenizer.json").read_text())
    (folders.draft / "tokenizer.json").write_text(json.dumps(content, indent=3))
    edit_or_make = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 7}
    (folders.draft / "tokenizer_config.json").write_text(json.dumps(edit_or_make))
    assert folders.load().draft_kind == "assistant"


def test_a_draft_with_another_vocabulary_under_the_same_names_is_refused(folders: Folders):
    """Two ids swapped: every draft of theirs would be another word."""
    tiny_tokenizer().save_pretrained(folders.draft)
    file = folders.draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(PairMismatch, match=r"tokenizer vocabulary \(SHA-256\): target has"):
        folders.load()


def test_a_draft_with_a_broken_tokenizer_is_refused(folders: Folders):
    """Whether it fits can't be told."""
    (folders.draft / "tokenizer.json").write_text("{}")
    assert str(folders.draft) in refused(CheckpointError, folders.load)


# --- other drafts -----------------------------------------------------------------------------


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "state_size": 4,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 2,
}


def llama(vocab_size: int = VOCAB) -> nn.Module:
    if vocab_size == VOCAB:
        return tiny_target("llama").model
    from mlx_lm.models import llama as module

    return randomised(module.Model(module.ModelArgs.from_dict({**LLAMA, "vocab_size": 256})), 0)


def recurrent() -> nn.Module:
    """A model whose context is a state: it can't be rewound."""
    return randomised(mamba.Model(mamba.ModelArgs.from_dict(MAMBA)), 0)


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", llama(), LLAMA)


@pytest.fixture
def mamba_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "mamba", recurrent(), MAMBA)


@pytest.mark.parametrize("draft", ["lookup", "llama"])
def test_another_family_drafts_by_lookup_or_a_model(llama_folder: Path, draft: str):
    """The text is the target's own."""
    draft = str(llama_folder) if draft == "llama" else draft
    pair = load_pair(str(llama_folder), draft)
    plain = write(pair, PROMPT, 20, ignore_eos=True, speculation="off")
    drafted = write(pair, PROMPT, 20, ignore_eos=True, speculation="on", depth=4)
    assert drafted.ids == plain.ids
    assert drafted.done.timing.drafted > 0


def test_a_model_that_cannot_be_rewound_decodes_plainly(mamba_folder: Path):
    """Automatic finds no draft for it, and a reply ends as any other."""
    pair = load_pair(str(mamba_folder), "auto")
    assert pair.draft_kind is None
    reply = write(pair, PROMPT, 12, ignore_eos=True, speculation="on", depth=4, chunk_tokens=5)
    assert len(reply.ids) == 12
    assert reply.done.timing.drafted == 0
    again = write(pair, PROMPT, 12, ignore_eos=True)
    assert again.ids == reply.ids


def test_a_model_that_cannot_be_rewound_takes_no_lookup(mamba_folder: Path):
    """The message names the kind of cache."""
    message = refused(UnsupportedModel, lambda: load_pair(str(mamba_folder), "lookup"))
    assert message == (
        "mamba keeps its context in a ArraysCache, which can't take back a rejected draft. "
        "hint: use --draft none"
    )


def test_a_matching_draft_of_a_model_that_cannot_be_rewound_is_left_aside(
    mamba_folder: Path, llama_folder: Path
):
    """Automatic says why."""
    llama_folder.rename(mamba_folder.parent / "mamba-assistant")
    pair = load_pair(str(mamba_folder), "auto")
    assert pair.draft_kind is None
    assert "ArraysCache" in (pair.draft_problem or "")


def test_a_model_that_cannot_be_rewound_is_no_draft(mamba_folder: Path, llama_folder: Path):
    """Its own rejected drafts would stay in it."""
    with pytest.raises(UnsupportedModel, match="its ArraysCache can't be rewound"):
        load_pair(str(llama_folder), str(mamba_folder))


def test_switching_the_draft_keeps_the_target_in_memory(folders: Folders):
    """The same objects, not a second copy; and back again."""
    pair = folders.load("auto")
    for draft, kind in (("lookup", "lookup"), ("none", None), (None, None), ("auto", "assistant")):
        other = pair.with_draft(draft)
        assert other.target is pair.target
        assert other.tokenizer is pair.tokenizer
        assert other.draft_kind == kind
        assert other.draft_problem is None


def test_switching_to_a_draft_that_does_not_fit_leaves_the_pair_alone(folders: Folders):
    """The error is raised, the pair goes on."""
    pair = folders.load("auto")
    with pytest.raises(ModelError):
        pair.with_draft("/nowhere/draft")
    assert write(pair, [5, 6], 4, ignore_eos=True, speculation="on").done.timing.drafted > 0


# --- quantised --------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Quantised:
    """A target and an assistant quantised in memory, and as saved."""

    def __init__(self, root: Path, bits: int, centroids: bool) -> None:
        self.bits = bits
        args = gemma_args("own", **SIZES)
        self.model, config = quantize_model(
            randomised(gemma4_text.Model(args), 0), dict(vars(args)), group_size=64, bits=bits
        )
        save_model(root / "model", self.model, config)
        own = gemma_args("own", **SIZES, num_kv_shared_layers=2)
        self.assistant = Assistant(own, 64, 16 if centroids else 0, 4 if centroids else 0)
        randomised(self.assistant, 7)
        if centroids:
            ordering = mx.random.permutation(VOCAB, key=mx.random.key(1))
            self.assistant.masked_embedding.token_ordering = ordering
        nn.quantize(self.assistant, group_size=64, bits=bits)
        head = {"num_centroids": 16, "centroid_intermediate_top_k": 4} if centroids else {}
        save(
            root / "model-assistant",
            self.assistant,
            {
                "model_type": "gemma4_assistant",
                "backbone_hidden_size": 64,
                "use_ordered_embeddings": centroids,
                **head,
                "text_config": vars(own),
                "quantization": {"group_size": 64, "bits": bits},
            },
        )
        self.pair = load_pair(str(root / "model"), str(root / "model-assistant"))


@pytest.fixture(params=[(4, False), (4, True), (8, False), (8, True)], ids=str)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Quantised:
    return Quantised(tmp_path, *request.param)


def test_a_quantised_target_computes_what_it_did_in_memory(quantised: Quantised):
    """mlx-lm's own quantisation, through files and back."""
    ids = list(range(3, 30))
    expected = np.array(quantised.model(mx.array([ids]))[0])
    assert np.abs(probe.logits(quantised.pair, ids) - expected).max() < 1e-5


def test_a_quantised_assistant_is_the_one_that_was_saved(quantised: Quantised):
    """Tied or with centroids: every tensor, and packed as it was."""
    ours = quantised.pair.draft_network
    assert isinstance(ours, Assistant)
    loaded, saved = module_arrays(ours), module_arrays(quantised.assistant)
    assert loaded.keys() == saved.keys()
    assert all(mx.array_equal(loaded[name], saved[name]) for name in saved)
    assert any(array.dtype == mx.uint32 for array in loaded.values())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=20, seed=5)])
def test_a_quantised_pair_writes_what_its_target_writes(quantised: Quantised, sampling: Sampling):
    """Greedy and seeded."""
    plain = write(quantised.pair, PROMPT, 16, sampling=sampling, ignore_eos=True)
    drafted = write(
        quantised.pair,
        PROMPT,
        16,
        sampling=sampling,
        ignore_eos=True,
        speculation="on",
        depth=3,
    )
    assert drafted.ids == plain.ids
    assert drafted.done.timing.drafted > 0


def test_a_quantised_pair_says_how_and_how_big(quantised: Quantised):
    """As counted in memory."""
    pair = quantised.pair
    assert pair.quantization == f"{quantised.bits}-bit, groups of 64"
    for network, n_bytes in (
        (quantised.model, pair.target_bytes),
        (quantised.assistant, pair.draft_bytes),
    ):
        assert n_bytes == sum(array.nbytes for array in module_arrays(network).values())


def test_a_config_that_says_quantised_of_plain_weights_is_not_believed(folders: Folders):
    """It used to be reported as 4-bit."""
    edit(folders.model / "config.json", quantization={"bits": 4, "group_size": 64})
    assert folders.load(None).quantization is None


# --- in memory --------------------------------------------------------------------------------


def test_half_precision_weights_become_float32_on_the_cpu(folders: Folders):
    """Where it is both faster and exact; target and draft alike."""
    for folder in (folders.model, folders.draft):
        edit_weights(
            folder,
            lambda w: w.update(
                {k: v.astype(mx.bfloat16) for k, v in w.items() if v.dtype == mx.float32}
            ),
        )
    pair = folders.load()
    assert pair.dtype == "float32"
    assert pair.draft_network is not None
    network = getattr(pair.draft_network, "model", None)
    assert network is not None
    assert {array.dtype for array in module_arrays(network).values()} == {mx.float32}


def test_other_devices_keep_the_files_own_dtype():
    """Metal computes in half precision."""
    assert default_dtype(mx.Device(mx.cpu)) == mx.float32
    assert default_dtype(mx.Device(mx.gpu)) is None


def test_bytes_are_counted_from_what_is_in_memory(folders: Folders):
    """Target, draft, and each more token of context."""
    pair = folders.load()
    arrays = module_arrays(pair.target.model).values()
    assert pair.target_bytes == sum(array.size * 4 for array in arrays)
    n_sliding, n_full = 8, 2  # layers with a cache of their own
    assert len(pair.target.gemma.make_cache()) == n_sliding + n_full
    assert pair.kv_bytes_per_token == 2 * 4 * (n_sliding * 16 + n_full * 32)


# --- generation_config ------------------------------------------------------------------------


def defaults(folders: Folders, **config: Any) -> Sampling:
    (folders.model / "generation_config.json").write_text(json.dumps(config))
    return folders.load(None).generation_defaults


FAMILY = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": True, **FAMILY}, Sampling(**FAMILY)),
        (FAMILY, Sampling(**FAMILY)),
        ({"do_sample": False, **FAMILY}, Sampling(top_k=64, top_p=0.95)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": True, "temperature": None, "top_k": None}, Sampling(temperature=1.0)),
        ({"temperature": 0.0}, Sampling()),
        ({"repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
        ({"do_sample": True, "min_p": 0.05}, Sampling(temperature=1.0, min_p=0.05)),
        ({"suppress_tokens": [3, 9]}, Sampling(suppress_ids=(3, 9))),
        ({"suppress_tokens": [3, 258_882]}, Sampling(suppress_ids=(3,))),
    ],
)
def test_generation_config_gives_the_defaults(
    folders: Folders, config: dict[str, Any], expected: Sampling
):
    """A temperature of 0 used to become 1, and a penalty without a temperature was dropped."""
    assert defaults(folders, **config) == expected


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("temperature", "hot", "a number at least 0"),
        ("temperature", -1, "a number at least 0"),
        ("temperature", float("nan"), "a number at least 0"),
        ("top_p", 2, "a number above 0, at most 1"),
        ("top_k", -1, "a whole number of at least 0"),
        ("repetition_penalty", 0, "a number at least 0.01, at most 100"),
        ("suppress_tokens", 5, "a list of ids"),
        ("suppress_tokens", ["x"], "a list of ids"),
    ],
)
def test_a_default_that_cannot_be_is_named(folders: Folders, key: str, value: object, limit: str):
    """At load; it used to fail, or not, at the first request."""
    message = refused(CheckpointError, lambda: defaults(folders, do_sample=True, **{key: value}))
    assert f"generation_config.json: {key} is {value!r}, must be {limit}" in message


def test_every_end_of_any_file_ends_a_reply(folders: Folders):
    """generation_config, config and tokenizer name them independently."""
    edit(folders.model / "config.json", eos_token_id=7)
    (folders.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 106]}))
    tokenizer_eos = tiny_tokenizer().eos_token_id
    assert folders.load(None).eos_ids == {5, 106, 7, tokenizer_eos}


def test_no_named_end_is_no_error(folders: Folders):
    """null is absent."""
    edit(folders.model / "config.json", eos_token_id=None)
    (folders.model / "generation_config.json").write_text('{"eos_token_id": null}')
    assert folders.load(None).eos_ids == {tiny_tokenizer().eos_token_id}


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[malloc_or_wait] Unable to allocate 9 bytes.")],
)
def test_too_little_memory_is_no_broken_file(error: Exception):
    """Getting the files again wouldn't help."""
    found = build_error(Checkpoint(find("demo")), error)
    assert "there is too little memory to load it" in str(found)
    assert "quantised" in (found.hint or "")
