"""What the processor is called. Needs no MLX, so that it can be said where MLX can't be loaded.

Blocking; any thread.
"""

import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ANSWERS_S = 5.0


def chip_name() -> str:
    """The processor as its maker calls it, else the architecture."""
    if platform.system() == "Darwin":
        name = output_or_empty(["sysctl", "-n", "machdep.cpu.brand_string"])
    else:
        name = chip_in_cpuinfo(read_or_empty("/proc/cpuinfo"))
    return name.strip() or platform.machine() or "unknown"


def chip_in_cpuinfo(text: str) -> str:
    """The first `model name` of /proc/cpuinfo; empty where the kernel gives none (most ARM)."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def read_or_empty(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def output_or_empty(command: Sequence[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ANSWERS_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
