"""What the machine is called, and what follows from the costs."""

import platform

import pytest

from mlx_worker.bench import chip, facts
from mlx_worker.bench.facts import Costs

MAPS = """\
7f0 r-xp 0 fe:00 1  /usr/lib/libm.so.6
7f1 r-xp 0 fe:00 2  /site-packages/numpy.libs/libscipy_openblas64_-32a4b2a6.so
7f2 r-xp 0 fe:00 3  /site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0
7f3 rw-p 0 00:00 0
"""


def test_the_chip_is_the_model_name_of_the_first_processor():
    """As Linux on x86 lists it, once per core."""
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nprocessor\t: 1\nmodel name\t: other\n"
    assert chip.chip_in_cpuinfo(text) == "AMD EPYC 9B14"


def test_without_a_model_name_the_chip_is_the_architecture(monkeypatch: pytest.MonkeyPatch):
    """Most ARM kernels name none, and a tool may be missing."""
    assert chip.chip_in_cpuinfo("processor\t: 0\nBogoMIPS\t: 50.00\n") == ""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setenv("PATH", "/nowhere")
    assert chip.chip_name() == platform.machine()


def test_a_file_or_a_command_that_is_missing_reads_as_nothing():
    """The card goes on without it."""
    assert chip.read_or_empty("/nowhere/cpuinfo") == ""
    assert chip.output_or_empty(["no-such-command"]) == ""


def test_the_reference_blas_is_told_from_numpys_own():
    """numpy's private OpenBLAS is mapped too, but MLX doesn't call it."""
    assert facts.blas_name(MAPS) == "reference BLAS (libblas-bd8a282c.so.3.10.0)"


def test_a_preloaded_openblas_is_seen():
    """It comes before the wheel's own."""
    maps = MAPS + "7f4 r-xp 0 fe:00 4  /usr/lib/x86_64-linux-gnu/libopenblas.so.0\n"
    assert facts.blas_name(maps) == "OpenBLAS, preloaded (libopenblas.so.0)"
    assert facts.blas_name("") is None


def test_break_even_and_ceiling_follow_from_the_costs():
    """A round at depth 2: a pass of 3 rows and two draft steps, for at most 3 tokens."""
    costs = Costs({1: 10.0, 3: 12.0}, {"assistant": 1.5}, read_bytes=1000, read_ms=1.0)
    assert costs.break_even("assistant", 2) == pytest.approx(1.5)
    assert costs.ceiling("assistant", 2) == pytest.approx(1.0)
    assert costs.break_even("lookup", 2) == pytest.approx(1.2)
