"""The link's frames: written and read back, numbered, bounded; and what a fault may show."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from mlx_worker.errors import LinkLost
from mlx_worker.records import Settings, Status
from mlx_worker.wire.link import (
    FROM_GATEWAY,
    FROM_WORKER,
    Accepted,
    BrokenLink,
    Cancel,
    Chunk,
    Connection,
    DoneFrame,
    Draining,
    ErrorFrame,
    Frame,
    GatewayFrame,
    Held,
    Hello,
    Memory,
    ModelReport,
    Ping,
    PlatformFrame,
    PlatformPart,
    Pong,
    Queue,
    Received,
    Rejected,
    Request,
    SettingsAck,
    SettingsFrame,
    SettingsPart,
    StatusReport,
    TimingPart,
    UsagePart,
    Welcome,
    WorkerFrame,
    settings_part,
    speculation_part,
    written,
)

ID = "0123456789abcdef" * 2
STATUS = Status("on", 0.24, 0.18, 0.31, 4, 0.71, 2.9, 1.4, 0.2, 38, 4120, 1.5, 0.01, 9.0, "why")
MODEL = ModelReport(
    id="org/gemma-4", is_loaded=True, context_tokens=8192, model_bytes=5 * 10**9, draft="lookup",
    draft_bytes=0, draft_problem="none", speculation=speculation_part(STATUS),
)  # fmt: skip
OF_WORKER: list[Any] = [
    Hello(
        worker_id="w", epoch="e", version="1", capabilities=("a", "b"), models=(MODEL,),
        settings=SettingsPart(), settings_revision=3, settings_problem="x",
        resume=(Held(id=ID, seq=4),),
    ),
    StatusReport(
        models=(MODEL,), settings=SettingsPart(run_requests_together=True),
        memory=Memory(active_bytes=1, budget_bytes=2), queue=Queue(running=1), thermal="nominal",
        is_low_power=True,
    ),
    Accepted(id=ID),
    Rejected(id=ID, code="overloaded", message="é\ud7ff", retry_after_ms=5),
    Chunk(id=ID, seq=0, data=[{"a": [1, None, {"b": "\u2028"}]}]),
    DoneFrame(
        id=ID, seq=1, finish_reason="stop",
        usage=UsagePart(prompt_tokens=1, completion_tokens=2),
        timing=TimingPart(ttft_ms=1, draft_acceptance_rate=0.5),
    ),
    ErrorFrame(id=ID, seq=1, code="c", message="m", status=400, param="p"),
    SettingsAck(revision=1, settings=SettingsPart()),
    Draining(),
    Ping(),
    Pong(),
]  # fmt: skip
OF_GATEWAY: list[Any] = [
    Welcome(name="Mac", organisation="o", platform=PlatformPart(revision=2), resume={ID: 5}),
    Request(id=ID, endpoint="chat", body={"messages": []}, cache_scope="s", deadline_ms=5),
    Cancel(id=ID),
    Received(id=ID),
    SettingsFrame(revision=2, kv_prefix_cache=False),
    PlatformFrame(revision=2, speculative_decoding="unavailable", display_name="Acme"),
    Ping(),
    Pong(),
]


def named(frame: BaseModel) -> str:
    return type(frame).__name__


def end(of: TypeAdapter[Any], now_s: float = 0.0, **options: Any) -> Connection[Any]:
    return Connection(of, now_s, **options)


@pytest.mark.parametrize("frame", OF_WORKER, ids=named)
def test_what_a_worker_writes_a_gateway_reads(frame: WorkerFrame):
    """The same record comes out."""
    text = end(FROM_GATEWAY).write(frame)
    assert end(FROM_WORKER).read(text, 0.0) == frame


@pytest.mark.parametrize("frame", OF_GATEWAY, ids=named)
def test_what_a_gateway_writes_a_worker_reads(frame: GatewayFrame):
    """The same record comes out."""
    text = end(FROM_WORKER).write(frame)
    assert end(FROM_GATEWAY).read(text, 0.0) == frame


@pytest.mark.parametrize("frame", [*OF_WORKER[:-2], *OF_GATEWAY[:-2]], ids=named)
def test_each_side_may_say_its_own_frames_alone(frame: Frame):
    """The other's are broken, whatever is in them."""
    of = FROM_GATEWAY if frame in OF_WORKER else FROM_WORKER
    with pytest.raises(BrokenLink, match="its type is none that this side may send"):
        end(of).read(written(frame, 0), 0.0)


@pytest.mark.parametrize("frame", [*OF_WORKER, *OF_GATEWAY], ids=named)
def test_what_a_newer_peer_adds_is_ignored(frame: Frame):
    """At the top; and a number must be there."""
    of: TypeAdapter[Any] = FROM_WORKER if frame in OF_WORKER else FROM_GATEWAY
    values = json.loads(written(frame, 0))
    assert end(of).read(json.dumps({**values, "newer": {"x": 1}}), 0.0) == frame
    del values["n"]
    with pytest.raises(BrokenLink, match="n: a dict, field required"):
        end(of).read(json.dumps(values), 0.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4), st.integers(0, 2**40))
def test_whatever_json_a_chunk_holds_comes_out(data: list[dict[str, Any]], seq: int):
    """Any text, any nesting."""
    frame = Chunk(id=ID, seq=seq, data=data)
    assert end(FROM_WORKER).read(written(frame, 0), 0.0) == frame


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60) | JSON.map(json.dumps))
def test_no_bytes_raise_anything_but_a_broken_link(text: str | bytes):
    """What isn't a frame is refused as such."""
    with pytest.raises(BrokenLink):
        end(FROM_WORKER).read(text, 0.0)


def test_numbers_find_doubled_and_lost_frames():
    """Twice is dropped, a gap ends the connection; a refused frame counts as none."""
    writer, reader = end(FROM_WORKER), end(FROM_GATEWAY)
    texts = [writer.write(Ping()) for _ in range(5)]
    assert reader.read(texts[0], 0.0) == Ping()
    assert reader.read(texts[0], 0.0) is None
    assert reader.read(texts[1], 0.0) == Ping()
    assert reader.read(texts[0], 0.0) is None
    with pytest.raises(BrokenLink, match="frame 2 was lost: 4 came"):
        reader.read(texts[4], 0.0)
    assert reader.read(texts[2], 0.0) == Ping()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"type": "request", "id": "x"}, "request.id: a str, string should match pattern"),
        ({"type": "request", "body": "hush"}, "request.body: a str, input should be an object"),
        ({"type": "request", "deadline_ms": -5}, "request.deadline_ms: -5, input should be"),
        ({"type": "request", "deadline_ms": "5"}, "request.deadline_ms: a str, input should"),
        ({"type": "request", "endpoint": "hush"}, "request.endpoint: a str, input should be"),
        ({"type": "hush"}, "its type is none that this side may send"),
        ({}, "no frame"),
    ],
)
def test_a_fault_says_where_and_shows_no_text(values: dict[str, Any], told: str):
    """There may be a prompt in it."""
    frame = json.loads(written(OF_GATEWAY[1], 0))
    text = json.dumps({**frame, **values} if values else {"n": 0, "hush": "hush"})
    with pytest.raises(BrokenLink) as broken:
        end(FROM_GATEWAY).read(text, 0.0)
    assert told in broken.value.message
    assert "hush" not in broken.value.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_can_not_write_is_never_sent(value: float):
    """Nor can it be read into a figure."""
    with pytest.raises(ValueError, match="JSON"):
        written(Chunk(id=ID, seq=0, data=[{"x": value}]), 0)
    text = written(OF_WORKER[5], 0).replace('"ttft_ms":1.0', f'"ttft_ms":{json.dumps(value)}')
    with pytest.raises(BrokenLink, match="ttft_ms"):
        end(FROM_WORKER).read(text, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelReport(id=""),
        lambda: ModelReport(id="x" * 257),
        lambda: Welcome(name="x", heartbeat_s=0),
        lambda: Welcome(name="x", resume={"short": 1}),
        lambda: Welcome(name="x", resume={ID: -2}),
        lambda: ErrorFrame(id=ID, seq=0, code="c", message="m", status=200),
        lambda: TimingPart(ttft_ms=1, draft_acceptance_rate=1.5),
        lambda: UsagePart(prompt_tokens=-1, completion_tokens=0),
        lambda: SettingsFrame.model_validate({"revision": 1, "speculative_decoding": "on"}),
        lambda: SettingsFrame(revision=2**54),
        lambda: Chunk(id=ID, seq=0, data=[{}] * 10_001),
    ],
)
def test_limits_hold(make: Any):
    """A frame beyond one can't even be made."""
    with pytest.raises(ValidationError):
        make()


def test_a_ping_is_due_when_it_is_time_and_silence_is_death():
    """Whatever was written meanwhile."""
    link = end(FROM_GATEWAY, 100.0, ping_s=15, silence_s=45)
    assert link.due(114.0) is None
    assert link.due(115.0) == Ping()
    assert link.due(116.0) is None
    link.read(end(FROM_WORKER).write(Pong()), 120.0)
    assert link.due(165.0) == Ping()
    with pytest.raises(LinkLost, match="nothing came for 46 s"):
        link.due(166.0)
    assert link.wait_s == 5


def test_records_cross_as_they_are():
    """Settings and Status, both ways; a Status also from its fields."""
    kept = Settings("off", False, True)
    assert settings_part(kept).settings == kept
    part = speculation_part(STATUS)
    assert part is not None
    assert part.status == STATUS
    assert speculation_part(vars(STATUS)) == part
    assert speculation_part(None) is None


def test_a_change_of_settings_names_what_it_changes():
    """null is not a value of any."""
    assert SettingsFrame(revision=1, kv_prefix_cache=False).changes == {"kv_prefix_cache": False}
    assert SettingsFrame(revision=1).changes == {}
