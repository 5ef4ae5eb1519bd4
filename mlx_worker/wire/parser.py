"""Which parser reads a model's replies.

Owns the choice alone. Pure; any thread.
"""

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.gemma import GemmaReader
from mlx_worker.wire.marked import MarkedReader
from mlx_worker.wire.parts import ReplyParser
from mlx_worker.wire.raw import Raw


def reply_parser(protocol: TextProtocol, opening: str, tools: Tools | None) -> ReplyParser:
    """A parser for one choice.

    opening  what the prompt's end leaves open; as Started has it
    tools    that were offered; None: none were, so nothing is a call
    """
    match protocol.family:
        case "gemma4":
            reader = GemmaReader(protocol, tools)
        case "marked":
            reader = MarkedReader(protocol, tools)
        case "plain":
            return Raw()
    reader.open(opening)
    return reader
