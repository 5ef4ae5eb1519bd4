"""Long replies hold what their keys and values need, and nothing more."""

import gc

import mlx.core as mx
import pytest

from mlx_worker.engine.session import Session
from mlx_worker.engine.target import Target
from mlx_worker.records import GenerationRequest, Text
from tests.tiny import VOCAB, tiny_pair, tiny_target

PROMPT = (2, 50, 61, 47)
SLOP_BYTES = 2 << 20  # one growth step of every timeline, the graph of one round, the index


def held_bytes(session: Session, n_ids: int, at: tuple[int, ...]) -> list[int]:
    """Active bytes beyond keys and values, read when the reply has reached each length in `at`."""
    wanted, found, seen = list(at), [], 0
    for event in session.events():
        seen += len(event.ids) if isinstance(event, Text) else 0
        if wanted and seen >= wanted[0]:
            wanted.pop(0)
            gc.collect()
            found.append(mx.get_active_memory() - session.timelines.nbytes)
    assert seen == n_ids
    return found


def grown(n_ids: int, depth: int) -> int:
    """How many more bytes a reply holds at its end than after its first tenth."""
    tiny = tiny_target("own")
    roomy = Target(tiny.model, VOCAB, 4 * n_ids)
    request = GenerationRequest(PROMPT, n_ids, ignore_eos=True, speculation="on", depth=depth)
    session = Session(tiny_pair("own", "lookup", target=roomy), request)
    early, late = held_bytes(session, n_ids, (n_ids // 10, n_ids))
    return late - early


@pytest.mark.parametrize("depth", [0, 5])
def test_a_reply_of_hundreds_of_ids_holds_no_more_at_its_end(depth: int):
    """Beyond keys and values, memory is flat, plainly and with rounds of several ids."""
    assert grown(300, depth) < SLOP_BYTES


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [0, 5])
def test_a_reply_of_ten_thousand_ids_holds_no_more_at_its_end(depth: int):
    """The same over forty buffer clearings, some of which a round of several ids steps over."""
    assert grown(10_000, depth) < SLOP_BYTES
