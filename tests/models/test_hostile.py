"""What the world does to a cache: other programs, killed processes, odd hubs, planted links."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from mlx_worker.errors import (
    ConfigError,
    HubError,
    HubUnreachable,
    ModelBusy,
    ModelError,
    ModelNotFound,
)
from mlx_worker.files import locked
from mlx_worker.models import transfer
from mlx_worker.models.cache import RepoFile, Snapshot
from mlx_worker.models.hub import Hub, TransferBroken, _file, _first_byte
from mlx_worker.models.locate import locate_draft
from mlx_worker.models.pairing import file_of
from mlx_worker.models.pull import Fetched, Finished
from mlx_worker.models.store import Pulled, SmallerDraft
from tests.hub_faults import Fault
from tests.models.shelf import (
    E2B,
    E2B_DRAFT,
    OTHER,
    WEIGHTS,
    OddDisk,
    Shelf,
    draft,
    noise,
    put_partial_files_on,
    target,
)


def others_download(shelf: Shelf, repo: str) -> Path:
    """As another program does, with the library."""
    options: dict[str, Any] = {"cache_dir": shelf.cache.folder, "endpoint": shelf.local.endpoint}
    return Path(snapshot_download(repo, **options))


# --- other programs ---------------------------------------------------------------------------


def test_a_draft_that_does_not_fit_is_left_to_whoever_fetched_it(shelf: Shelf):
    """It was only looked at."""
    shelf.local.add("someone/gemma", target())
    shelf.local.add("someone/gemma-assistant", draft(backbone_hidden_size=48))
    theirs = others_download(shelf, "someone/gemma-assistant")
    assert shelf.pull("someone/gemma").pulled.draft is None
    assert (theirs / WEIGHTS).read_bytes() == draft()[WEIGHTS]


def test_what_another_program_fetched_of_the_same_commit_stays(e2b: Shelf):
    """It has files that are none of ours."""
    theirs = others_download(e2b, E2B)
    e2b.pull()
    e2b.store.remove(e2b.pulled())
    assert (theirs / "modeling.py").exists()
    assert not (theirs / WEIGHTS).exists()


def test_another_commit_that_another_program_has_is_not_touched(e2b: Shelf):
    theirs = others_download(e2b, E2B)
    e2b.local.add(E2B, {**target(seed=5), "tokenizer.json": target()["tokenizer.json"]})
    e2b.pull()
    e2b.store.remove(e2b.pulled())
    assert (theirs / WEIGHTS).read_bytes() == target()[WEIGHTS]
    assert (theirs / "tokenizer.json").exists()


def test_what_finder_leaves_in_a_folder_stops_no_removal(e2b: Shelf):
    e2b.pull()
    for folder in ("refs", "snapshots"):
        (e2b.cache.repo_folder(E2B) / folder / ".DS_Store").write_bytes(b"\x00\xff\xfe")
    (e2b.cache.snapshot_folder(e2b.pulled().model) / ".DS_Store").write_bytes(b"\x00\xff")
    assert e2b.store.remove(e2b.pulled()) > 300_000


# --- at the same time -------------------------------------------------------------------------


def test_a_model_that_is_downloaded_is_not_removed(e2b: Shelf):
    """The download would go on into nothing."""
    with closing(e2b.events()) as events:
        next(e for e in events if isinstance(e, Fetched) and e.n_bytes and e.file == WEIGHTS)
        with pytest.raises(ModelBusy, match="is being downloaded"):
            e2b.store.remove(e2b.pulled())
    assert e2b.store.remove(e2b.pulled()) > 0


def test_two_pulls_of_different_revisions_take_turns(e2b: Shelf):
    """The second begins when the first has ended, and what it leaves is whole."""
    first = e2b.local.add(E2B, target(seed=5))
    e2b.local.add(E2B, target(seed=6))
    pulls = [e2b.events(revision=first), e2b.events(draft="none", revision="main")]
    ends: list[Finished] = []
    while pulls:
        for one in list(pulls):
            event = next(one, None)
            if event is None:
                pulls.remove(one)
            elif isinstance(event, Finished):
                ends.append(event)
                assert e2b.presence().is_whole
    assert [one.pulled.model.commit == first for one in ends] == [True, False]
    assert e2b.read() == noise(300_000, 6)


def test_a_pull_and_a_removal_that_share_a_draft_leave_it(e2b: Shelf):
    """However they meet: the removal deletes only what no record has by then."""
    e2b.local.add("someone/gemma", target(seed=7))
    for round in range(6):
        e2b.pull()
        other = threading.Thread(
            target=e2b.pull, args=("someone/gemma",), kwargs={"draft": E2B_DRAFT}
        )
        other.start()
        if round % 2:
            other.join(20)
        e2b.store.remove(e2b.pulled())
        other.join(20)
        assert e2b.presence("someone/gemma").is_whole
        e2b.store.remove(e2b.pulled("someone/gemma"))


def test_a_config_that_vanishes_while_it_is_read_is_asked_of_the_hub(
    e2b: Shelf, monkeypatch: pytest.MonkeyPatch
):
    """A removal of another model takes a shared draft's files along at any moment."""
    e2b.pull()
    real = transfer.is_right

    def right_and_gone(path: Path, file: RepoFile) -> Any:
        is_right = yield from real(path, file)
        path.unlink(missing_ok=True)
        return is_right

    monkeypatch.setattr("mlx_worker.models.pull.is_right", right_and_gone)
    e2b.pull()
    assert e2b.presence().is_whole


def test_a_file_that_vanishes_while_it_is_checked_is_not_right(
    e2b: Shelf, monkeypatch: pytest.MonkeyPatch
):
    e2b.pull()
    snapshot = e2b.pulled().model
    file = file_of(snapshot, WEIGHTS)
    assert file
    blob = e2b.cache.blob(E2B, file)
    monkeypatch.setattr(
        transfer, "size_of", lambda path: (blob.unlink(missing_ok=True), file.size)[1]
    )
    with pytest.raises(StopIteration) as ended:
        next(transfer.is_right(blob, file))
    assert ended.value.value is False


def test_files_that_vanish_while_it_is_pulled_are_fetched_again(e2b: Shelf):
    """Someone tidies the cache by hand meanwhile."""
    is_gone = False
    with closing(e2b.events()) as events:
        for event in events:
            if (
                isinstance(event, Fetched)
                and event.n_bytes
                and event.file == WEIGHTS
                and not is_gone
            ):
                (e2b.cache.snapshot_folder(e2b.pulled().model) / "config.json").unlink()
                is_gone = True
    assert e2b.presence().is_whole


# --- killed -----------------------------------------------------------------------------------


def test_what_was_given_up_for_a_newer_commit_leaves_nothing(e2b: Shelf):
    """First pull, cut; the hub moves on; the same command."""
    with closing(e2b.events()) as events:
        next(e for e in events if isinstance(e, Fetched) and e.n_bytes and e.file == WEIGHTS)
    e2b.local.add(E2B, target(seed=5))
    e2b.pull()
    assert e2b.leftovers() == []
    blobs = list((e2b.cache.repo_folder(E2B) / "blobs").iterdir())
    assert len(blobs) == len(e2b.pulled().model.files)


def test_a_removal_that_was_killed_is_finished_by_the_next_change(
    e2b: Shelf, monkeypatch: pytest.MonkeyPatch
):
    """The record is written first; what was to go is in it until it is gone."""
    e2b.pull()
    monkeypatch.setattr(type(e2b.cache), "delete", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        e2b.store.remove(e2b.pulled())
    monkeypatch.undo()
    assert e2b.store.models() == []
    assert e2b.cache.repo_folder(E2B).exists()
    e2b.store.put(Pulled("x/y", Snapshot("x/y", "1" * 40, ())))
    assert not e2b.cache.repo_folder(E2B).exists()


def test_a_lock_whose_holder_was_killed_holds_nobody_up(e2b: Shelf):
    with locked(e2b.store.lock("gemma-4-e2b")):
        pass
    assert e2b.store.lock("gemma-4-e2b").exists()
    assert e2b.pull().is_new


# --- odd hubs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "revision",
    ["/tmp/mlx-worker-hostile", "../../mlx-worker-hostile", "a/../../x", "", " ", "a b", "x" * 999],
)
def test_a_revision_never_becomes_a_path(e2b: Shelf, revision: str):
    if revision:
        with pytest.raises(ModelNotFound, match="a branch, a tag or a whole commit"):
            e2b.pull(revision=revision)
    assert not Path("/tmp/mlx-worker-hostile").exists()


@pytest.mark.parametrize(
    ("headers", "status", "asked"),
    [
        ({"Content-Length": "9"}, 200, 0),  # a login page
        ({"Content-Length": "9"}, 200, 50),
        ({"Content-Range": "bytes 60-99/100"}, 206, 50),
        ({"Content-Range": "bytes 50-99/999"}, 206, 50),
        ({"Content-Range": "bytes " + "9" * 5000 + "-1/100"}, 206, 50),
        ({}, 206, 50),
    ],
)
def test_an_answer_that_is_no_part_of_the_file_touches_nothing(
    headers: dict[str, str], status: int, asked: int
):
    class Response:
        status_code = status

    Response.headers = headers  # type: ignore[attr-defined]
    with pytest.raises((TransferBroken, ValueError)):
        _first_byte(Response(), asked, 100)


def test_a_disk_that_takes_less_than_it_is_given_is_given_the_rest(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
):
    """A write may be short; no byte is left out."""
    shelf.local.add(E2B, target())
    put_partial_files_on(OddDisk.half_of_each, monkeypatch)
    shelf.pull()
    assert shelf.read() == target()[WEIGHTS]
    assert shelf.local.bytes_sent(E2B, WEIGHTS) == 300_000


def test_a_lying_size_breaks_nothing_that_is_here(e2b: Shelf):
    """A listing with another size for the same bytes: what is served stays until better came."""
    e2b.pull()
    model = e2b.pulled().model
    file = file_of(model, WEIGHTS)
    assert file
    lie = RepoFile(file.name, file.size + 1, file.digest)
    with pytest.raises((HubError, ModelError)):
        list(transfer.fetch(e2b.hub, e2b.cache, model, lie))
    assert e2b.read() == target()[WEIGHTS]


def test_an_index_of_shards_that_are_not_there_is_refused(e2b: Shelf):
    """Before the whole model that is here is given up for it."""
    e2b.pull()
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    files = {**target(seed=5), "model.safetensors.index.json": json.dumps(index).encode()}
    e2b.local.add(E2B, files)
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        e2b.pull()
    assert e2b.presence().is_whole
    assert e2b.read() == target()[WEIGHTS]


@pytest.mark.parametrize(
    "listed",
    [
        {"path": "../x", "size": 1, "oid": "a" * 40},
        {"path": "/x", "size": 1, "oid": "a" * 40},
        {"path": "a//x", "size": 1, "oid": "a" * 40},
        {"path": "x\0", "size": 1, "oid": "a" * 40},
        {"path": None, "size": 1, "oid": "a" * 40},
        {"path": "x", "size": -1, "oid": "a" * 40},
        {"path": "x", "size": 1 << 70, "oid": "a" * 40},
        {"path": "x", "size": "1", "oid": "a" * 40},
        {"path": "x", "size": 1, "oid": "../../x"},
        {"path": "x", "size": 1, "oid": None},
        {"path": "x", "size": 1, "oid": "a" * 40, "lfs": {"oid": "../x", "size": 1}},
    ],
)
def test_names_and_digests_that_are_none_are_refused(listed: dict[str, Any]):
    """They become paths here."""
    with pytest.raises(HubError):
        _file("o/m", listed)


@pytest.mark.parametrize(
    "card",
    [
        "date: 2024-13-45",
        "base_model: 'my base/model'",
        'base_model: "a/b\\nc"',
        "base_model: " + "x" * 70_000,
        "base_model: [" + ", ".join(f"a/b{n}" for n in range(300)) + "]",
    ],
)
def test_a_card_never_stops_a_pull(shelf: Shelf, card: str):
    shelf.local.add(OTHER, {**target(), "README.md": f"---\n{card}\n---\n".encode()})
    assert shelf.pull(OTHER).pulled.draft is None
    assert len(shelf.local.requests) < 60


def test_an_error_about_a_guessed_draft_is_only_noted(e2b: Shelf):
    e2b.local.faults.add(Fault("status", "*", repo=E2B_DRAFT, place="api", status=400, times=None))
    assert "answered 400" in str(e2b.pull().pulled.draft_note)


@pytest.fixture
def portal() -> Iterator[str]:
    """A network that answers everything with its login page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<html>log in</html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_networks_login_page_is_no_hub(e2b: Shelf, portal: str):
    """What is here is still here, and said to be."""
    e2b.pull()
    e2b.hub = Hub(portal)
    finished = e2b.pull()
    assert "no answer that a hub gives" in str(finished.is_unchecked)
    with pytest.raises(HubUnreachable, match="login page"):
        e2b.pull(OTHER)


def test_an_address_that_is_none_names_the_variable():
    with pytest.raises(HubUnreachable, match="HF_ENDPOINT: 'foo', must begin with http"):
        Hub("foo")


def test_without_a_network_what_is_broken_here_is_not_called_well(e2b: Shelf):
    """Every file is read, though nobody can mend it now."""
    e2b.pull()
    blob = (e2b.cache.snapshot_folder(e2b.pulled().model) / WEIGHTS).resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    e2b.local.stop()
    with pytest.raises(HubUnreachable, match=r"model\.safetensors is broken"):
        e2b.pull()
    e2b.local.start()
    e2b.pull()
    assert e2b.read() == target()[WEIGHTS]


# --- planted ----------------------------------------------------------------------------------


def test_links_that_were_planted_are_not_followed(e2b: Shelf, tmp_path: Path):
    """Whoever may write to the cache can't make a pull write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    repo = e2b.cache.repo_folder(E2B)
    snapshot = e2b.hub.snapshot(E2B)
    file = file_of(snapshot, WEIGHTS)
    assert file
    for place in (repo / "blobs" / f"{file.digest}.incomplete", repo / "refs" / "main"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(victim)
    outside = tmp_path / "outside"
    outside.mkdir()
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / snapshot.commit).symlink_to(outside)
    e2b.pull()
    assert e2b.read() == target()[WEIGHTS]
    assert victim.read_text() == "mine"
    assert list(outside.iterdir()) == []


def test_ids_that_differ_in_case_are_one_model(shelf: Shelf):
    """On a Mac's disk their folders are one."""
    shelf.local.add("Some/Model", target())
    shelf.local.add("some/model", target())
    shelf.pull("Some/Model")
    shelf.pull("some/model")
    assert [one.id for one in shelf.store.models()] == ["Some/Model"]


# --- what can't be deleted, and what meets in between --------------------------------------------


def test_what_can_not_be_deleted_stops_no_other_model(e2b: Shelf):
    """A folder in a file's place, as root's files are to others; it goes once it can."""
    e2b.local.add(OTHER, target(seed=3))
    e2b.pull()
    place = e2b.cache.snapshot_folder(e2b.pulled().model) / WEIGHTS
    place.unlink()
    place.mkdir()
    with pytest.raises(ConfigError, match=r"is served no more, but .* can't be deleted"):
        e2b.store.remove(e2b.pulled())
    assert e2b.pull(OTHER).is_new
    place.rmdir()
    e2b.store.renew()
    assert not e2b.cache.repo_folder(E2B).exists()


def test_a_copy_of_a_draft_that_is_made_while_its_model_is_pulled_stays(e2b: Shelf):
    """The pull read the record before."""
    e2b.pull()
    pulled = e2b.pulled()
    assert pulled.draft
    copy = SmallerDraft(e2b.store.drafts / "copy", 4, of_commit=pulled.draft.commit)
    copy.folder.mkdir(parents=True)
    with closing(e2b.events()) as events:
        next(events)
        e2b.store.keep_smaller(pulled.id, copy)
        assert isinstance(list(events)[-1], Finished)
    assert e2b.pulled().smaller_draft == copy
    assert copy.folder.exists()


def test_without_a_network_a_begun_revision_is_no_reason_to_fail(e2b: Shelf):
    """The old one is whole, and nothing else is asked for."""
    first = e2b.pull().pulled.model.commit
    e2b.local.add(E2B, target(seed=5))
    newer = e2b.events(revision="main", draft="none")
    with closing(newer):
        next(e for e in newer if isinstance(e, Fetched) and e.n_bytes and e.file == WEIGHTS)
    e2b.local.stop()
    finished = e2b.pull()
    assert (finished.pulled.model.commit, finished.is_new) == (first, False)
    with pytest.raises(HubUnreachable):
        e2b.pull(draft="none")
    e2b.local.start()


def test_the_same_content_under_two_names_is_counted_once(e2b: Shelf):
    """Progress ends at all of it."""
    e2b.local.add(E2B, {**target(), "model-2.safetensors": target()[WEIGHTS]})
    *_, last, _ = e2b.events()
    assert isinstance(last, Fetched)
    assert last.n_present == last.n_bytes
    assert e2b.local.bytes_sent(E2B) < 310_000


def test_a_configured_draft_is_the_one_that_was_pulled_with_its_model(e2b: Shelf):
    """Another model may have brought a newer commit of it, and taken it along."""
    e2b.local.add("someone/gemma", target(seed=7))
    e2b.pull(draft=E2B_DRAFT)
    mine = locate_draft(E2B_DRAFT, e2b.store, of="gemma-4-e2b")
    e2b.local.add(E2B_DRAFT, draft(seed=8))
    e2b.pull("someone/gemma", draft=E2B_DRAFT)
    assert locate_draft(E2B_DRAFT, e2b.store, of="gemma-4-e2b") == mine
    e2b.store.remove(e2b.pulled("someone/gemma"))
    assert locate_draft(E2B_DRAFT, e2b.store) == mine
