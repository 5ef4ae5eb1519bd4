"""What the tests of models share: small repositories, and a pull to its end."""

import errno
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlx_worker.models.cache import Cache
from mlx_worker.models.hub import Hub
from mlx_worker.models.pull import Finished, PullEvent, pull
from mlx_worker.models.store import Presence, Pulled, Store
from tests.hub import LocalHub

E2B = "mlx-community/gemma-4-e2b-it-4bit"
E2B_DRAFT = "mlx-community/gemma-4-E2B-it-assistant-bf16"  # the second that the catalogue names
OTHER = "someone/small-llama"
WEIGHTS = "model.safetensors"
TOKENS = {"a": 0, "b": 1}


def noise(n_bytes: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(n_bytes)


def tokenizer_json(vocab: dict[str, int] = TOKENS, **more: Any) -> bytes:
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": [], **more}).encode()


def target(n_bytes: int = 300_000, seed: int = 0, **config: Any) -> dict[str, bytes]:
    """The files of a Gemma 4 model; its weights are noise."""
    text = {"hidden_size": 32, "vocab_size": 2, "sliding_window": 8, "head_dim": 8}
    whole = {"model_type": "gemma4", "text_config": text, **config}
    return {
        "config.json": json.dumps(whole).encode(),
        "tokenizer.json": tokenizer_json(),
        WEIGHTS: noise(n_bytes, seed),
        "README.md": b"---\nlicense: apache-2.0\n---\n# A model\n",
        "modeling.py": b"raise SystemExit('a program of the repository was run')",
        "original/weights.bin": b"pickled",
    }


def draft(n_bytes: int = 50_000, seed: int = 1, **config: Any) -> dict[str, bytes]:
    """The files of its assistant, without a tokenizer."""
    whole = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 32,
        "text_config": {"vocab_size": 2, "sliding_window": 8, "head_dim": 8},
        **config,
    }
    return {"config.json": json.dumps(whole).encode(), WEIGHTS: noise(n_bytes, seed)}


@dataclass
class Shelf:
    """A store, a client of the hub, and the hub itself."""

    store: Store
    hub: Hub
    local: LocalHub

    @property
    def cache(self) -> Cache:
        return self.store.cache

    def events(self, name: str = "gemma-4-e2b", **options: Any) -> Generator[PullEvent, None, None]:
        return pull(name, self.store, self.hub, **options)

    def pull(self, name: str = "gemma-4-e2b", **options: Any) -> Finished:
        """To its end, whose event is returned."""
        *_, last = self.events(name, **options)
        assert isinstance(last, Finished)
        return last

    def pulled(self, id: str = "gemma-4-e2b") -> Pulled:
        found = self.store.find(id)
        assert found
        return found

    def presence(self, id: str = "gemma-4-e2b") -> Presence:
        return self.store.presence(self.pulled(id))

    def read(self, file: str = WEIGHTS, id: str = "gemma-4-e2b") -> bytes:
        return (self.cache.snapshot_folder(self.pulled(id).model) / file).read_bytes()

    def leftovers(self) -> list[str]:
        """Files of the cache that are neither whole blobs nor links nor notes."""
        return [path.name for path in self.cache.folder.rglob("*.incomplete")]


class OddDisk:
    """A file on a disk that takes what `room(size so far, bytes to write)` says of each write."""

    def __init__(self, file: Any, room: Callable[[int, int], int]) -> None:
        self._file = file
        self._room = room

    def __enter__(self) -> "OddDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, piece: bytes) -> int:
        return self._file.write(piece[: self._room(self._file.tell(), len(piece))])

    @staticmethod
    def with_room(_: int, n: int) -> int:
        return n

    @staticmethod
    def half_of_each(_: int, n: int) -> int:
        return max(1, n // 2)

    @staticmethod
    def full_after_100_000(size: int, n: int) -> int:
        if size + n > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return n


REAL_OPEN = Path.open


def put_partial_files_on(room: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, what a transfer appends to lies on such a disk."""

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        file = REAL_OPEN(path, *arguments, **options)
        is_partial = path.suffix == ".incomplete" and arguments and "a" in arguments[0]
        return OddDisk(file, room) if is_partial else file

    monkeypatch.setattr(Path, "open", opened)
