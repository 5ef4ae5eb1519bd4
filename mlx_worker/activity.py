"""Tells the machine that somebody waits, so that it neither slows this process down nor sleeps.

Owns when that begins and ends: with the first call that is here, and with the last. macOS naps
processes that show no window, and sleeps when nobody types; elsewhere nothing is told. A machine
that won't be told stops no call. One thread at a time: the event loop. What a Mac makes of it was
not seen yet (docs/MAC.md).
"""

import logging
import sys
from importlib import import_module
from typing import Any, Protocol

REASON = "a request is being answered"
USER_INITIATED = 0x00FFFFFF  # NSActivityUserInitiated: no App Nap, no sleep for lack of use

logger = logging.getLogger(__name__)


class Machine(Protocol):
    """What NSProcessInfo offers, and nothing else of it.

    begin  gives a token; end  takes it once
    """

    def begin(self, reason: str) -> Any: ...

    def end(self, token: Any) -> None: ...


class Activity:
    """Counts the calls that are here; the machine hears of the first and of the last.

    machine  None: it needs no telling
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine
        self._n_calls = 0
        self._token: Any = None

    def begin(self) -> None:
        """One more call. Next: `end`, however the call ends."""
        self._n_calls += 1
        if self._n_calls == 1 and self._machine is not None:
            try:
                self._token = self._machine.begin(REASON)
            except Exception as error:
                self._give_up(error)

    def end(self) -> None:
        assert self._n_calls > 0, "end() follows a begin()"
        self._n_calls -= 1
        token = self._token
        if self._n_calls or token is None or self._machine is None:
            return
        self._token = None
        try:
            self._machine.end(token)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._machine = None
        logger.warning("macOS can't be told that requests run, and may slow them: %s", error)


class ProcessInfo:
    """macOS's NSProcessInfo, which any thread may use."""

    def __init__(self, foundation: Any) -> None:
        self._info = foundation.NSProcessInfo.processInfo()

    def begin(self, reason: str) -> Any:
        return self._info.beginActivityWithOptions_reason_(USER_INITIATED, reason)

    def end(self, token: Any) -> None:
        self._info.endActivity_(token)


def activity_here() -> Activity:
    """Of this machine. Imports what it needs, so before the event loop runs."""
    if sys.platform != "darwin":
        return Activity()
    try:
        return Activity(ProcessInfo(import_module("Foundation")))
    except (ImportError, AttributeError) as error:
        logger.warning("macOS can't be told that requests run, and may slow them: %s", error)
        return Activity()
