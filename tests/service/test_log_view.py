"""The logs as a person reads them."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_worker.service.log_view import follow, is_newer, last_lines, readable

AT = "2026-12-01T09:30:12.345+00:00"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


class Steps:
    """What happens to the file whenever there is nothing new in it; the end of the test last."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = iter(steps)

    def __call__(self) -> None:
        step = next(self._steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()


def followed(path: Path, *steps: Callable[[], object]) -> list[str]:
    found: list[str] = []
    with suppress(KeyboardInterrupt):
        for line in follow(path, Steps(*steps)):
            found.append(line)
    return found


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_line_is_time_level_text():
    """Without the name of the file that said it."""
    line = {"at": AT, "level": "INFO", "from": "mlx_worker.worker", "text": "serving"}
    assert readable(json.dumps(line)).endswith("09:30:12 INFO    serving")


def test_an_error_has_its_traceback_below():
    """As Python writes it."""
    line = {"at": AT, "level": "ERROR", "text": "it failed", "error": "Traceback\n  KeyError: 1\n"}
    assert readable(json.dumps(line)).endswith("ERROR   it failed\nTraceback\n  KeyError: 1")


def test_an_access_line_is_what_was_asked():
    """And how long it took."""
    line = {"at": AT, "method": "POST", "path": "/v1/models", "status": 200, "ms": 811.6}
    assert readable(json.dumps(line)).endswith("POST /v1/models 200 812 ms")


@pytest.mark.parametrize("line", ["dyld: not found", "[1, 2]", '{"at": "noon"}', ""])
def test_a_line_of_someone_else_stays_as_it_is(line: str):
    """What a crash leaves isn't ours to read."""
    assert readable(line) == line


def test_the_last_lines_go_back_past_a_rotation(tmp_path: Path):
    """Into the file that the log was before."""
    (tmp_path / "worker.log.1").write_text("1\n2\n3\n")
    (tmp_path / "worker.log").write_text("4\n")
    assert last_lines(tmp_path / "worker.log", 3) == ["2", "3", "4"]


def test_what_comes_is_followed(tmp_path: Path):
    """From the end on; a line once it is whole."""
    path = tmp_path / "worker.log"
    path.write_text("old\n")
    steps = [lambda: append(path, "ne"), lambda: append(path, "w\nnext\n")]
    assert followed(path, *steps) == ["new", "next"]


def test_following_goes_on_in_the_next_file(tmp_path: Path):
    """The last lines of the one before aren't lost."""
    path = tmp_path / "worker.log"
    path.write_text("old\n")

    def rotate() -> None:
        append(path, "last\n")
        path.rename(tmp_path / "worker.log.1")
        path.write_text("first\n")

    assert followed(path, rotate, lambda: append(path, "second\n")) == ["last", "first", "second"]


def test_following_goes_on_after_a_truncation(tmp_path: Path):
    """As of a file that is kept small in place."""
    path = tmp_path / "service.log"
    path.write_text("a long old line\n")
    assert followed(path, lambda: path.write_text("new\n")) == ["new"]


def test_following_waits_for_a_file(tmp_path: Path):
    """And shows it from its beginning."""
    path = tmp_path / "worker.log"
    assert followed(path, lambda: path.write_text("first\n")) == ["first"]


def test_following_waits_for_what_cant_be_read(tmp_path: Path):
    """A folder in the log's place, say; it goes on in the next file."""
    path = tmp_path / "worker.log"
    path.mkdir()

    def replaced() -> None:
        path.rmdir()
        path.write_text("first\n")

    assert followed(path, replaced) == ["first"]


def test_a_capture_that_is_newer_has_more(tmp_path: Path):
    """What a start printed that never came to its log."""
    log, capture = tmp_path / "worker.log", tmp_path / "service.log"
    assert not is_newer(capture, log)
    capture.write_text("ImportError")
    assert is_newer(capture, log)
    log.write_text("{}\n")
    assert not is_newer(capture, log)
    os.utime(log, (1, 1))
    assert is_newer(capture, log)
