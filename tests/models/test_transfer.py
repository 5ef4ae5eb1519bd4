"""One file at a time: interrupted, damaged, contested, and on a full disk."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from mlx_worker.errors import GatedModel, HubError, HubUnreachable, NoSpace
from mlx_worker.models import transfer
from mlx_worker.models.cache import RepoFile, Snapshot
from mlx_worker.models.pairing import file_of, wanted
from tests.hub_faults import Fault
from tests.models.shelf import E2B, WEIGHTS, OddDisk, Shelf, put_partial_files_on, target

N_BYTES = 300_000


@pytest.fixture
def weights(shelf: Shelf) -> tuple[Snapshot, RepoFile]:
    shelf.local.add(E2B, target(N_BYTES))
    snapshot = wanted(shelf.hub.snapshot(E2B))
    file = file_of(snapshot, WEIGHTS)
    assert file
    shelf.local.forget()
    return snapshot, file


def fetch(shelf: Shelf, weights: tuple[Snapshot, RepoFile]) -> int:
    """To the end; returns the bytes that it said came."""
    return sum(transfer.fetch(shelf.hub, shelf.cache, *weights))


def content(shelf: Shelf, weights: tuple[Snapshot, RepoFile]) -> bytes:
    snapshot, file = weights
    return (shelf.cache.snapshot_folder(snapshot) / file.name).read_bytes()


def is_right(shelf: Shelf, weights: tuple[Snapshot, RepoFile]) -> bool:
    return hashlib.sha256(content(shelf, weights)).hexdigest() == weights[1].digest


@pytest.mark.parametrize("seed", range(10))
def test_a_transfer_that_is_cut_anywhere_fetches_no_byte_twice(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], seed: int
):
    """Each cut is a new place; the connection dies there, and the next try goes on."""
    random = Random(seed)
    places = sorted(random.sample(range(1, N_BYTES), 3))
    for after, before in zip(places, [0, *places], strict=False):
        shelf.local.faults.add(Fault("cut", WEIGHTS, after_bytes=after - before))
    assert fetch(shelf, weights) == N_BYTES
    assert is_right(shelf, weights)
    assert shelf.local.bytes_sent(file=WEIGHTS) == N_BYTES
    assert shelf.local.faults.left == []


@pytest.mark.parametrize("seed", range(10))
def test_whoever_stops_anywhere_goes_on_without_a_byte_twice(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], seed: int
):
    """The generator is closed after some piece, as Ctrl-C and a stopped job do."""
    shelf.local.rate = 20_000_000  # pieces arrive one by one
    stop_after = Random(seed).randrange(1, N_BYTES)
    came = 0
    with contextlib.closing(transfer.fetch(shelf.hub, shelf.cache, *weights)) as pieces:
        for n in pieces:
            came += n
            if came >= stop_after:
                break
    snapshot, file = weights
    assert shelf.cache.n_bytes(snapshot.repo, file) == came
    assert not shelf.cache.is_whole(snapshot, file) or came == N_BYTES
    shelf.local.forget()
    assert came + fetch(shelf, weights) == N_BYTES
    assert is_right(shelf, weights)
    assert [one.range_start for one in shelf.local.requests if one.n_bytes > 1000] in ([came], [])


def test_a_killed_process_leaves_a_file_to_go_on_from(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], tmp_path: Path
):
    """SIGKILL in the middle of the weights: no cleaning up of any kind runs."""
    gate = shelf.local.gate(WEIGHTS, 150_000)
    script = (
        "from pathlib import Path\n"
        "from mlx_worker.models import transfer\n"
        "from mlx_worker.models.cache import Cache\n"
        "from mlx_worker.models.hub import Hub\n"
        f"hub, cache = Hub({shelf.local.endpoint!r}), Cache(Path({str(shelf.cache.folder)!r}))\n"
        f"snapshot = hub.snapshot({E2B!r})\n"
        f"file = next(f for f in snapshot.files if f.name == {WEIGHTS!r})\n"
        "for n in transfer.fetch(hub, cache, snapshot, file): print(n, flush=True)\n"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        came = 0
        while came < 150_000:
            came += int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    gate.release()
    shelf.local.forget()
    assert fetch(shelf, weights) == N_BYTES - 150_000
    assert is_right(shelf, weights)
    assert shelf.local.bytes_sent(file=WEIGHTS) == N_BYTES - 150_000


def test_a_wrong_byte_is_found_and_the_file_fetched_again(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile]
):
    """Same length, another content: nobody ever sees it under the file's name."""
    shelf.local.faults.add(Fault("flip", WEIGHTS, offset=1234))
    assert fetch(shelf, weights) == N_BYTES
    assert is_right(shelf, weights)
    assert shelf.local.bytes_sent(file=WEIGHTS) == 2 * N_BYTES


def test_a_file_that_is_always_wrong_is_said_and_leaves_nothing(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile]
):
    shelf.local.faults.add(Fault("flip", WEIGHTS, offset=1234, times=None))
    with pytest.raises(HubError, match=r"model\.safetensors came twice with other bytes"):
        fetch(shelf, weights)
    snapshot, file = weights
    assert not shelf.cache.is_whole(snapshot, file)
    assert shelf.leftovers() == []


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "empty"])
def test_a_file_that_was_damaged_afterwards_is_mended(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], damage: str
):
    """What is here is checked against the hub's digest, not only by its name."""
    fetch(shelf, weights)
    snapshot, file = weights
    blob = shelf.cache.blob(snapshot.repo, file)
    whole = blob.read_bytes()
    damages = {"changed": b"x" + whole[1:], "shorter": whole[:-1], "empty": b""}
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(damages[damage])
    fetch(shelf, weights)
    assert is_right(shelf, weights)


def test_a_hub_that_ignores_ranges_is_put_up_with(shelf: Shelf, weights: tuple[Snapshot, RepoFile]):
    """It answers with the whole file: the bytes that were here don't end up in it twice."""
    shelf.local.faults.add(Fault("cut", WEIGHTS, after_bytes=100_000))
    shelf.local.faults.add(Fault("ignore_range", WEIGHTS))
    assert fetch(shelf, weights) == N_BYTES
    assert is_right(shelf, weights)


def test_a_partial_file_that_is_too_long_is_begun_anew(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile]
):
    snapshot, file = weights
    partial = shelf.cache.partial(snapshot.repo, file)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * (N_BYTES + 1))
    fetch(shelf, weights)
    assert is_right(shelf, weights)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_hub_is_asked_again(shelf: Shelf, weights: tuple[Snapshot, RepoFile], status: int):
    shelf.local.faults.add(Fault("status", WEIGHTS, status=status, times=3))
    assert fetch(shelf, weights) == N_BYTES
    assert is_right(shelf, weights)


def test_a_hub_that_says_how_long_to_wait_is_obeyed(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], monkeypatch: pytest.MonkeyPatch
):
    """Retry-After: 7 is seven seconds of zeros, during which one can stop."""
    clock = [100.0]

    def sleep(span_s: float) -> None:
        clock[0] += span_s

    monkeypatch.setattr(transfer.time, "sleep", sleep)
    monkeypatch.setattr(transfer.time, "monotonic", lambda: clock[0])
    shelf.local.faults.add(Fault("status", WEIGHTS, status=429, retry_after_s=7))
    assert fetch(shelf, weights) == N_BYTES
    assert clock[0] == pytest.approx(107.0)


def test_a_hub_that_stays_away_is_given_up_and_what_came_is_kept(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile]
):
    shelf.local.faults.add(Fault("cut", WEIGHTS, after_bytes=100_000, place="cdn"))

    def go_on() -> None:
        came = 0
        for n in transfer.fetch(shelf.hub, shelf.cache, *weights):
            came += n
            if came == 100_000 and not shelf.local.faults.left:
                shelf.local.faults.add(Fault("status", WEIGHTS, status=503, times=None))

    with pytest.raises(HubUnreachable, match="stays at 100,000 of 300,000 bytes") as raised:
        go_on()
    assert raised.value.hint == "the same command goes on from there"
    snapshot, file = weights
    assert shelf.cache.n_bytes(snapshot.repo, file) == 100_000
    shelf.local.faults.clear()
    assert fetch(shelf, weights) == N_BYTES - 100_000


def test_a_hub_that_goes_away_and_comes_back_is_waited_for(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], monkeypatch: pytest.MonkeyPatch
):
    """No network for a while, in the middle of a file."""
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.2)
    gate = shelf.local.gate(WEIGHTS, 100_000)
    came = 0
    is_back = False
    for n in transfer.fetch(shelf.hub, shelf.cache, *weights):
        came += n
        if came == 100_000 and not is_back:
            gate.release()
            shelf.local.stop()
            threading.Timer(0.3, shelf.local.start).start()
            is_back = True
    assert came == N_BYTES
    assert is_right(shelf, weights)


def test_a_licence_that_was_not_accepted_is_said(shelf: Shelf):
    shelf.local.add(E2B, target(), gated=True, token="hf_right")
    snapshot = wanted(shelf.hub.snapshot(E2B))
    file = file_of(snapshot, WEIGHTS)
    assert file
    with pytest.raises(GatedModel) as raised:
        list(transfer.fetch(shelf.hub, shelf.cache, snapshot, file))
    assert f"accept it at {shelf.local.endpoint}/{E2B}, run `hf auth login`" in str(raised.value)


def test_the_key_of_the_hub_is_not_given_to_whom_it_redirects(shelf: Shelf):
    """The bytes come from another host; it has no business with the token."""
    from mlx_worker.models.hub import Hub

    shelf.local.add(E2B, target(), gated=True, token="hf_right")
    hub = Hub(shelf.local.endpoint, token="hf_right")
    snapshot = wanted(hub.snapshot(E2B))
    for file in snapshot.files:
        list(transfer.fetch(hub, shelf.cache, snapshot, file))
    asked = [one for one in shelf.local.requests if one.file == WEIGHTS]
    assert [one.authorization for one in asked] == ["Bearer hf_right", None]


def test_a_full_disk_is_said_and_what_came_is_kept(
    shelf: Shelf, weights: tuple[Snapshot, RepoFile], monkeypatch: pytest.MonkeyPatch
):
    """The disk takes 100,000 bytes, as a real one does: the write after them fails."""
    put_partial_files_on(OddDisk.full_after_100_000, monkeypatch)
    with pytest.raises(NoSpace, match="are still to come"):
        fetch(shelf, weights)
    put_partial_files_on(OddDisk.with_room, monkeypatch)
    snapshot, file = weights
    assert not shelf.cache.is_whole(snapshot, file)
    assert 0 < shelf.cache.n_bytes(snapshot.repo, file) <= 100_000
    shelf.local.forget()
    n_here = shelf.cache.n_bytes(snapshot.repo, file)
    assert fetch(shelf, weights) == N_BYTES - n_here
    assert is_right(shelf, weights)


def test_two_who_want_a_file_take_turns(shelf: Shelf, weights: tuple[Snapshot, RepoFile]):
    """The second waits for the first, and then finds the file there."""
    gate = shelf.local.gate(WEIGHTS, 100_000)
    sums: list[int] = []
    threads = [threading.Thread(target=lambda: sums.append(fetch(shelf, weights))) for _ in "ab"]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(10)
    gate.release()
    for thread in threads:
        thread.join(10)
    assert sorted(sums) == [0, N_BYTES]
    assert is_right(shelf, weights)
    assert shelf.local.bytes_sent(file=WEIGHTS) == N_BYTES


def test_whoever_waits_for_another_can_stop(shelf: Shelf, weights: tuple[Snapshot, RepoFile]):
    """While the lock is held it yields zeros, so that Ctrl-C and Stop are heard."""
    gate = shelf.local.gate(WEIGHTS, 100_000)
    first = threading.Thread(target=fetch, args=(shelf, weights))
    first.start()
    assert gate.reached.wait(10)
    waiting = transfer.fetch(shelf.hub, shelf.cache, *weights)
    assert next(waiting) == 0
    waiting.close()
    gate.release()
    first.join(10)
    assert is_right(shelf, weights)


def test_the_library_finds_what_was_fetched(shelf: Shelf, weights: tuple[Snapshot, RepoFile]):
    """Other programs use the same cache: hf_hub_download sends nothing for it."""
    from huggingface_hub import hf_hub_download

    fetch(shelf, weights)
    snapshot, file = weights
    shelf.local.forget()
    found = hf_hub_download(
        E2B,
        file.name,
        revision=snapshot.commit,
        cache_dir=shelf.cache.folder,
        endpoint=shelf.local.endpoint,
    )
    assert Path(found).read_bytes() == content(shelf, weights)
    assert shelf.local.requests == []


def test_what_the_library_fetched_is_found(shelf: Shelf, weights: tuple[Snapshot, RepoFile]):
    from huggingface_hub import hf_hub_download

    snapshot, file = weights
    hf_hub_download(
        E2B,
        file.name,
        revision=snapshot.commit,
        cache_dir=shelf.cache.folder,
        endpoint=shelf.local.endpoint,
    )
    shelf.local.forget()
    assert fetch(shelf, weights) == 0
    assert shelf.local.requests == []
