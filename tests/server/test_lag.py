"""How late the event loop is, as the worker shows it."""

import asyncio
import time

from aiohttp import web

from mlx_worker.server.lag import LoopLag
from tests.server.local import ECHO, JSON, serving


def test_the_worst_of_a_minute_is_forgotten_after_it():
    """That of all is kept; of two late wakings the later one stays longer."""
    now = 0.0
    lag = LoopLag(lambda: now)
    for at, late_ms in ((0.0, 80.0), (10.0, 5.0), (20.0, 30.0), (30.0, 1.0)):
        now = at
        lag.note(late_ms)
    assert lag.recent_ms == 80
    now = 61.0
    assert lag.recent_ms == 30
    now = 81.0
    assert lag.recent_ms == 1
    now = 91.0
    assert lag.shown() == {"last_minute": 0.0, "worst": 80.0}


async def test_a_callback_that_blocks_is_seen():
    """In /status and in the metrics, as long as it took."""

    async def block(_: web.Request) -> web.Response:
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.05)  # the watch wakes while the request is still there
        return web.Response()

    async with serving(routes=[*ECHO, web.post("/block", block)]) as local:
        before = (await local.get("/status")).json()["loop_lag_ms"]
        await local.post(JSON, path="/block")
        after = (await local.get("/status")).json()["loop_lag_ms"]
        text = (await local.get("/metrics")).body.decode()
    assert before["worst"] < after["worst"]
    assert after["worst"] == after["last_minute"]
    shown = next(line for line in text.splitlines() if line.startswith("mlx_worker_loop_lag_s"))
    assert float(shown.split()[1]) * 1000 >= after["last_minute"] - 0.1
    assert after["worst"] > 100
