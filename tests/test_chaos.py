"""Random requests against a real worker: no reply is wrong, none is lost, nothing stays behind.

The worker under test runs with a watch on its event loop; a second one, which never drafts and
keeps no conversations, writes what its replies are compared with.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import CHAT, COMPLETION, Ask, Clients, Course, drawn
from tests.workers import Worker, wait_until

WATCHED = Path(__file__).parent / "watched_worker.py"
OUTCOMES = ("ok", "refused", "busy", "cancelled", "failed")
BLOCKED_MS = 50.0  # of one callback on the loop's own thread
NO_PREFIXES = json.dumps({"kv_prefix_cache": False})


@dataclass(frozen=True)
class Memory:
    """What a worker holds while it has nothing to do. rss_bytes: None where there is no /proc."""

    active_bytes: int
    rss_bytes: int | None

    def grew(self, since: "Memory") -> tuple[float, float]:
        """Both as shares of what they were."""
        rss = 0.0
        if self.rss_bytes is not None and since.rss_bytes is not None:
            rss = self.rss_bytes / since.rss_bytes - 1
        return self.active_bytes / since.active_bytes - 1, rss


@contextmanager
def running(home: Path, *arguments: str, keeps_prefixes: bool, loop: Path) -> Iterator[Worker]:
    home.mkdir()
    if not keeps_prefixes:
        (home / "policies.json").write_text(NO_PREFIXES)
    worker = Worker(home, *arguments, program=(str(WATCHED), str(loop)))
    try:
        yield worker
        assert worker.stop() == 0
    finally:
        worker.process.kill()
        worker.ended()


def memory_of(worker: Worker) -> Memory:
    """Once nothing runs. The prefix cache's bytes, which its budget bounds, are left out."""
    wait_until(lambda: is_idle(worker))
    status = worker.status()
    kept = sum(model["kv_prefix_cache"]["bytes"] for model in status["models"])
    rss = None
    if sys.platform == "linux":
        lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
        rss = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return Memory(status["memory"]["active_bytes"] - kept, rss and rss - kept)


def is_idle(worker: Worker) -> bool:
    return worker.metric("mlx_worker_running") == worker.metric("mlx_worker_queued") == 0


def outcomes(worker: Worker) -> dict[str, float]:
    """outcome → requests, of both endpoints."""
    return {
        outcome: sum(
            worker.metric(f'mlx_worker_requests_total{{endpoint="{name}",outcome="{outcome}"}}')
            for name in ("chat", "completion")
        )
        for outcome in OUTCOMES
    }


def replies(worker: Worker) -> float:
    """What both routes answered or were left by, whatever the status."""
    starts = [f'mlx_worker_http_replies_total{{route="{path}"' for path in (CHAT, COMPLETION)]
    lines = worker.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(tuple(starts)))


def check_counts(worker: Worker, course: Course) -> None:
    """Each request has one outcome: what its client did, as far as that decides."""
    found, ended = outcomes(worker), course.ended
    assert sum(found.values()) == replies(worker)
    assert found["failed"] == found["busy"] == 0
    assert found["refused"] == ended["bad"] + ended["too_long"]
    left = sum(ended[kind] for kind in ("left", "left_in_line", "cut_upload", "half_closed"))
    whole = ended["whole"] + ended["stream"]
    assert whole <= found["ok"] <= whole + left
    assert found["cancelled"] <= left


def serve(worker: Worker, plain: Worker, quarters: list[list[Ask]]) -> tuple[Course, list[Memory]]:
    """Ask everything, a quarter at a time; the memory after each."""
    clients, held = Clients(worker.url, plain.url), []
    for quarter in quarters:
        asyncio.run(clients.run(quarter))
        held.append(memory_of(worker))
    return clients.course, held


def check(
    folder: Path, seed: int, n: int, *, keeps_prefixes: bool, active: float, rss: float
) -> None:
    """The whole course, and what must be true of it.

    active, rss  how much both memories may have grown since the first quarter, as shares
    """
    asks, loop = drawn(seed, n), folder / "loop.json"
    quarters = [asks[i * n // 4 : (i + 1) * n // 4] for i in range(4)]
    with (
        running(folder / "a", keeps_prefixes=keeps_prefixes, loop=loop) as worker,
        running(
            folder / "b", "--draft", "none", keeps_prefixes=False, loop=folder / "plain.json"
        ) as plain,
    ):
        course, held = serve(worker, plain, quarters)
        assert course.wrong == []
        assert set(course.health) == {200}
        check_counts(worker, course)
        grew = held[-1].grew(held[0])
    print(f"{n} requests: {dict(course.ended)}; grew {grew[0]:+.1%} active, {grew[1]:+.1%} RSS")
    watched = json.loads(loop.read_text())
    print(f"{watched['callbacks']} callbacks, the slowest: {watched['slowest']}")
    assert watched["slowest"][0][0] < BLOCKED_MS
    assert watched["collection_ms"] < BLOCKED_MS
    assert grew[0] < active
    assert grew[1] < rss


@pytest.mark.timeout(180)
def test_random_requests_leave_nothing_behind(tmp_path: Path):
    """No reply is wrong, each is counted, /health is well, no callback holds the loop up.

    The allowance for memory is for what the first replies of each kind still set up.
    """
    check(tmp_path, seed=0, n=20, keeps_prefixes=True, active=0.1, rss=0.4)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("keeps_prefixes", "rss"), [(False, 0.05), (True, 0.12)])
def test_a_thousand_random_requests_leave_nothing_behind(
    tmp_path: Path, keeps_prefixes: bool, rss: float
):
    """The same, long enough to see a leak.

    With prefixes kept, RSS grows by more than the cache says that it holds: MLX keeps freed buffers
    of many lengths for reuse (docs/LOG.md).
    """
    check(tmp_path, seed=2, n=1000, keeps_prefixes=keeps_prefixes, active=0.05, rss=rss)
