"""Prints the menu of mlx-worker's icon for eight states of a worker: python scripts/menus.py

The states are described here, the menus made by the real model. tests/vectors/menus.txt is what
this printed last, and a test compares the two.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_worker.control.status import WHY_MEASURING
from mlx_worker.errors import ModelTooLarge
from mlx_worker.local import Seen
from mlx_worker.records import Settings, Status, effective_status, status_text
from mlx_worker.service.manager import ServiceState
from mlx_worker.service.menubar import menu_of, printed

LOGS = Path("/Users/ada/Library/Logs/mlx-worker")
UNIT = Path("/Users/ada/Library/LaunchAgents/io.github.mlx-worker.worker.plist")
RUNS = ServiceState("worker", UNIT, is_installed=True, is_enabled=True, is_loaded=True, pid=412)
ENDED = replace(RUNS, is_loaded=False, pid=None)
SPEED = 58.2
ON = Status("on", speedup=0.24, depth=4, acceptance=0.71)
ON = replace(ON, why="12 requests were 24 % faster with drafts")
OFF = Status("off", speedup=-0.18, depth=1, acceptance=0.22)
OFF = replace(OFF, why="15 requests would have been 18 % slower with drafts")
MEASURING = Status("measuring", why=WHY_MEASURING)


def ready(measured: Status = ON, **status: Any) -> Seen:
    """A worker with a model in memory; status: what else it says of itself."""
    settings = status.pop("settings", Settings())
    shown = effective_status(
        measured,
        has_draft=True,
        is_off_by_settings=settings.speculative_decoding == "off",
        is_paused=settings.run_requests_together,
    )
    model = {"id": "gemma-4-12b-it-4bit", "is_loaded": True, "measured": asdict(shown)}
    said = {
        "models": [{**model, "speculation": status_text(shown)}],
        "queue": {"running": 0, "waiting": 0, "limit": 32},
        "settings": asdict(settings),
        "recent": [{"tokens_per_s": SPEED, "ago_s": 12.0}],
        **status,
    }
    return Seen("ready", LOGS, pid=412, address="http://127.0.0.1:8321/", status=said)


def link(state: str, why: str = "") -> dict[str, Any]:
    return {"url": "wss://gateway.example", "state": state, "since_s": 95.0, "why": why,
            "name": "ada's Mac"}  # fmt: skip


def described() -> Iterator[tuple[str, Seen, ServiceState]]:
    busy = {"running": 1, "waiting": 2, "limit": 32}
    too_large = ModelTooLarge(
        "gemma-4-27b-it-bf16", need_bytes=54_000_000_000, budget_bytes=12_000_000_000
    )
    yield "not running", Seen("stopped", LOGS), ENDED
    yield "measuring", ready(MEASURING, queue=busy), RUNS
    yield "on", ready(link=link("connected")), RUNS
    yield "off", ready(OFF), RUNS
    yield "off by settings", ready(settings=Settings(speculative_decoding="off")), RUNS
    yield "paused", ready(settings=Settings(run_requests_together=True)), RUNS
    rejected = link("key rejected", "the gateway doesn't know this key")
    yield "gateway key rejected", ready(recent=[], link=rejected), RUNS
    yield "out of memory", Seen("refused", LOGS, error=str(too_large)), replace(ENDED, last_exit=0)


def text() -> str:
    return "\n".join(
        f"=== {name}\n{printed(menu_of(seen, service))}" for name, seen, service in described()
    )


if __name__ == "__main__":
    print(text(), end="")
