"""Weights and tokenizers from a checkpoint into memory, with one clear error for each fault.

Owns the dtype weights get on this machine and how a library's complaint becomes ours. Engine thread
only.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from mlx_worker.engine.checkpoint import REPAIR_HINT, Checkpoint, tensor_shapes
from mlx_worker.errors import CheckpointError, UnsupportedModel

MAX_COMPLAINT_CHARS = 300  # of a library's own message, which may list every tensor


def default_dtype() -> mx.Dtype | None:
    """float32 on the CPU backend, where it is both faster and exact; elsewhere the file's own."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None


def settle(module: nn.Module) -> None:
    """Give floating weights this machine's dtype and bring them into memory."""
    dtype = default_dtype()
    if dtype is not None:
        module.set_dtype(dtype)
    module.eval()
    mx.eval(module.parameters())


def build_error(checkpoint: Checkpoint, error: Exception) -> Exception:
    """mlx-lm's complaint as one of ours, naming the tensor's file where it names a tensor."""
    line = " ".join(str(error).split())[:MAX_COMPLAINT_CHARS] or type(error).__name__
    if "not supported" in line and "Model type" in line:
        return UnsupportedModel(
            f"model_type {checkpoint.model_type or 'absent'} in {checkpoint.path / 'config.json'}",
            hint="mlx-lm has no network of this type; choose another model",
        )
    if "custom module" in line or "trust_remote_code" in line:
        return UnsupportedModel(
            f"{checkpoint.path} needs its own Python code, which is never run here",
            hint="choose a conversion that mlx-lm can load by itself",
        )
    place = next(
        (file for file in checkpoint.weight_files() if any(t in line for t in tensor_shapes(file))),
        checkpoint.path,
    )
    return CheckpointError(place, f"does not fit its config.json: {line}", REPAIR_HINT)


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerWrapper:
    if not checkpoint.has_tokenizer:
        raise CheckpointError(checkpoint.path, "no tokenizer.json in this folder", REPAIR_HINT)
    try:
        return load(checkpoint.path)
    except Exception as error:  # the tokenizers library raises bare Exception on a broken file
        raise CheckpointError(
            checkpoint.path / "tokenizer.json", f"can't be read: {error}", REPAIR_HINT
        ) from error
