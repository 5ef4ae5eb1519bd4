"""A model folder that can't be used gets one clear error: what, where, what to do."""

import json
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_worker.engine.checkpoint import DEMO_FOLDER, Checkpoint, find, folder_of, tensor_shapes
from mlx_worker.errors import CheckpointError, ModelNotFound
from mlx_worker.records import Source

PARITY = Path(__file__).parent.parent / "vectors" / "parity"
REPAIR = "download or copy this model again"

Header = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small genuine target, to be damaged."""
    return Path(shutil.copytree(PARITY / "e2b" / "target", tmp_path / "model"))


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_header(file: Path, change: Callable[[Header], object]) -> None:
    """Write a safetensors file again: what `change` makes of its header, then the same data."""
    content = file.read_bytes()
    n_header = struct.unpack("<Q", content[:8])[0]
    packed = json.dumps(change(json.loads(content[8 : 8 + n_header]))).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + n_header :])


def first_tensor(**changes: Any) -> Callable[[Header], Header]:
    """A header's change: its first tensor's entry gets these, ... removes a key."""

    def change(header: Header) -> Header:
        name = next(name for name in header if name != "__metadata__")
        entry = {**header[name], **changes}
        return {**header, name: {key: entry[key] for key in entry if entry[key] is not ...}}

    return change


def complaint(run: Callable[[], object]) -> str:
    """The whole message of the error that it must raise, which must say what to do."""
    with pytest.raises(CheckpointError) as raised:
        run()
    assert raised.value.hint
    return str(raised.value)


# --- finding the folder -----------------------------------------------------------------------


def test_demo_is_the_pair_in_the_package():
    """Without a download."""
    assert find("demo") == DEMO_FOLDER / "target"


def test_a_folder_is_found_by_any_spelling(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Absolute, from here, from home, with a slash behind."""
    folder = home / "models" / "one"
    folder.mkdir(parents=True)
    monkeypatch.chdir(home)
    for spelling in (str(folder), "models/one", "./models/one/", "~/models/one"):
        assert find(spelling) == folder.resolve()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "model", "a/b/c", "", "  "])
def test_what_is_neither_a_folder_nor_an_id_is_not_found(name: str):
    """An empty name used to mean the current folder."""
    with pytest.raises(ModelNotFound, match="give a folder in Hugging Face format, or owner/name"):
        find(name)


def test_a_file_is_no_model(model: Path):
    """A path to one of its files is a likely slip."""
    with pytest.raises(ModelNotFound, match=r"model\.safetensors.*give a folder"):
        find(str(model / "model.safetensors"))


@pytest.mark.parametrize("name", ["~nobody-has-this-name/model", "x" * 5000, "a\0b"])
def test_a_name_that_no_folder_can_have_is_not_found(name: str):
    """The file system's own complaints used to come through raw."""
    with pytest.raises(ModelNotFound):
        find(name)


def test_a_hub_id_is_left_to_pull(monkeypatch: pytest.MonkeyPatch):
    """It used to be downloaded here, unasked; now the hint says how to get it."""
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(ModelNotFound, match=r"owner/name\. hint: mlx-worker pull owner/name"):
        find("owner/name")


def test_a_source_is_where_it_says(tmp_path: Path):
    """Its name is not looked at."""
    assert folder_of(Source("owner/name", tmp_path)) == tmp_path
    assert folder_of("demo") == DEMO_FOLDER / "target"


# --- config.json ------------------------------------------------------------------------------


def test_a_folder_without_config_is_said_to_lack_it(tmp_path: Path):
    """Named with the folder."""
    message = complaint(lambda: Checkpoint(tmp_path))
    assert message == f"{tmp_path}: no config.json in this folder. hint: {REPAIR}"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "can't be read as JSON"),
        (b"{", "can't be read as JSON"),
        (b'{"a": "\xe9"}', "can't be read as JSON"),
        (b"[" * 100_000, "can't be read as JSON"),
        (b"[]", "is not a JSON object"),
        (b"7", "is not a JSON object"),
    ],
    ids=["empty", "cut", "latin-1", "deep", "list", "number"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_json_file_is_named(model: Path, name: str, content: bytes, part: str):
    """Nesting without end used to come through as a RecursionError."""
    (model / name).write_bytes(content)
    message = complaint(lambda: Checkpoint(model))
    assert f"{model / name}: {part}" in message
    assert REPAIR in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_link_without_its_file_is_a_broken_download(model: Path, name: str):
    """A hub folder is made of links; an optional file used to count as absent."""
    (model / name).unlink()
    (model / name).symlink_to(model / "blob")
    message = complaint(lambda: Checkpoint(model))
    assert name in message


# --- weights ----------------------------------------------------------------------------------


def test_a_whole_file_gives_its_tensors_shapes(model: Path):
    """Read from the header alone."""
    shapes = tensor_shapes(model / "model.safetensors")
    assert shapes["model.language_model.embed_tokens.weight"] == (256, 32)


def test_a_folder_without_weights_is_said_to_lack_them(model: Path):
    """Other formats are not looked for."""
    (model / "model.safetensors").unlink()
    message = complaint(Checkpoint(model).weight_files)
    assert message == f"{model}: no model*.safetensors in this folder. hint: {REPAIR}"


def test_a_shard_that_the_index_names_must_be_there(model: Path):
    """The missing file is named, not the folder."""
    shard = "model-00002-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    message = complaint(Checkpoint(model).weight_files)
    assert message == f"{model / shard}: weight file is missing. hint: {REPAIR}"


@pytest.mark.parametrize("weight_map", [["a"], None, 7, {"a": 1}, {"a": 1, "b": "c"}])
def test_a_broken_index_is_named(model: Path, weight_map: object):
    """Its shape used to come through as an AttributeError or a TypeError."""
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert f"{index}: has a broken weight_map" in complaint(Checkpoint(model).weight_files)


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 8, 9, 100, 3000])
def test_a_file_cut_inside_its_header_is_not_whole(model: Path, n_bytes: int):
    """Wherever the download broke off."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:n_bytes])
    message = complaint(Checkpoint(model).weight_files)
    assert f"{file}: is not a whole safetensors file ({n_bytes} bytes)" in message


@pytest.mark.parametrize("n_missing", [1, 1000, 300_000])
def test_a_file_cut_inside_its_data_is_truncated(model: Path, n_missing: int):
    """Both sizes are in the message."""
    file = model / "model.safetensors"
    n_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-n_missing])
    message = complaint(Checkpoint(model).weight_files)
    assert f"truncated: {n_bytes - n_missing:,} bytes, its header says {n_bytes:,}" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [],
        lambda header: "text",
        lambda header: {**header, "a": 7},
        first_tensor(shape=...),
        first_tensor(data_offsets=[0]),
        first_tensor(data_offsets=None),
        lambda header: {"a": {"shape": [1], "data_offsets": ["0", "4"]}},
        first_tensor(shape="ab"),
        first_tensor(shape=[1.5]),
    ],
)
def test_a_broken_header_is_named(model: Path, change: Callable[[Header], object]):
    """Offsets that are texts used to come through as a TypeError."""
    file = model / "model.safetensors"
    edit_header(file, change)
    assert f"{file}: has a broken safetensors header" in complaint(Checkpoint(model).weight_files)


@pytest.mark.parametrize("content", [b"\xff" * 10, b"[" * 5000, b"{}" + b"x" * 5])
def test_a_header_that_is_no_json_is_named(model: Path, content: bytes):
    """Garbage of a believable length."""
    file = model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content)
    assert f"{file}: has a broken safetensors header" in complaint(Checkpoint(model).weight_files)


def test_a_folder_in_place_of_the_weights_is_named(model: Path):
    """It used to come through as an IsADirectoryError."""
    file = model / "model.safetensors"
    file.unlink()
    file.mkdir()
    assert f"{file}: can't be read: " in complaint(Checkpoint(model).weight_files)


def test_weights_that_are_a_link_to_nothing_are_named(model: Path):
    """A hub's cache whose blobs were cleaned used to come through as a FileNotFoundError."""
    file = model / "model.safetensors"
    file.unlink()
    file.symlink_to(model / "blob")
    assert f"{file}: can't be read: No such file" in complaint(Checkpoint(model).weight_files)


# --- spellings of a config --------------------------------------------------------------------


def text_of(model: Path, **changes: Any) -> dict[str, Any]:
    """The normalised text part, after changes to the file's own; ... removes a key."""

    def change(config: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        text.update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            del text[key]

    content = json.loads((model / "config.json").read_text())
    change(content)
    (model / "config.json").write_text(json.dumps(content))
    return Checkpoint(model).text_config


FULL_LAYERS = ("4", "9", "14")  # of e2b


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_layers_may_be_named_with_leading_zeros(model: Path, digits: int):
    """As some converters sort their keys."""
    padded = {name.zfill(digits): {"head_dim": 48} for name in FULL_LAYERS}
    assert text_of(model, per_layer_config=padded)["global_head_dim"] == 48


def test_both_keys_of_a_full_layer_are_taken(model: Path):
    """The second replaces num_global_key_value_heads."""
    shape = {"head_dim": 48, "num_key_value_heads": 2}
    text = text_of(model, per_layer_config=dict.fromkeys(FULL_LAYERS, shape))
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (48, 2)
    assert "per_layer_config" not in text


def test_the_legacy_spelling_stays_as_it_is(model: Path):
    """Nothing to translate."""
    text = text_of(model, per_layer_config=..., global_head_dim=48, num_global_key_value_heads=2)
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (48, 2)


def test_null_means_absent_but_no_softcap(model: Path):
    """transformers writes many nulls, mlx-lm would take them for values."""
    text = text_of(
        model, num_experts=None, final_logit_softcapping=None, num_global_key_value_heads=None
    )
    assert "num_experts" not in text
    assert "num_global_key_value_heads" not in text
    assert text["final_logit_softcapping"] is None


def test_a_null_inside_a_layers_entry_means_absent(model: Path):
    """As anywhere else."""
    shape = {"head_dim": 48, "num_key_value_heads": None}
    text = text_of(model, per_layer_config=dict.fromkeys(FULL_LAYERS, shape))
    assert text["global_head_dim"] == 48
    assert "num_global_key_value_heads" not in text


def test_the_defaults_are_those_of_transformers(model: Path):
    """mlx-lm would take E2B's: 20 shared layers, double-wide MLPs and a softcap of 30."""
    text = text_of(
        model, num_kv_shared_layers=..., use_double_wide_mlp=..., final_logit_softcapping=...
    )
    assert text["num_kv_shared_layers"] == 0
    assert text["use_double_wide_mlp"] is False
    assert text["final_logit_softcapping"] is None


def test_a_wrapper_takes_its_vocabulary_from_its_text_part(model: Path):
    """mlx-lm would overwrite it with 262144, the wrapper's default."""
    checkpoint = Checkpoint(model)
    assert "vocab_size" not in json.loads((model / "config.json").read_text())
    assert checkpoint.config["vocab_size"] == checkpoint.text_config["vocab_size"] == 256


def test_a_unified_model_has_no_per_layer_embeddings_unless_it_says_so():
    """Its config names no hidden_size_per_layer_input; mlx-lm's default is 256."""
    folder = PARITY / "12b" / "target"
    assert "hidden_size_per_layer_input" not in (folder / "config.json").read_text()
    assert Checkpoint(folder).text_config["hidden_size_per_layer_input"] == 0


def test_another_family_is_left_alone(model: Path):
    """Its nulls and spellings are mlx-lm's to read."""
    config = {"model_type": "llama", "rope_scaling": None, "per_layer_config": {"x": 1}}
    (model / "config.json").write_text(json.dumps(config))
    assert Checkpoint(model).config == config


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            {**{key: {"head_dim": 48} for key in FULL_LAYERS}, "9": {"head_dim": 32}},
            "gives full-attention layers different",
        ),
        ({"4": {"head_dim": 48}}, "gives full-attention layers different"),
        ({"0": {"head_dim": 48}}, "layer 0 sets head_dim, only full-attention layers'"),
        ({"99": {"head_dim": 48}}, "layer 99 sets head_dim, only full-attention layers'"),
        ({"4": {"head_dim": 48, "rank": 3}}, "layer 4 sets head_dim, rank, only"),
    ],
)
def test_shapes_that_mlx_lm_cannot_express_are_refused(
    model: Path, overrides: dict[str, Any], part: str
):
    """Layers of one kind share one shape there."""
    message = complaint(lambda: text_of(model, per_layer_config=overrides))
    assert f"{model / 'config.json'}: per_layer_config" in message
    assert part in message
    assert "use a conversion made for mlx-lm" in message


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("num_hidden_layers", "four", "a whole number of at least 1"),
        ("num_hidden_layers", 0, "a whole number of at least 1"),
        ("hidden_size", 2.5, "a whole number of at least 1"),
        ("num_attention_heads", True, "a whole number of at least 1"),
        ("sliding_window", -1, "a whole number of at least 1"),
        ("max_position_embeddings", "many", "a whole number of at least 1"),
        ("vocab_size", [256], "a whole number of at least 1"),
        ("num_kv_shared_layers", -2, "a whole number of at least 0"),
        ("layer_types", "full_attention", "a list"),
        ("per_layer_config", ["x"], "a JSON object"),
        ("per_layer_config", {"x": {}}, "a JSON object"),
        ("per_layer_config", {"4": 5}, "a JSON object"),
        ("per_layer_config", {key: {"head_dim": "x"} for key in FULL_LAYERS}, "a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_limit(
    model: Path, key: str, value: object, limit: str
):
    """Most used to come through as whatever mlx-lm stumbled over."""
    message = complaint(lambda: text_of(model, **{key: value}))
    assert str(model / "config.json") in message
    assert f", must be {limit}" in message


def test_every_layer_must_have_a_type(model: Path):
    """Both numbers are in the message; it used to be a raw IndexError."""
    message = complaint(lambda: text_of(model, layer_types=["full_attention"] * 3))
    assert "number of layer_types is 3, must be one for each of 15 layers" in message


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
def test_a_config_must_name_its_own_size(model: Path, key: str):
    """Nobody's default is right for another model."""
    assert f"names no {key}" in complaint(lambda: text_of(model, **{key: ...}))


@pytest.mark.parametrize("value", ["x", [1], 7])
def test_a_text_part_must_be_an_object(model: Path, value: object):
    """It used to be a raw AttributeError."""
    edit(model / "config.json", lambda config: config.update(text_config=value))
    assert "text_config is " in complaint(lambda: Checkpoint(model))
