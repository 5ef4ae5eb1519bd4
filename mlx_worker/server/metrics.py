"""GET /metrics: what was served, how fast, and what the engine says of itself.

Owns the figures and their names. Leaves when a request begins and ends to its handler, which
says so through one `with metrics.began(endpoint) as ongoing:`; leaving it ends the request, so no
gauge stays raised. Event loop.

Name                                   Kind       Labels             What
  mlx_worker_requests_total            counter    endpoint, outcome  ok, refused (the client's
                                                                     doing), busy, failed, cancelled
  mlx_worker_http_replies_total        counter    route, status      of all routes; 499: client gone
  mlx_worker_queued                    gauge                         waiting for the engine now
  mlx_worker_running                   gauge                         being written now
  mlx_worker_queue_wait_seconds        histogram                     from submit to the engine
  mlx_worker_ttft_seconds              histogram                     from submit to the first token
  mlx_worker_tokens_per_second         histogram  decoding           of one reply: drafted or plain
  mlx_worker_prompt_tokens_total       counter                       once for all choices of a call
  mlx_worker_cached_tokens_total       counter                       of them, not computed anew
  mlx_worker_completion_tokens_total   counter                       written
  mlx_worker_drafted_tokens_total      counter                       proposed by drafts
  mlx_worker_accepted_tokens_total     counter                       of them, kept
  mlx_worker_loop_lag_seconds          gauge                         how late the event loop was, at
                                                                     worst in the last minute
read from the engine at each scrape, where it says them:
  mlx_worker_healthy                   gauge                         1: it can serve
  mlx_worker_memory_bytes              gauge      kind               status()["memory"], KIND_bytes
  mlx_worker_prefix_cache_hits_total   counter    model              requests that found something
  mlx_worker_prefix_cache_saved_tokens_total
                                       counter    model              prompt tokens not computed
  mlx_worker_prefix_cache_bytes        gauge      model              held now
  mlx_worker_speculation_state         gauge      model, state       1 for its state, else 0
  mlx_worker_speculation_speedup       gauge      model              measured; 0.24 is 24 % faster

The last five come from status()["models"]: {"id", "measured": a Status, "kv_prefix_cache":
{"hits", "saved_tokens", "bytes"}} each. Beside each counter and histogram the library shows
NAME_created, when it began.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, get_args

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_worker.errors import Overloaded, RequestError, WorkerError
from mlx_worker.records import Done, Engine, State
from mlx_worker.server.lag import LoopLag
from mlx_worker.server.recent import Recent

Outcome = Literal["ok", "refused", "busy", "failed", "cancelled"]

CONTENT_TYPE = "text/plain; version=0.0.4"
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SPEED_BUCKETS = (2, 5, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320)  # tokens per second
_PREFIX = "mlx_worker_"


class Metrics:
    """The figures of one server, in a registry of their own, and its last replies one by one."""

    def __init__(self, engine: Engine, lag: LoopLag) -> None:
        self.registry = CollectorRegistry()
        self.recent = Recent()
        self._requests = self._counter("requests", "Requests that ended.", "endpoint", "outcome")
        self._replies = self._counter("http_replies", "HTTP replies.", "route", "status")
        self.queued = self._gauge("queued", "Requests that wait for the engine.")
        self.running = self._gauge("running", "Requests being written.")
        self._queue_wait = self._histogram("queue_wait_seconds", "Wait for the engine.")
        self._ttft = self._histogram("ttft_seconds", "From submit to the first token.")
        self._speed = self._histogram(
            "tokens_per_second", "Speed of one reply.", "decoding", buckets=SPEED_BUCKETS
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("cached_tokens", "Prompt tokens not computed anew.")
        self._completion = self._counter("completion_tokens", "Tokens written.")
        self._drafted = self._counter("drafted_tokens", "Tokens that drafts proposed.")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens that were kept.")
        late = self._gauge("loop_lag_seconds", "How late the event loop woke, at worst.")
        late.set_function(lambda: lag.recent_ms / 1000)
        self.registry.register(EngineCollector(engine))

    def began(self, endpoint: str) -> "Ongoing":
        """A request whose body is about to be read. Next: enter it, and leave it at the end."""
        return Ongoing(self, endpoint)

    def replied(self, route: str, status: int) -> None:
        self._replies.labels(route, str(status)).inc()

    def waited(self, queue_wait_ms: float) -> None:
        self._queue_wait.observe(queue_wait_ms / 1000)

    def concluded(
        self, endpoint: str, outcome: Outcome, replies: Sequence[Done], queue_wait_ms: float
    ) -> None:
        """Count a request that ended; `replies` are its choices that did, the first first."""
        self._requests.labels(endpoint, outcome).inc()
        self.recent.add(replies, queue_wait_ms)
        if replies:
            self._prompt.inc(replies[0].usage.prompt_tokens)
            self._cached.inc(replies[0].usage.cached_tokens)
            self._ttft.observe((queue_wait_ms + replies[0].timing.ttft_ms) / 1000)
        for reply in replies:
            self._count_reply(reply)

    def text(self) -> bytes:
        """Everything as Prometheus reads it."""
        return generate_latest(self.registry)

    def _count_reply(self, reply: Done) -> None:
        timing = reply.timing
        self._completion.inc(reply.usage.completion_tokens)
        self._drafted.inc(timing.drafted)
        self._accepted.inc(timing.accepted)
        if timing.tokens_per_s is not None:
            decoding = "drafted" if timing.drafted else "plain"
            self._speed.labels(decoding).observe(timing.tokens_per_s)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(_PREFIX + name, help, registry=self.registry)

    def _histogram(
        self, name: str, help: str, *labels: str, buckets: Sequence[float] = WAIT_BUCKETS_S
    ) -> Histogram:
        return Histogram(_PREFIX + name, help, labels, registry=self.registry, buckets=buckets)


class Ongoing:
    """One request between began and its end; queued once its body is here, then running.

    Left by an exception it takes its outcome from that; left without a word it counts as failed.
    """

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._gauge: Gauge | None = None
        self._is_entered = False
        self._queue_wait_ms = 0.0
        self._outcome: Outcome | None = None
        self._replies: Sequence[Done] = ()

    def __enter__(self) -> Self:
        assert not self._is_entered, "entered twice"
        self._is_entered = True
        return self

    def waits(self) -> None:
        """Its body is here, and the engine is about to be asked."""
        assert self._is_entered, "not entered"
        self._raise(self._metrics.queued)

    def took_up(self, queue_wait_ms: float) -> None:
        """The engine said Started; of several in one request the first counts."""
        assert self._gauge is not None, "not waiting"
        if self._gauge is self._metrics.running:
            return
        self._lower()
        self._raise(self._metrics.running)
        self._queue_wait_ms = queue_wait_ms
        self._metrics.waited(queue_wait_ms)

    def ended(self, outcome: Outcome = "ok", replies: Sequence[Done] = ()) -> None:
        """How it came out, with the Done of each choice that has one; the last word counts."""
        self._outcome, self._replies = outcome, tuple(replies)

    def cancelled(self, replies: Sequence[Done] = ()) -> None:
        self.ended("cancelled", replies)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lower()
        outcome = self._outcome or outcome_of(error)
        self._metrics.concluded(self._endpoint, outcome, self._replies, self._queue_wait_ms)

    def _raise(self, gauge: Gauge) -> None:
        gauge.inc()
        self._gauge = gauge

    def _lower(self) -> None:
        if self._gauge is not None:
            self._gauge.dec()
        self._gauge = None


def outcome_of(error: BaseException | None) -> Outcome:
    """What an exception that ends a request says of it."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
        return "cancelled"
    if isinstance(error, Overloaded):
        return "busy"
    is_clients = isinstance(error, RequestError | web.RequestPayloadError)
    is_clients = is_clients or 400 <= getattr(error, "status", 500) < 500
    return "refused" if is_clients else "failed"


class EngineCollector(Collector):
    """Asks the engine at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance, so that registering does not ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        healthy = float(self._engine.health().is_ok)
        yield GaugeMetricFamily(_PREFIX + "healthy", "Whether it can serve.", value=healthy)
        try:
            status = self._engine.status()
        except WorkerError:  # a dead engine has no figures; what was counted is still wanted
            return
        yield memory(mapping(status.get("memory")))
        models = [mapping(model) for model in status.get("models") or ()]
        named = [(str(model["id"]), model) for model in models if "id" in model]
        yield from prefix_cache(named)
        yield from speculation(named)


Named = Sequence[tuple[str, Mapping[str, Any]]]


def memory(sizes: Mapping[str, Any]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + "memory_bytes", "Memory in use.", labels=["kind"])
    for name, size in sizes.items():
        if name.endswith("_bytes") and is_number(size):
            family.add_metric([name.removesuffix("_bytes")], size)
    return family


def prefix_cache(models: Named) -> Iterator[Metric]:
    name = _PREFIX + "prefix_cache_"
    hits = CounterMetricFamily(name + "hits", "Requests with a cached prefix.", labels=["model"])
    saved = CounterMetricFamily(name + "saved_tokens", "Tokens not computed.", labels=["model"])
    held = GaugeMetricFamily(name + "bytes", "Bytes the prefix cache holds.", labels=["model"])
    for model, facts in models:
        cache = mapping(facts.get("kv_prefix_cache"))
        for family, key in ((hits, "hits"), (saved, "saved_tokens"), (held, "bytes")):
            if is_number(cache.get(key)):
                family.add_metric([model], cache[key])
    yield from (hits, saved, held)


def speculation(models: Named) -> Iterator[Metric]:
    name = _PREFIX + "speculation_"
    labels = ["model", "state"]
    states = GaugeMetricFamily(name + "state", "1 for the verdict's state.", labels=labels)
    speedup = GaugeMetricFamily(name + "speedup", "Measured; 0.24 is 24 %.", labels=["model"])
    for model, facts in models:
        measured = mapping(facts.get("measured"))
        for state in get_args(State) if "state" in measured else ():
            states.add_metric([model, state], float(state == measured["state"]))
        if is_number(measured.get("speedup")):
            speedup.add_metric([model], measured["speedup"])
    yield from (states, speedup)


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one: an engine says only what it knows."""
    return value if isinstance(value, Mapping) else {}


def is_number(value: object) -> bool:
    return isinstance(value, int | float)
