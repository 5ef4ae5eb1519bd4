"""A hub of the test's own, and small repositories on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_worker.models import pull, transfer
from mlx_worker.models.cache import Cache
from mlx_worker.models.hub import Hub
from mlx_worker.models.store import Store
from tests.hub import LocalHub
from tests.models.shelf import E2B, E2B_DRAFT, Shelf, draft, target


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The server; waits between tries are a hundredth of what they are for users."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(transfer, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(pull, "LOOK_S", 0.002)
    with LocalHub(tmp_path / "served") as hub:
        yield hub


@pytest.fixture
def e2b(shelf: Shelf) -> Shelf:
    """The same, with gemma-4-e2b and its draft on the hub."""
    shelf.local.add(E2B, target())
    shelf.local.add(E2B_DRAFT, draft())
    return shelf


@pytest.fixture
def shelf(tmp_path: Path, local: LocalHub) -> Shelf:
    """A worker's folder and cache, empty, and the client of that hub."""
    store = Store(tmp_path / ".mlx-worker", Cache(tmp_path / "cache"))
    return Shelf(store, Hub(local.endpoint), local)
