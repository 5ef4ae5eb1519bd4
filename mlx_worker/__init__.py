"""mlx-worker: text generation on a Mac, faster by speculative decoding with a draft model.

Owns the version and the lazy Python door (`from mlx_worker import load`). Imports nothing, so
that commands which never touch a model start at once.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "load":
        from mlx_worker.pair import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
