"""Replies with figures written by hand, for tests of the arithmetic."""

from collections.abc import Mapping

from mlx_worker.bench.run import OFF, Arm, Reply, Request, Served
from mlx_worker.bench.workloads import Prompt
from mlx_worker.records import Timing

N_TOKENS = 11  # ten steps after the first id


def reply(
    step_ms: float, *, ids: tuple[int, ...] | None = None, drafted: int = 0, accepted: int = 0
) -> Reply:
    """N_TOKENS ids at step_ms each, after 100 ms of prefill; 4 rounds where ids were drafted."""
    ids = tuple(range(N_TOKENS)) if ids is None else ids
    decode_ms = step_ms * (len(ids) - 1)
    timing = Timing(
        latency_ms=100 + decode_ms,
        ttft_ms=100,
        decode_ms=decode_ms,
        completion_tokens=len(ids),
        rounds=4 if drafted else 0,
        round_tokens=4 + accepted if drafted else 0,
        target_passes=5 if drafted else len(ids),
        drafted=drafted,
        accepted=accepted,
    )
    return Reply(ids, timing)


def served(
    seed: int, off_ms: float, on_ms: Mapping[int, float], *, workload: str = "chat", text: str = ""
) -> Served:
    """One request: milliseconds a token when off, and by depth of the assistant."""
    content = text or f"{workload} {seed}"
    prompt = Prompt(workload, ({"role": "user", "content": content},))
    replies = {OFF: reply(off_ms)}
    for depth, step_ms in on_ms.items():
        replies[Arm("assistant", depth)] = reply(step_ms, drafted=4 * depth, accepted=3)
    return Served(Request(prompt, (5, 6, 7), seed), replies)
