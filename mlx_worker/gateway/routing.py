"""Which worker gets a request.

Owns the order of preference: the worker that has the conversation's beginning in its cache, then
free slots, then the shortest queue. Leaves who is there to registry.py. Event loop; nothing waits.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence

from mlx_worker.gateway.connected import Connected
from mlx_worker.wire.openai import Asked

MOST_CONVERSATIONS = 10_000
OPENING_CHARS = 1000  # of a raw prompt, by which its conversation is told
OPENING_IDS = 250


class Routing:
    """Remembers which worker a conversation was given to."""

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, workers: Sequence[Connected], conversation: str) -> Connected | None:
        """None: there is none to choose from. Next: settle, once it has the request."""
        home = self._homes.get(conversation)
        at_home = next((one for one in workers if one.worker.id == home), None)
        if at_home and (at_home.free_slots or not any(one.free_slots for one in workers)):
            return at_home
        return min(workers, key=_reluctance, default=None)

    def settle(self, conversation: str, worker_id: str) -> None:
        self._homes[conversation] = worker_id
        self._homes.move_to_end(conversation)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)


def _reluctance(one: Connected) -> tuple[bool, int, float]:
    """Of equals, the one that was given something the longest time ago."""
    return (not one.free_slots, one.load, one.given_s)


def with_model(
    workers: Sequence[Connected], model: str | None, without: Collection[str] = ()
) -> list[Connected]:
    """Those that take requests for the model; None: that have any."""
    return [
        one
        for one in workers
        if not one.is_draining
        and one.worker.id not in without
        and (one.models if model is None else model in one.models)
    ]


def conversation_of(asked: Asked) -> str:
    """Names it by its key, or by its first messages, within one scope and model."""
    call = asked.call
    if asked.affinity is not None:
        opening: object = ["key", asked.affinity]
    elif call.messages is not None:
        opening = ["messages", *opening_messages([dict(one) for one in call.messages])]
    else:
        n = OPENING_CHARS if isinstance(call.prompt, str) else OPENING_IDS
        opening = ["prompt", call.prompt[:n]]
    text = json.dumps([call.scope, call.model, opening], default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def opening_messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Up to the first thing that the user says: what later turns have in common."""
    roles = [message.get("role") for message in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages[:1]
