"""A model folder on disk: its config, its weights' headers, and what is wrong with them.

Owns finding the folder, reading and normalising its configuration, and checking the weight files
before a byte of them is loaded, so that every fault gets one clear error. Leaves building networks
to load.py. Reads files only; any thread.
"""

import json
import struct
from operator import index
from pathlib import Path
from typing import Any

from mlx_worker.errors import CheckpointError, ModelNotFound, shown
from mlx_worker.records import ASSISTANT_TYPES, TARGET_TYPES, Source

DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
REPAIR_HINT = "download or copy this model again"
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


class Checkpoint:
    """A folder in Hugging Face format whose config.json could be read.

    path    the folder
    config  normalised: see `normalise`
    """

    def __init__(self, path: Path, config_name: str = "config.json") -> None:
        self.path = path
        self.config = normalise(_read_json(path / config_name, path), path)
        self.generation_config = self._optional("generation_config.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def text_config(self) -> dict[str, Any]:
        """The part that describes the language model; the whole config where it is not nested."""
        return self.config.get("text_config") or self.config

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists() or (self.path / "tokenizer.model").exists()

    def weight_files(self) -> list[Path]:
        """Every weight file, each whole according to its own header.

        Raises CheckpointError for none, a shard named by the index but absent, or a truncated one.
        """
        files = sorted(self.path.glob("model*.safetensors"))
        for name in self._shard_names():
            if not (self.path / name).exists():
                raise CheckpointError(self.path / name, "weight file is missing", REPAIR_HINT)
        if not files:
            raise CheckpointError(self.path, "no model*.safetensors in this folder", REPAIR_HINT)
        for file in files:
            tensor_shapes(file)
        return files

    def _shard_names(self) -> list[str]:
        """The weight files that an index lists; none without an index."""
        names = self._optional("model.safetensors.index.json").get("weight_map", {})
        names = list(names.values()) if isinstance(names, dict) else [names]
        if not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                self.path / "model.safetensors.index.json", "has a broken weight_map", REPAIR_HINT
            )
        return sorted(set(names))

    def _optional(self, name: str) -> dict[str, Any]:
        file = self.path / name
        # A link whose file is gone is a broken download, not an absent file.
        return _read_json(file, self.path) if file.exists() or file.is_symlink() else {}


def folder_of(model: str | Source) -> Path:
    """The folder of a model: its source's, or what `find` finds. Raises ModelNotFound."""
    return model.folder if isinstance(model, Source) else find(model)


def find(model: str) -> Path:
    """The folder of a model that needs no catalogue to be found: a path, or `demo`.

    Raises ModelNotFound.
    """
    if model == "demo":
        return DEMO_FOLDER / "target"
    hint = "give a folder in Hugging Face format, or owner/name"
    if not model.strip():
        raise ModelNotFound(repr(model), hint=hint)
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, locked, a user unknown
        raise ModelNotFound(f"{shown(model)} ({error})", hint=hint) from error
    is_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    raise ModelNotFound(model, hint=hint if is_path else None)


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(folder, f"no {file.name} in this folder", REPAIR_HINT)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(file, f"can't be read as JSON: {error}", REPAIR_HINT) from error
    if not isinstance(content, dict):
        raise CheckpointError(file, "is not a JSON object", REPAIR_HINT)
    return content


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, from a safetensors file's header.

    Raises CheckpointError when the header is broken or the file is shorter than it says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            n_header = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            is_whole = 2 <= n_header <= min(MAX_HEADER_BYTES, size - 8)
            header = stream.read(n_header) if is_whole else b""
    except OSError as error:
        raise CheckpointError(file, f"can't be read: {error.strerror}", REPAIR_HINT) from error
    if not is_whole:
        raise CheckpointError(file, f"is not a whole safetensors file ({size} bytes)", REPAIR_HINT)
    shapes, n_data = _parse_header(file, header)
    expected = 8 + n_header + n_data
    if size < expected:
        raise CheckpointError(
            file, f"is truncated: {size:,} bytes, its header says {expected:,}", REPAIR_HINT
        )
    return shapes


def _parse_header(file: Path, header: bytes) -> tuple[dict[str, tuple[int, ...]], int]:
    """Tensor name → shape, and the bytes of data that follow the header."""
    try:
        tensors = {k: entry for k, entry in json.loads(header).items() if k != "__metadata__"}
        n_data = max((index(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        shapes = {k: tuple(map(index, entry["shape"])) for k, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(file, "has a broken safetensors header", REPAIR_HINT) from error
    return shapes, n_data


# What transformers takes where a Gemma 4 text config is silent and mlx-lm takes something else.
TEXT_DEFAULTS: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}
UNIFIED_DEFAULTS: dict[str, Any] = {
    **TEXT_DEFAULTS,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
SPELLINGS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}

AT_LEAST_ONE = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "vocab_size",
    "sliding_window",
    "max_position_embeddings",
)
AT_LEAST_ZERO = ("num_kv_shared_layers", "hidden_size_per_layer_input")
REQUIRED = ("hidden_size", "num_hidden_layers")


def normalise(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A Gemma 4 config in the one spelling mlx-lm 0.32 reads; any other model's unchanged.

    - `per_layer_config`, which current transformers writes, becomes `global_head_dim` and
      `num_global_key_value_heads`.
    - a wrapper's vocabulary size is lifted out of its text part, because mlx-lm overwrites the
      text part's with the wrapper's.
    - where the config is silent, transformers' defaults hold, not mlx-lm's.
    - `null` means absent, except for the softcap, where it means none.

    Raises CheckpointError for a value of the wrong kind, and for a per-layer shape that mlx-lm
    can't express.
    """
    model_type = config.get("model_type", "")
    if model_type not in (*TARGET_TYPES, *ASSISTANT_TYPES):
        return config
    config = dict(config)
    nested = config.get("text_config")
    if not isinstance(nested, dict | None):
        raise bad_value(path / "config.json", "text_config", nested, "a JSON object")
    text = _normalise_text(nested or config, path, is_unified="unified" in model_type)
    if not nested:
        return text
    config["text_config"] = text
    if "vocab_size" in text:
        config["vocab_size"] = text["vocab_size"]
    return config


def _normalise_text(text: dict[str, Any], path: Path, *, is_unified: bool) -> dict[str, Any]:
    kept = {key: value for key, value in text.items() if value is not None}
    defaults = UNIFIED_DEFAULTS if is_unified else TEXT_DEFAULTS
    kept = {**defaults, **kept}
    kept.pop("text_config", None)
    for key in REQUIRED:
        if key not in kept:
            raise CheckpointError(path / "config.json", f"names no {key}", REPAIR_HINT)
    types = kept.get("layer_types", [])
    if not isinstance(types, list):
        raise bad_value(path / "config.json", "layer_types", types, "a list")
    _check_numbers(kept, path)
    if "layer_types" in kept and len(types) != kept["num_hidden_layers"]:
        limit = f"one for each of {kept['num_hidden_layers']} layers"
        raise bad_value(path / "config.json", "number of layer_types", len(types), limit)
    kept.update(_full_layer_shape(kept.pop("per_layer_config", {}), types, path))
    _check_numbers(kept, path)
    return kept


def _check_numbers(text: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError for a size that no network can have."""
    for keys, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            value = text.get(key, least)
            if type(value) is not int or value < least:
                limit = f"a whole number of at least {least}"
                raise bad_value(path / "config.json", key, value, limit)


def bad_value(file: Path, key: str, value: object, limit: str) -> CheckpointError:
    """The error for a setting in one of the folder's JSON files."""
    return CheckpointError(file, f"{key} is {shown(value)}, must be {limit}", REPAIR_HINT)


def _full_layer_shape(overrides: object, layer_types: list[Any], path: Path) -> dict[str, Any]:
    """The one shape that all full layers share, in mlx-lm's spelling; {} where none is named."""
    if not overrides:
        return {}
    if not isinstance(overrides, dict):
        raise bad_value(path / "config.json", "per_layer_config", overrides, "a JSON object")
    shapes: dict[int, dict[str, Any]] = {}
    full = [i for i, kind in enumerate(layer_types) if kind == "full_attention"]
    for name, entry in overrides.items():
        if not name.isdecimal() or not isinstance(entry, dict):
            raise bad_value(
                path / "config.json", f"per_layer_config of layer {name}", entry, "a JSON object"
            )
        if int(name) not in full or not set(entry) <= set(SPELLINGS):
            raise CheckpointError(
                path / "config.json",
                f"per_layer_config of layer {int(name)} sets {', '.join(sorted(entry))}, "
                "only full-attention layers' head_dim and num_key_value_heads can be set",
                "use a conversion made for mlx-lm",
            )
        found = {SPELLINGS[key]: value for key, value in entry.items() if value is not None}
        shapes[int(name)] = found
    shared = shapes.get(full[0], {})
    if any(shapes.get(layer, {}) != shared for layer in full):
        raise CheckpointError(
            path / "config.json",
            "per_layer_config gives full-attention layers different shapes",
            "use a conversion made for mlx-lm",
        )
    return shared
