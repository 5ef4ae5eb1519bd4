"""The picture, and what to say when it can't be drawn."""

import sys
from pathlib import Path

import pytest

from mlx_worker.bench import plot, run
from mlx_worker.errors import ConfigError
from tests.bench.replies import served


def test_without_matplotlib_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch):
    """One line, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib.*pip install matplotlib"):
        plot.check(Path("bench.png"))


def test_a_name_that_is_no_picture_is_refused():
    """With the formats that are."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"bench.txt: no picture format.*\.png"):
        plot.check(Path("bench.txt"))


@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_a_picture_is_written(tmp_path: Path, name: str):
    """Also when a workload had a single request, which has no interval."""
    pytest.importorskip("matplotlib")
    batch = [served(0, 10.0, {1: 9.0, 2: 8.0}), served(1, 10.0, {1: 9.5, 2: 9.0}, workload="json")]
    plot.draw(run.rows_of(batch), "demo on AMD EPYC", tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000
