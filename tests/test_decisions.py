"""The decision log's files: when they begin, who writes them, what a crash leaves."""

import json
import logging
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_worker import decisions
from mlx_worker.control.controller import Controller
from mlx_worker.control.log import FORMAT, replay
from mlx_worker.decisions import DecisionLog, History, file_stem, read
from mlx_worker.records import Traffic
from tests.courses import course_lines, plain, served

FACTS = {"model": "m", "draft": "d"}
OTHER_PROCESS = """
import sys
from pathlib import Path
from tests.test_decisions import write
log = write(Path(sys.argv[1]), 3, is_left_open=True)
print("written", flush=True)
sys.stdin.read()
log.close()
"""


def opened(folder: Path, **options: Any) -> tuple[DecisionLog, Controller]:
    """A log with a controller that it hears."""
    log = DecisionLog(folder, FACTS, **options)
    controller = Controller(on_concluded=log.hear)
    log.attach(controller)
    return log, controller


def write(
    folder: Path, n: int, *, seed: int = 0, is_left_open: bool = False, **options: Any
) -> DecisionLog:
    """A log of n requests, flushed after each as a door does."""
    events = options.pop("events", {})
    log, controller = opened(folder, **options)
    for _ in zip(range(n), served(controller, seed, **events), strict=False):
        log.flush()
    if not is_left_open:
        log.close()
    return log


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def one(folder: Path) -> History:
    (history,) = read(folder)
    return history


def numbers(history: History) -> list[int]:
    return [line["number"] for part in history.parts for line in part.requests]


def assert_replays(history: History) -> None:
    for part in history.parts:
        assert plain(replay(part.lines)) == part.requests


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- writing ----------------------------------------------------------------------------------


def test_what_is_read_is_what_was_decided(tmp_path: Path):
    """Head and requests as control/log.py makes them, with the pair's facts and the version."""
    write(tmp_path, 6)
    (part,) = one(tmp_path).parts
    assert part.head["model"] == "m"
    assert part.head["version"] == decisions.mlx_worker.__version__
    assert len(part.requests) == 6
    assert_replays(one(tmp_path))


def test_the_hook_touches_no_file(tmp_path: Path):
    """It runs on the engine thread; only flush writes."""
    folder = tmp_path / "decisions"
    log, controller = opened(folder)
    requests = served(controller)
    next(requests)
    assert not folder.exists()
    log.flush()
    (file,) = files(folder)
    before = file.read_bytes()
    next(requests)
    assert file.read_bytes() == before
    log.close()
    assert file.read_bytes().startswith(before)
    assert numbers(one(folder)) == [1, 2]


def test_a_load_without_a_request_leaves_nothing(tmp_path: Path):
    """A head alone would say nothing."""
    log, _ = opened(tmp_path / "decisions")
    log.close()
    assert not (tmp_path / "decisions").exists()


def test_files_are_the_owners_alone(tmp_path: Path):
    """Also where the file was there before, open to all; a new folder, too."""
    write(tmp_path / "new", 1)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    folder = tmp_path / "decisions"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / f"{file_stem('m', 'd')}.jsonl").touch(mode=0o644)
    write(folder, 1)
    assert folder.stat().st_mode & 0o777 == 0o755, "a folder of the caller's is the caller's"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "model", ["../../etc/passwd", "org/name", "/abs/folder/", "ä ö\n", "x" * 400, ".", ""]
)
def test_any_model_has_a_safe_file_name(model: str):
    """No path, no control character, no longer than a file system takes."""
    name = f"{file_stem(model, model)}.16.jsonl.4"
    assert name == Path(name).name
    assert name.isascii()
    assert name.isprintable()
    assert len(name) < 255


def test_pairs_that_read_alike_have_files_of_their_own():
    """What the safe characters lose is in the hash."""
    pairs = [("a/b", "c"), ("a_b", "c"), ("a b", "c"), ("A_b", "c"), ("a", "b+c"), ("a+b", "c")]
    assert len({file_stem(*pair).lower() for pair in pairs}) == len(pairs)


def test_a_flush_beside_the_engine_loses_no_line(tmp_path: Path):
    """A thread that flushes without pause while requests are concluded."""
    log, controller = opened(tmp_path, max_bytes=60_000)
    is_done = threading.Event()

    def flush() -> None:
        while not is_done.is_set():
            log.flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    for _ in zip(range(30), served(controller), strict=False):
        pass
    is_done.set()
    flusher.join()
    log.close()
    assert numbers(one(tmp_path)) == list(range(1, 31))
    assert_replays(one(tmp_path))


def test_nothing_is_kept_or_written_after_close(tmp_path: Path):
    """A reply may end later than its pair is closed."""
    log, controller = opened(tmp_path)
    requests = served(controller)
    next(requests)
    log.close()
    log.close()
    next(requests)
    log.flush()
    assert numbers(one(tmp_path)) == [1]


# --- rotation ---------------------------------------------------------------------------------


def test_a_full_file_is_followed_by_a_new_one(tmp_path: Path):
    """In order, none lost, each little longer than the limit, each replayed without the others."""
    limit = 30_000
    write(tmp_path, 40, max_bytes=limit)
    paths = files(tmp_path)
    assert len(paths) > 2
    for path in paths:
        head, *requests = lines_of(path)
        assert head["kind"] == "head"
        assert requests == plain(replay([head, *requests]))
        assert path.stat().st_size < 2 * limit
    assert all(path.stat().st_size > limit for path in paths[1:])
    assert numbers(one(tmp_path)) == list(range(1, 41))


def test_the_oldest_file_is_dropped(tmp_path: Path):
    """Four old ones are kept, so a log never grows beyond five files."""
    write(tmp_path, 40, max_bytes=5_000)
    assert len(files(tmp_path)) == 1 + decisions.OLD_FILES
    kept = numbers(one(tmp_path))
    assert 1 not in kept
    assert kept == list(range(kept[0], 41))


def test_a_new_file_waits_until_no_request_is_open(tmp_path: Path):
    """A head can't hold a request that is half done; so the one after it replays."""
    events = {"overlapped": set(range(1, 60, 3))}
    write(tmp_path, 30, max_bytes=5_000, events=events)
    assert len(files(tmp_path)) > 2
    assert_replays(one(tmp_path))


def test_without_an_idle_moment_a_file_stops_growing(tmp_path: Path):
    """Requests that always overlap leave no place for a head; the next idle moment has one."""
    log, controller = opened(tmp_path, max_bytes=4_000)
    beside = controller.begin(Traffic(10), 0.0)
    requests = served(controller)
    for _ in zip(range(20), requests, strict=False):
        log.flush()
    (file,) = files(tmp_path)
    assert decisions.OVERFULL * 4_000 < file.stat().st_size < 2 * decisions.OVERFULL * 4_000
    beside.end()
    next(requests)
    next(requests)
    log.close()
    assert len(files(tmp_path)) == 2
    assert numbers(one(tmp_path))[-1] == 23
    assert len(one(tmp_path).parts) == 2


def test_a_queue_that_nobody_flushes_stops_growing(tmp_path: Path, monkeypatch: Any):
    """What was left out is a gap between two heads, so what is there still replays."""
    monkeypatch.setattr(decisions, "MAX_QUEUED", 6)
    log, controller = opened(tmp_path)
    requests = served(controller)
    for _ in zip(range(12), requests, strict=False):
        pass
    log.flush()
    for _ in zip(range(4), requests, strict=False):
        log.flush()
    log.close()
    history = one(tmp_path)
    assert numbers(history) == [1, 2, 3, 4, 5, 14, 15, 16]
    assert_replays(history)


# --- crashes, disks, processes ----------------------------------------------------------------


def test_a_torn_last_line_is_left_out_and_counted(tmp_path: Path):
    """A crash in the middle of writing."""
    write(tmp_path, 4)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    assert numbers(one(tmp_path)) == [1, 2, 3]
    assert one(tmp_path).n_skipped == 1
    assert_replays(one(tmp_path))


def test_a_torn_line_spoils_nothing_of_the_next_load(tmp_path: Path):
    """Its head begins on a line of its own."""
    write(tmp_path, 4)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    write(tmp_path, 2)
    assert numbers(one(tmp_path)) == [1, 2, 3, 1, 2]
    assert one(tmp_path).n_skipped == 1
    assert_replays(one(tmp_path))


@pytest.mark.parametrize(
    "rubbish",
    [
        *(b"", b"\n\n", b"\xff\xfe\n", b"[1, 2]\n", b"null\n7\n", b"[" * 100_000),
        *(b'{"kind": "request"}\n', b'{"kind": "head"}\n', b'{"kind": "head", "format": 1}\n'),
    ],
)
def test_rubbish_is_left_out(tmp_path: Path, rubbish: bytes):
    """In the chain's own file, before and after what is good."""
    write(tmp_path, 2)
    (file,) = files(tmp_path)
    file.write_bytes(rubbish + b"\n" + file.read_bytes() + rubbish)
    assert numbers(one(tmp_path)) == [1, 2]
    assert one(tmp_path).n_skipped == 2 * sum(map(bool, rubbish.split(b"\n")))


def test_another_format_is_left_out_to_its_last_request(tmp_path: Path):
    """Of a version that comes later, or was there before; what follows it is read."""
    write(tmp_path, 2)
    (file,) = files(tmp_path)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(f'"format":{FORMAT}', '"format":99') + text, encoding="utf-8")
    assert numbers(one(tmp_path)) == [1, 2]
    assert one(tmp_path).n_skipped == 3


def test_files_without_anything_readable_are_a_history_without_parts(tmp_path: Path):
    """Empty or torn in the first line; and no folder is no history."""
    assert read(tmp_path / "nowhere") == []
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl.2").write_text("{")
    assert [(each.model, each.parts, each.n_skipped) for each in read(tmp_path)] == [
        ("a", [], 0),
        ("b", [], 1),
    ]


def test_a_folder_that_cannot_be_made_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Replies go on; a file in the folder's place stands for a folder without rights."""
    folder = tmp_path / "decisions"
    folder.write_text("in the way")
    write(folder, 3)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"decision log: {folder}: ")
    assert warning.endswith("going on without it")


@contextmanager
def disk_of(n_bytes: int) -> Iterator[None]:
    """No file grows beyond n_bytes: a write fails half way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What was written before is there; the line that did not fit is torn."""
    with disk_of(10_000):
        log = write(tmp_path, 12, is_left_open=True)
    log.close()
    (warning,) = warnings(caplog)
    assert str(files(tmp_path)[0]) in warning
    assert 0 < len(numbers(one(tmp_path))) < 12
    assert one(tmp_path).n_skipped == 1
    assert_replays(one(tmp_path))


def test_a_second_process_has_a_file_of_its_own(tmp_path: Path):
    """Two workers with the same pair never write into one file; both are read as one history."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        write(tmp_path, 2)
        assert len(files(tmp_path)) == 2
        other.kill()
    history = one(tmp_path)
    assert sorted(numbers(history)) == [1, 1, 2, 2, 3]
    assert_replays(history)
    write(tmp_path, 1)  # the lock died with its process
    assert len(files(tmp_path)) == 2


def test_a_second_pair_in_one_process_has_a_file_of_its_own(tmp_path: Path):
    """As two notebooks' cells make them; the closed one's file is taken again."""
    first = write(tmp_path, 1, is_left_open=True)
    second = write(tmp_path, 1, is_left_open=True)
    assert len(files(tmp_path)) == 2
    first.close()
    third = write(tmp_path, 1, is_left_open=True)
    assert len(files(tmp_path)) == 2
    second.close()
    third.close()


def test_too_many_writers_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Something is wrong then, but not with the reply."""
    monkeypatch.setattr(decisions, "MAX_WRITERS", 2)
    logs = [write(tmp_path, 2, is_left_open=True) for _ in range(3)]
    (warning,) = warnings(caplog)
    assert "2 processes log this pair already" in warning
    for log in logs:
        log.close()


# --- reading ----------------------------------------------------------------------------------


def test_pairs_are_told_apart_and_sorted(tmp_path: Path):
    """By model, then by draft."""
    for model, draft in (("b", "x"), ("a", "y"), ("a", None)):
        log = DecisionLog(tmp_path, {"model": model, "draft": draft})
        controller = Controller(on_concluded=log.hear)
        log.attach(controller)
        next(served(controller))
        log.close()
    assert [(each.model, each.draft) for each in read(tmp_path)] == [
        ("a", None),
        ("a", "y"),
        ("b", "x"),
    ]


def test_the_latest_part_is_that_of_the_latest_request(tmp_path: Path):
    """Not that of the latest load: another process may have served since."""
    early = iter([1.0, 2.0])
    first = write(tmp_path, 9, is_left_open=True, now_s=lambda: next(early))
    second = write(tmp_path, 1, now_s=lambda: next(early))
    first.close()
    second.close()
    history = one(tmp_path)
    assert [part.head["at_s"] for part in history.parts] == [1.0, 2.0]
    assert history.latest is history.parts[0]


def test_rounds_can_be_left_out(tmp_path: Path):
    """All but the segments is the same."""
    write(tmp_path, 2)
    with_rounds = one(tmp_path).parts[0].requests
    (without,) = read(tmp_path, has_rounds=False)[0].parts
    assert without.requests == [
        {key: value for key, value in line.items() if key != "segments"} for line in with_rounds
    ]


def test_a_line_is_a_few_kilobytes():
    """So a file holds some thousand requests."""
    sizes = [len(json.dumps(line)) for line in course_lines(0, 30)[1:]]
    assert max(sizes) < 20_000
