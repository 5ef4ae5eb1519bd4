"""The worker's log files: JSON lines, rotated, private."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import logs

logger = logging.getLogger("mlx_worker.of_a_test")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_log_has_its_own_lines(tmp_path: Path):
    """What the worker did, and one line a request."""
    with logs.written_to(tmp_path / "logs"):
        logger.info("loaded %s", "demo")
        logging.getLogger(logs.ACCESS).info(json.dumps({"path": "/health", "status": 200}))
    (did,) = lines(tmp_path / "logs" / "worker.log")
    (access,) = lines(tmp_path / "logs" / "access.log")
    assert (did["level"], did["from"], did["text"]) == (
        "INFO", "mlx_worker.of_a_test", "loaded demo",
    )  # fmt: skip
    assert (access["path"], access["status"]) == ("/health", 200)
    assert did["at"].endswith("+00:00")


@pytest.mark.parametrize("name", ["asyncio", "aiohttp.server"])
def test_what_the_libraries_warn_of_is_there_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
):
    """And not on standard error: a parent that never reads its pipe used to stop the worker."""
    with logs.written_to(tmp_path):
        logging.getLogger(name).error("socket.accept() out of system resource")
    (line,) = lines(tmp_path / "worker.log")
    assert (line["from"], line["level"]) == (name, "ERROR")
    assert capfd.readouterr().err == ""


def test_an_error_is_one_line_with_its_traceback(tmp_path: Path):
    """Line breaks are inside the JSON."""
    with logs.written_to(tmp_path):
        try:
            raise KeyError("lost")
        except KeyError:
            logger.exception("it failed")
    (line,) = lines(tmp_path / "worker.log")
    assert "KeyError: 'lost'" in line["error"]


def test_a_name_that_is_no_text_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Linux allows for a folder; it is escaped."""
    # Else pytest's report has it, which xdist can't send.
    monkeypatch.setattr(logging.getLogger("mlx_worker"), "propagate", False)
    with logs.written_to(tmp_path):
        logger.error("%s: broken", "b\udcff")
    assert lines(tmp_path / "worker.log")[0]["text"] == "b\udcff: broken"


def test_a_full_file_gives_way_to_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And the oldest is dropped."""
    monkeypatch.setattr(logs, "MAX_BYTES", 2_000)
    with logs.written_to(tmp_path):
        for n in range(200):
            logger.info("line %d of a log that turns over", n)
    files = sorted(path.name for path in tmp_path.glob("worker.log*"))
    assert files == ["worker.log", *(f"worker.log.{n}" for n in range(1, 1 + logs.OLD_FILES))]
    assert lines(tmp_path / "worker.log")[-1]["text"].startswith("line 199")


def test_the_files_are_the_users_own(tmp_path: Path):
    """Nobody else reads them."""
    with logs.written_to(tmp_path / "logs"):
        logger.info("x")
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()} == {0o600}


def test_afterwards_nothing_is_written(tmp_path: Path):
    """The loggers are as they were."""
    with logs.written_to(tmp_path):
        pass
    logger.info("too late")
    assert lines(tmp_path / "worker.log") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """No traceback for each line, and none at the end; what comes once there is room is written."""
    file = tmp_path / "worker.log"
    file.symlink_to("/dev/full")
    with logs.written_to(tmp_path):
        for n in range(3):
            logger.info("lost %d", n)
        logging.getLogger(logs.ACCESS).info("{}")  # in another file
    said = capfd.readouterr().err
    assert said == f"{file}: can't be written: No space left on device\n"


def test_a_log_that_could_not_be_written_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Once there is room again."""
    file = tmp_path / "worker.log"
    handler = logs.LogFile(file, encoding="utf-8", delay=True)
    file.mkdir()
    handler.emit(logging.makeLogRecord({"msg": "lost"}))
    handler.emit(logging.makeLogRecord({"msg": "lost"}))
    file.rmdir()
    handler.emit(logging.makeLogRecord({"msg": "kept"}))
    handler.close()
    assert file.read_text() == "kept\n"
    assert capfd.readouterr().err.count("can't be written") == 1
