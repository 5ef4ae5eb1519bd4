"""A quantised copy of an unquantised assistant, in a folder of its own.

Owns which bits and group sizes there are, what is refused, and that the folder is whole or not
there. Leaves the quantising to mlx-lm, and whether the copy pays to bench/drafts.py. Blocking; the
thread that owns MLX.
"""

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_worker.engine.assistant import Assistant
from mlx_worker.engine.checkpoint import ASSISTANT_TYPES, HUB_FILES, Checkpoint, tensor_shapes
from mlx_worker.engine.pairing import read_assistant
from mlx_worker.errors import CheckpointError, InvalidParameter, UnsupportedModel

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
OF_WEIGHTS = (".safetensors", ".safetensors.index.json")
QUANTIZATION_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True)
class QuantizedCopy:
    """What was written.

    n_layers  that are quantised
    left      names of those that stay as they are: their width isn't divisible by the group size
    n_bytes   of its weights; before_bytes: of the weights that it was made of
    """

    folder: Path
    bits: int
    group_size: int
    n_layers: int
    left: tuple[str, ...]
    n_bytes: int
    before_bytes: int


def check_quantization(bits: int, group_size: int) -> None:
    """Raises InvalidParameter for what MLX can't pack."""
    for name, value, allowed in (("bits", bits, BITS), ("group-size", group_size, GROUP_SIZES)):
        if value not in allowed:
            one_of = f"one of {', '.join(map(str, allowed))}"
            raise InvalidParameter(f"--{name}", value, one_of)


def quantize_assistant(
    source: Path, place: Path, bits: int = 4, group_size: int = 64
) -> QuantizedCopy:
    """Write a quantised copy of the assistant in `source` to `place`, instead of what is there.

    The folder is in Hugging Face format, as mlx-lm writes it, and appears only when it is whole.

    Raises InvalidParameter, CheckpointError, and UnsupportedModel for what is no assistant, is
    quantised already, or has no layer that can be.
    """
    check_quantization(bits, group_size)
    checkpoint = Checkpoint(source)
    _require_unquantised(checkpoint)
    network = read_assistant(checkpoint, lambda module: mx.eval(module.parameters()))
    before_bytes = network.nbytes
    config = _quantize(network, _config_of(source), bits, group_size)
    done, left = _packed_or_not(network)
    if not done:
        least = GROUP_SIZES[0]
        raise UnsupportedModel(
            f"{source}: no layer's width is divisible by the group size {group_size}",
            hint=f"--group-size {least}" if group_size > least else "its layers are too narrow",
        )
    with _appearing(place) as folder:
        _write(folder, network, config)
        _copy_others(source, folder)
    return QuantizedCopy(
        place, bits, group_size, len(done), tuple(left), network.nbytes, before_bytes
    )


def _require_unquantised(checkpoint: Checkpoint) -> None:
    kind, path = checkpoint.model_type, checkpoint.path
    if kind not in ASSISTANT_TYPES:
        raise UnsupportedModel(
            f"{path} is no assistant but a {kind or 'model without a model_type'}",
            hint="only the family's own assistants are quantised here",
        )
    names = (name for file in checkpoint.weight_files() for name in tensor_shapes(file))
    if any(name.endswith(".scales") for name in names):
        found = checkpoint.config.get("quantization") or {}
        how = f"{found.get('bits', '?')}-bit, groups of {found.get('group_size', '?')}"
        raise UnsupportedModel(
            f"{path} is quantised already: {how}",
            hint="it is used as it is; to compare others, pull one with --draft",
        )


def _config_of(folder: Path) -> dict[str, Any]:
    """The file's own spelling, which a copy keeps; without a quantisation that isn't there."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}


def _quantize(
    network: Assistant, config: dict[str, Any], bits: int, group_size: int
) -> dict[str, Any]:
    """Quantise in place; returns the config that says so."""
    with redirect_stdout(io.StringIO()):  # it prints its bits per weight; ours is for data
        _, config = mlx_lm_utils.quantize_model(network, config, group_size, bits)
    mx.eval(network.parameters())
    return config


def _packed_or_not(network: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the layers that are quantised, and of those that could have been."""
    layers = network.named_modules()
    done = [name for name, layer in layers if "scales" in layer]
    return sorted(done), sorted(name for name, layer in layers if hasattr(layer, "to_quantized"))


@contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """A folder to fill, which is `place` once it is whole; nothing is left of one that isn't.

    Raises CheckpointError where it can't be written.
    """
    room: Path | None = None
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = Path(mkdtemp(".new", f".{place.name}", place.parent))
        new, old = room / "new", room / "old"
        new.mkdir()
        yield new
        if place.exists():
            place.rename(old)
        new.rename(place)
    except (OSError, RuntimeError) as error:  # MLX's own writing raises the second
        what = getattr(error, "strerror", None) or " ".join(str(error).split())
        hint = "free some space, or see who owns the folder"
        raise CheckpointError(place, f"can't be written: {what}", hint) from error
    finally:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)


def _write(folder: Path, network: Assistant, config: dict[str, Any]) -> None:
    """Weights and config, as mlx-lm writes them."""
    if network.has_centroids:
        head = network.masked_embedding
        head.token_ordering = head.token_ordering.astype(mx.int64)  # as it is published
    mlx_lm_utils.save_model(folder, network)
    mlx_lm_utils.save_config(config, folder / "config.json")
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _copy_others(source: Path, folder: Path) -> None:
    """The other files that a model is made of: generation settings, tokenizer, template."""
    names = {file.name for pattern in HUB_FILES for file in source.glob(pattern)}
    for name in sorted(names):
        if name != "config.json" and not name.endswith(OF_WEIGHTS):
            shutil.copyfile(source / name, folder / name)
