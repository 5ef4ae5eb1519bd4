"""A bench report (JSON on stdin) → one row in FOLDER/<machine>.csv, with date, versions, commit."""

import csv
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ("text", "speedup", "low", "high", "mode", "depth")


def output(*command: str) -> str:
    """What a command prints; nothing when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def chip() -> str:
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string")
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    release = re.match(r"\d+\.\d+", platform.release())
    return f"{platform.system()} {release[0] if release else ''}".strip()


def commit() -> str:
    """The checked-out commit, with a + when the work tree differs from it."""
    head = output("git", "rev-parse", "--short=12", "HEAD")
    changed = output("git", "status", "--porcelain", "--", ".", ":!docs/bench")
    return f"{head}+" if changed else head


def row(report: dict[str, Any]) -> dict[str, Any]:
    verdict = report["verdict"] or {}  # null when no draft was measured
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": chip(),
        "system": system(),
        "device": report["machine"]["device"],
        "blas": report["machine"]["blas"],
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx-worker", "mlx", "mlx-lm")},
        "commit": commit(),
        "model": report["model"],
        "draft": report["draft"],
        **{key: verdict.get(key) for key in FIGURES},
    }


def append(file: Path, entry: dict[str, Any]) -> None:
    """Add one line; a new file, or one with other columns, gets a header line first."""
    header = list(entry)
    lines = file.read_text().splitlines() if file.exists() else []
    with file.open("a", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        if ",".join(header) not in lines:
            writer.writerow(header)
        writer.writerow(entry.values())


def main() -> None:
    try:
        entry = row(json.load(sys.stdin))
    except (ValueError, KeyError) as error:
        sys.exit(f"no row added: the last line of bench is not its JSON report ({error})")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", entry["machine"].lower()).strip("-")
    append(folder / f"{name}.csv", entry)
    print(f"added a row to {folder / name}.csv", file=sys.stderr)


if __name__ == "__main__":
    main()
