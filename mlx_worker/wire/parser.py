"""Which reader tells content from thinking and calls in a model's replies. Pure; any thread."""

from mlx_worker.records import TextProtocol, Tools
from mlx_worker.wire.parts import ReplyParser
from mlx_worker.wire.raw import Raw


def reply_parser(protocol: TextProtocol, opening: str, tools: Tools | None) -> ReplyParser:
    """The reader of one choice.

    opening  what the prompt's end leaves open
    tools    that it may call
    """
    return Raw()
