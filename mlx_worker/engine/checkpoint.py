"""A model folder on disk: its config, its weights' headers, and what is wrong with them.

Owns finding the folder, reading and normalising its configuration, and checking the weight files
before a byte of them is loaded, so that every fault gets one clear error. Leaves building networks
to load.py. Reads files only; any thread.
"""

import json
import struct
from pathlib import Path
from typing import Any

from mlx_worker.errors import CheckpointError, ModelNotFound

DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
REPAIR_HINT = "download or copy this model again"
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified")
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


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
        index = self._optional("model.safetensors.index.json")
        for name in sorted(set(index.get("weight_map", {}).values())):
            if not (self.path / name).exists():
                raise CheckpointError(self.path / name, "weight file is missing", REPAIR_HINT)
        if not files:
            raise CheckpointError(self.path, "no model*.safetensors in this folder", REPAIR_HINT)
        for file in files:
            tensor_shapes(file)
        return files

    def _optional(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return _read_json(file, self.path) if file.exists() else {}


def find(model: str) -> Path:
    """The folder of a model: a path, `demo`, or a hub id (downloaded through huggingface-hub).

    Raises ModelNotFound.
    """
    if model == "demo":
        return DEMO_FOLDER / "target"
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelNotFound(model, hint="give a folder in Hugging Face format, or owner/name")
    return _from_hub(model)


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            repo, hint="it is not on this machine and the hub can't be reached; check the network"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise ModelNotFound(repo, hint=f"the hub answered {status}; check the name") from error
    except HFValidationError as error:
        raise ModelNotFound(repo, hint="a hub id looks like owner/name") from error


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    if not file.exists():
        raise CheckpointError(folder, f"no {file.name} in this folder", REPAIR_HINT)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(file, f"can't be read as JSON: {error}", REPAIR_HINT) from error
    if not isinstance(content, dict):
        raise CheckpointError(file, "is not a JSON object", REPAIR_HINT)
    return content


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, from a safetensors file's header.

    Raises CheckpointError when the header is broken or the file is shorter than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        n_header = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= n_header <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                file, f"is not a whole safetensors file ({size} bytes)", REPAIR_HINT
            )
        try:
            header = json.loads(stream.read(n_header))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            n_data = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointError(file, "has a broken safetensors header", REPAIR_HINT) from error
    expected = 8 + n_header + n_data
    if size < expected:
        raise CheckpointError(
            file, f"is truncated: {size:,} bytes, its header says {expected:,}", REPAIR_HINT
        )
    return shapes


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


def normalise(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A Gemma 4 config in the one spelling mlx-lm 0.32 reads; any other model's unchanged.

    - `per_layer_config`, which current transformers writes, becomes `global_head_dim` and
      `num_global_key_value_heads`.
    - a wrapper's vocabulary size is lifted out of its text part, because mlx-lm overwrites the
      text part's with the wrapper's.
    - where the config is silent, transformers' defaults hold, not mlx-lm's.
    - `null` means absent, except for the softcap, where it means none.

    Raises CheckpointError for a per-layer shape that mlx-lm can't express.
    """
    model_type = config.get("model_type", "")
    if model_type not in (*TARGET_TYPES, *ASSISTANT_TYPES):
        return config
    config = dict(config)
    nested = config.get("text_config")
    text = _normalise_text(nested or config, path, is_unified="unified" in model_type)
    if nested is None:
        return text
    config["text_config"] = text
    if "vocab_size" in text:
        config["vocab_size"] = text["vocab_size"]
    return config


def _normalise_text(text: dict[str, Any], path: Path, *, is_unified: bool) -> dict[str, Any]:
    kept = {key: value for key, value in text.items() if value is not None}
    defaults = UNIFIED_DEFAULTS if is_unified else TEXT_DEFAULTS
    kept = {**defaults, **kept}
    overrides = kept.pop("per_layer_config", None) or {}
    kept.update(_full_layer_shape(overrides, kept.get("layer_types") or [], path))
    return kept


def _full_layer_shape(
    overrides: dict[str, dict[str, Any]], layer_types: list[str], path: Path
) -> dict[str, Any]:
    """The one shape that all full layers share, in mlx-lm's spelling; {} where none is named."""
    shapes: list[dict[str, Any]] = []
    for index, entry in overrides.items():
        full = int(index) < len(layer_types) and layer_types[int(index)] == "full_attention"
        if not full or not set(entry) <= set(SPELLINGS):
            raise CheckpointError(
                path / "config.json",
                f"per_layer_config of layer {int(index)} sets {', '.join(sorted(entry))}, "
                "only full-attention layers' head_dim and num_key_value_heads can be set",
                "use a conversion made for mlx-lm",
            )
        shapes.append({SPELLINGS[key]: value for key, value in entry.items()})
    if any(shape != shapes[0] for shape in shapes):
        raise CheckpointError(
            path / "config.json",
            "per_layer_config gives full-attention layers different shapes",
            "use a conversion made for mlx-lm",
        )
    return shapes[0] if shapes else {}
