"""state.json: written whole, read by anyone, never mistaken for a process that is gone."""

import json
import os
from dataclasses import replace

import pytest

from mlx_worker import state
from mlx_worker.presence import Presence

NO_PID = 2**22 + 1  # above what Linux and macOS give


def test_what_is_written_is_read(home):
    """Every field, models and texts with them."""
    said = state.own(
        "ready", "1.2", address="http://[::1]:1/", is_supervised=True, models=(("demo", None),)
    )
    state.write(said)
    assert state.read() == said
    assert state.default_path().stat().st_mode & 0o777 == 0o600


BROKEN = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"phase": "ready", "pid": 1e999, "process_s": 1, "at_s": 1, "version": "1"}',
    '{"phase": "ready", "pid": 1, "process_s": NaN, "at_s": 1, "version": "1"}',
    '{"phase": "ready", "pid": 1, "process_s": 1, "at_s": 1e999, "version": "1"}',
    '{"phase": "ready", "pid": 1, "process_s": 1, "at_s": 1e300, "version": "1"}',
    '{"phase": "ready", "pid": 1, "process_s": 1, "at_s": -1e15, "version": "1"}',
    '{"phase": "ready", "pid": [], "process_s": 1, "at_s": 1, "version": "1"}',
    "[" * 100_000,
    "\x00",
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_says_nothing(home, text: str):
    """But that it is broken."""
    state.default_path().parent.mkdir()
    state.default_path().write_text(text)
    said, why = state.look_up()
    assert said is None
    assert why is not None
    assert "state.json: can't be understood" in why


def test_a_file_that_is_no_text_or_no_file_says_nothing(home):
    """As one that is broken."""
    state.default_path().parent.mkdir()
    state.default_path().write_bytes(b"\xff\xfe")
    assert state.read() is None
    state.default_path().unlink()
    state.default_path().mkdir()
    assert state.look_up() == (
        None,
        f"{state.default_path()}: can't be read: Is a directory",
    )


def test_what_is_no_file_holds_nobody_up(home):
    """Nor does one that is larger than any state."""
    state.default_path().parent.mkdir()
    os.mkfifo(state.default_path())
    assert state.look_up() == (None, f"{state.default_path()}: can't be read: it is no file")
    state.default_path().unlink()
    with state.default_path().open("w") as file:
        file.truncate(state.MAX_BYTES + 1)
    assert state.look_up() == (None, f"{state.default_path()}: can't be read: File too large")


def test_a_link_to_itself_cant_be_written(home):
    """Which is an error of files as any other."""
    state.default_path().parent.mkdir()
    state.default_path().symlink_to(state.FILE)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        state.write(state.own("ready", "1"))


def test_this_process_is_alive(home):
    """By its number and its beginning."""
    assert state.is_alive(state.own("ready", "1"))


@pytest.mark.parametrize("pid", [NO_PID, -1, 0, 2**80])
def test_a_process_that_is_gone_is_not(home, pid: int):
    """Whatever stands there for a number."""
    assert not state.is_alive(replace(state.own("ready", "1"), pid=pid))


def test_a_number_that_is_used_again_is_another_process(home):
    """It began at another time."""
    own = state.own("ready", "1")
    assert own.pid == os.getpid()
    assert not state.is_alive(replace(own, process_s=own.process_s - 60))


def test_a_clock_that_was_set_ends_nobody(home):
    """The lock is still held."""
    with Presence().taken():
        own = state.own("ready", "1")
        assert state.is_alive(replace(own, process_s=own.process_s - 3600))


def test_a_copied_folder_has_no_worker(home):
    """Its state is that of the worker elsewhere, its lock is held by nobody."""
    state.write(state.own("ready", "1"))
    state.lock_path().touch()
    assert not state.is_alive(state.own("ready", "1"))


def test_the_file_is_json_of_its_fields(home):
    """For whoever reads it without us."""
    state.write(state.own("refused", "1", error="port: taken"))
    values = json.loads(state.default_path().read_text())
    assert (values["phase"], values["error"]) == ("refused", "port: taken")
