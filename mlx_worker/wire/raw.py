"""The reader of a reply that nobody takes apart: all of it is content. Pure; any thread."""

from collections.abc import Sequence

from mlx_worker.wire.parts import Content, Part


class Raw:
    def push(self, text: str, marks: Sequence[int] | None = None) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self, is_cut: bool = True) -> list[Part]:
        return []
