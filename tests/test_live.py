"""Decisions on the real engine: live requests in, a verdict out, on the two kinds of machine here.

MLX's own CPU build links the reference BLAS, with which a pass over k rows costs about k single
rows. With OpenBLAS preloaded rows are nearly free, as on a GPU. The same pair gains on the one and
not on the other.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mlx_worker
from mlx_worker import decisions
from mlx_worker.bench.workloads import BUILT_IN, COUNT, JSON, STORY
from mlx_worker.control.controller import Controller
from mlx_worker.control.log import replay
from mlx_worker.control.pacer import RequestPacer
from mlx_worker.engine.costs import cost_curve
from mlx_worker.engine.load import LoadedPair, load_pair
from mlx_worker.engine.session import generate_events
from mlx_worker.records import Done, GenerationRequest, Text, Traffic
from tests.oracle import oracle_pair

OPENBLAS = next(
    (
        str(path)
        for folder in ("/usr/lib", "/usr/lib64")
        for path in sorted(Path(folder).rglob("libopenblas.so.0"))
    ),
    None,
)
needs_openblas = pytest.mark.skipif(OPENBLAS is None, reason="no libopenblas.so.0 to preload")
BLAS = [pytest.param(None, id="reference"), pytest.param(OPENBLAS, id="openblas")]


def preload(blas: str | None) -> dict[str, str]:
    """With one thread: two that wait for each other are slower than one on a busy machine."""
    return {"LD_PRELOAD": blas, "OPENBLAS_NUM_THREADS": "1"} if blas else {}


def bench(*arguments: str, blas: str | None = None, **environ: str) -> dict[str, Any]:
    """The JSON line of `mlx-worker bench`, run as a user would."""
    command = [sys.executable, "-m", "mlx_worker", "bench", *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **preload(blas), **environ}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def requests_of(pair: LoadedPair, n: int, max_tokens: int) -> list[GenerationRequest]:
    """Mixed workloads, greedy, in turn."""
    prompts = [BUILT_IN[10 * (i % 6) + i // 6] for i in range(n)]
    return [GenerationRequest(pair.encode_chat(prompt.messages), max_tokens) for prompt in prompts]


def serve(
    pair: LoadedPair, controller: Controller, requests: list[GenerationRequest]
) -> Iterator[RequestPacer]:
    """One request after the other, as they come."""
    for n, request in enumerate(requests):
        temperature = request.sampling.temperature
        paced = controller.await_request(Traffic(len(request.prompt_ids), temperature), float(n))
        for _ in generate_events(pair, request, paced):
            pass
        assert paced.request is not None, "a reply of one id"
        yield paced.request


@pytest.mark.alone
@needs_openblas
def test_a_draft_that_gains_is_on_after_a_few_requests():
    """Live requests of six kinds, with the fast BLAS."""
    found = bench("--live", "--requests", "4", blas=OPENBLAS)
    texts = [request["status"] for request in found["requests"]]
    assert texts[0] == "Measuring"
    assert texts[-1].startswith("On, +"), texts


@pytest.mark.alone
def test_a_draft_that_is_mostly_wrong_is_off_after_a_few_requests():
    """An oracle that is right three times in ten, three ids a round: no machine gains by that."""
    loaded = load_pair("demo", "none")
    requests = requests_of(loaded, 12, 48)
    pair = oracle_pair(loaded, requests, 0.3)
    controller = Controller(curve=cost_curve(pair), depths=[3])
    states = (controller.status.state for _ in serve(pair, controller, requests))
    assert "off" in states  # of the rest nothing is asked
    assert (controller.status.text or "").startswith("Off, −")


def test_what_a_real_pair_decided_replays_bit_for_bit(tmp_path: Path):
    """The log of the Python door, read back and played through a fresh controller."""
    with mlx_worker.load("demo", decision_log=tmp_path) as pair:
        for prompt in (*COUNT[:2], *STORY[:2], *JSON[:2]):
            list(pair.generate(prompt.messages, max_tokens=80, temperature=0.8, seed=1))
        assert pair.status()["measured"]["requests"] > 0
    (history,) = decisions.read(tmp_path)
    lines = history.parts[-1].lines
    again = [json.loads(json.dumps(line)) for line in replay(lines)]
    assert again == lines[1:]
    assert sum(len(line["segments"]) for line in again) > 12


def test_automatic_writes_the_text_of_plain_decoding():
    """Whatever is measured, switched and stopped on the way."""
    loaded = load_pair("demo")
    controller = Controller(curve=cost_curve(loaded))
    for request in requests_of(loaded, 3, 64):
        sampled = replace(request, sampling=replace(request.sampling, temperature=0.9, seed=4))
        paced = controller.await_request(Traffic(len(request.prompt_ids), 0.9), 0.0)
        texts = [
            [id for event in events if isinstance(event, Text) for id in event.ids]
            for events in (
                generate_events(loaded, sampled, paced),
                generate_events(loaded, replace(sampled, speculation="off")),
            )
        ]
        assert texts[0] == texts[1]


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(600)
@needs_openblas
def test_on_shows_what_bench_measures_of_the_same_policy():
    """The intervals overlap, and the depth is chosen well, workload by workload."""
    found = bench("--modes", "off,assistant,auto", "--requests", "5", blas=OPENBLAS)["automatic"]
    status = found["status"]
    assert status["state"] == "on"
    assert status["low"] < found["high"]
    assert found["low"] < status["high"]
    assert found["of_best_in_hindsight"] > 0.9
    assert min(found["over_plain"].values()) > 0.95
    assert found["controller_share"] < 0.005
    assert found["controller_share_after"] < 0.008


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(300)
@needs_openblas
def test_under_a_schema_the_draft_is_not_slower_than_plain_decoding():
    """Interleaved, on replies that are the same."""
    script = Path(__file__).parent.parent / "scripts" / "bench_json.py"
    environ = {**os.environ, **preload(OPENBLAS)}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert all(line["same_ids"] for line in found["lines"])
    assert found["draft_over_plain"] >= 1.0


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_long_fixed_depth_is_off_with_the_reference_blas():
    """Nine rows cost about six here, and at this temperature a round doesn't give as many."""
    found = bench(
        "--live", "--requests", "6", "--temperature", "2",
        MLX_WORKER_SPECULATION__DEPTH="8",
    )  # fmt: skip
    assert found["status"]["state"] == "off"


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("blas", BLAS)
def test_three_in_ten_is_off_at_any_depth(blas: str | None):
    """The oracle again, free to choose its depth: with one draft a round it is nearly level."""
    script = (
        "from tests.test_live import *\n"
        "loaded = load_pair('demo')\n"
        "requests = requests_of(loaded, 60, 96)\n"
        "pair = oracle_pair(loaded, requests, 0.3, charge=True)\n"
        "controller = Controller(curve=cost_curve(loaded))\n"
        "for _ in serve(pair, controller, requests * 3):\n"
        "    if controller.status.state != 'measuring':\n"
        "        break\n"
        "print(controller.status.state, controller.memory.n_requests)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **preload(blas)},
        cwd=Path(__file__).parent.parent,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[0] == "off", ran.stdout


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(600)
def test_off_costs_nothing():
    """Plain replies under a verdict of Off take as long as with no draft loaded, within 1 %."""
    drafted, bare = load_pair("demo"), load_pair("demo", "none")
    controller = Controller(curve=cost_curve(drafted))
    controller.memory.phase = "off"
    controller.memory.retry_tokens = 1 << 30
    took = {"off": 0.0, "bare": 0.0, "again": 0.0}
    for turn in range(3):
        for n, request in enumerate(requests_of(bare, 12, 96)):
            first = (n + turn) % 3
            for name in [*took][first:] + [*took][:first]:
                controller.memory.plain_requests = 0
                paced = controller.await_request(Traffic(len(request.prompt_ids)), 0.0)
                events = (
                    generate_events(drafted, request, paced)
                    if name == "off"
                    else generate_events(bare, replace(request, speculation="off"))
                )
                done = [event for event in events if isinstance(event, Done)][-1]
                took[name] += done.timing.decode_ms
    noise = abs(took["again"] / took["bare"] - 1)  # of two arms that are the same
    assert 2 * took["off"] / (took["bare"] + took["again"]) < 1.01 + 2 * max(noise, 0.01)
