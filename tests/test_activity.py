"""The machine is told once that calls run, and once that none does."""

import logging
import threading

import pytest

from mlx_worker.activity import USER_INITIATED, Activity, ProcessInfo


class Nap:
    """A machine's side of it, which bears no misuse: one activity at a time, ended by its token."""

    def __init__(self) -> None:
        self.open: object | None = None
        self.n_begun = 0
        self._thread = threading.get_ident()

    def begin(self, reason: str) -> object:
        assert reason
        assert self.open is None, "begun twice"
        assert threading.get_ident() == self._thread, "another thread"
        self.open = object()
        self.n_begun += 1
        return self.open

    def end(self, token: object) -> None:
        assert token is self.open, "never begun, or ended already"
        assert threading.get_ident() == self._thread, "another thread"
        self.open = None


class Mute:
    """A machine that can't be told."""

    def begin(self, reason: str) -> object:
        raise RuntimeError("no")

    def end(self, token: object) -> None:
        raise AssertionError("nothing was begun")


def test_calls_that_overlap_are_one_activity():
    """Begun by the first, ended by the last; the next call begins another."""
    nap = Nap()
    activity = Activity(nap)
    activity.begin()
    activity.begin()
    activity.end()
    assert nap.open
    activity.end()
    assert nap.open is None
    activity.begin()
    assert nap.n_begun == 2


def test_an_end_without_a_begin_is_a_fault():
    """Else a later call would end another's."""
    with pytest.raises(AssertionError):
        Activity(Nap()).end()


def test_a_machine_that_cant_be_told_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    """Calls go on."""
    activity = Activity(Mute())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            activity.begin()
            activity.end()
    assert len(caplog.records) == 1


class NSProcessInfo:
    """Of Foundation's form; fails on any other use."""

    def beginActivityWithOptions_reason_(self, options: int, reason: str) -> object:
        assert options == USER_INITIATED
        self.token = object()
        return self.token

    def endActivity_(self, token: object) -> None:
        assert token is self.token
        self.token = None


class Foundation:
    info = NSProcessInfo()

    class NSProcessInfo:
        @staticmethod
        def processInfo() -> NSProcessInfo:
            return Foundation.info


def test_process_info_is_called_as_it_is_declared():
    """By the selectors' names, with the token that it gave."""
    activity = Activity(ProcessInfo(Foundation))
    activity.begin()
    assert Foundation.info.token is not None
    activity.end()
    assert Foundation.info.token is None
