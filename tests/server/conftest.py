"""What tests of downloads get: a hub on this machine, and a folder for what comes from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_worker.models.store import Store
from tests.hub import LocalHub
from tests.server.library import store_in, tiny_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with tiny_hub(tmp_path / "hub", monkeypatch) as hub:
        yield hub


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_in(tmp_path)
