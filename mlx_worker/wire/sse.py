"""Plain values → the bytes of a body or of a server-sent event. Pure; any thread."""

import json
from typing import Any, cast

DONE = b"data: [DONE]\n\n"


PIECES_BELOW = 5  # levels of a reply, above each token's logprobs


def json_bytes(value: Any) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinity, which JSON can't write."""
    return _encoded(_written(value))


def json_bytes_by_pieces(value: Any) -> bytes:
    """The same, for a thread beside others: C writes each piece and lets no other run meanwhile."""
    return _encoded(_joined(value, PIECES_BELOW))


def _joined(value: Any, levels: int) -> str:
    if levels and isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return f"{{{','.join(f'{_written(k)}:{_joined(v, levels - 1)}' for k, v in items)}}}"
    if levels and isinstance(value, list):
        return f"[{','.join(_joined(item, levels - 1) for item in cast('list[Any]', value))}]"
    return _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encoded(written: str) -> bytes:
    # Half a surrogate pair, as in a path that is no UTF-8, becomes the escape JSON has for it.
    return written.encode("utf-8", "backslashreplace")


def sse_event(value: Any) -> bytes:
    """One event; JSON has no bare line break, so it is always one line."""
    return b"data: " + json_bytes(value) + b"\n\n"
