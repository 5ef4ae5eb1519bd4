"""What every test gets: its own home folder, no hub, a guard on the event loop."""

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

# huggingface-hub reads this once, when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked mac is skipped elsewhere, also when -m asks for it.

    Where several processes share the files, those of whole workers, which take longest, come first,
    so that none is left with one of them at the end.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    if sys.platform == "darwin":
        return
    for item in items:
        if item.get_closest_marker("mac"):
            item.add_marker(pytest.mark.skip(reason="needs macOS"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own HOME, the worker's folder and the hub's in it; no MLX_WORKER_* leaks in."""
    for name in os.environ:
        if name.startswith("MLX_WORKER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLX_WORKER_HOME", str(tmp_path / ".mlx-worker"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    if constants := sys.modules.get("huggingface_hub.constants"):  # it reads HF_HOME only once
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path


@pytest.fixture(autouse=True)
def no_blocking_in_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a coroutine test, product code that blocks the event loop raises BlockingError.

    Other tests run no loop, so they are left alone: the guard patches locks and files of the
    whole process.
    """
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    with blockbuster_ctx("mlx_worker"):
        yield
