"""Weights and tokenizers from a checkpoint into memory, with one clear error for each fault.

Owns the dtype weights get on this machine and how a library's complaint becomes ours. Engine thread
only.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from mlx_worker.engine.checkpoint import REPAIR_HINT, Checkpoint, tensor_shapes
from mlx_worker.errors import CheckpointError, ModelError, UnsupportedModel

# In what MLX says where memory is short: its allocators', and Metal's for a pass that needs more.
TOO_LITTLE = ("malloc", "Unable to allocate", "Insufficient Memory", "OutOfMemory")
MAX_COMPLAINT_CHARS = 300  # of a library's own message, which may list every tensor


def default_dtype(device: mx.Device | None = None) -> mx.Dtype | None:
    """float32 on the CPU backend, where it is both faster and exact; elsewhere the file's own."""
    return mx.float32 if (device or mx.default_device()) == mx.Device(mx.cpu) else None


def settle(module: nn.Module) -> None:
    """Give floating weights this machine's dtype and bring them into memory."""
    dtype = default_dtype()
    if dtype is not None:
        module.set_dtype(dtype)
    module.eval()
    mx.eval(module.parameters())


def complaint(error: Exception) -> str:
    """What a library says is wrong, as one short line."""
    line = " ".join(str(error).split()).rstrip(".")
    return line[:MAX_COMPLAINT_CHARS] or type(error).__name__


def build_error(checkpoint: Checkpoint, error: Exception) -> ModelError:
    """mlx-lm's complaint as one of ours, naming the tensor's file where it names a tensor."""
    if isinstance(error, ModelError):
        return error
    line = complaint(error)
    if isinstance(error, MemoryError) or any(words in line for words in TOO_LITTLE):
        return _needs_memory(checkpoint, line)
    if "not supported" in line and "Model type" in line:
        return no_network(checkpoint)
    if "custom module" in line or "trust_remote_code" in line:
        return _needs_code(checkpoint)
    place = next(
        (file for file in checkpoint.weight_files() if any(t in line for t in tensor_shapes(file))),
        checkpoint.path,
    )
    return CheckpointError(place, f"does not fit its config.json: {line}", REPAIR_HINT)


def _needs_memory(checkpoint: Checkpoint, line: str) -> ModelError:
    return ModelError(
        f"{checkpoint.path}: there is too little memory to load it: {line}",
        hint="choose a smaller or more quantised one, or end other programs",
    )


def no_network(checkpoint: Checkpoint) -> UnsupportedModel:
    return UnsupportedModel(
        f"model_type {checkpoint.model_type or 'absent'} in {checkpoint.path / 'config.json'}",
        hint="mlx-lm has no network of this type; choose another model",
    )


def _needs_code(checkpoint: Checkpoint) -> UnsupportedModel:
    return UnsupportedModel(
        f"{checkpoint.path} needs its own Python code, which is never run here",
        hint="choose a conversion that mlx-lm can load by itself",
    )


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerWrapper:
    """The tokenizer of a folder. Code that comes with it is never run, nor offered to be."""
    if not checkpoint.has_tokenizer:
        raise CheckpointError(checkpoint.path, "no tokenizer.json in this folder", REPAIR_HINT)
    try:
        return load(checkpoint.path, {"trust_remote_code": False})
    except Exception as error:  # the tokenizers library raises bare Exception on a broken file
        if "trust_remote_code" in str(error):
            raise _needs_code(checkpoint) from error
        raise CheckpointError(
            checkpoint.path, f"its tokenizer can't be loaded: {complaint(error)}", REPAIR_HINT
        ) from error
