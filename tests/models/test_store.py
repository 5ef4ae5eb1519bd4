"""What was pulled: the record, what is here of it, and what a removal deletes."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_worker.errors import ConfigError, IncompleteModel, ModelNotFound
from mlx_worker.files import locked
from mlx_worker.models import locate as locating
from mlx_worker.models.cache import Cache, RepoFile, Snapshot
from mlx_worker.models.locate import locate
from mlx_worker.models.store import Pulled, Store
from mlx_worker.records import Source

A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home", Cache(tmp_path / "cache"))


def snapshot(repo: str, commit: str = "1", **files: str) -> Snapshot:
    """Files by name and digest; each has the length of its digest."""
    listed = tuple(RepoFile(name, len(digest), digest) for name, digest in files.items())
    return Snapshot(repo, commit * 40, listed)


def bring(store: Store, *snapshots: Snapshot) -> None:
    """All their files, as a pull leaves them."""
    for one in snapshots:
        for file in one.files:
            blob = store.cache.blob(one.repo, file)
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(file.digest)
            store.cache.link(one, file)
        store.cache.point(one.repo, "main", one.commit)


def files_of(store: Store) -> set[str]:
    return {path.name for path in store.cache.folder.rglob("*") if path.is_file()}


def test_what_is_kept_comes_back(store: Store):
    draft = snapshot("o/draft", model=B)
    one = Pulled("o/m", snapshot("o/m", model=A), draft, None, "v2", "o/draft", 12.5)
    other = Pulled("o/n", snapshot("o/n", "2", model=C), draft_note="none", pending=one)
    store.put(one)
    store.put(other)
    assert store.models() == [one, other]
    store.put(replace(one, draft=None))
    assert store.models() == [replace(one, draft=None), other]
    store.remove(one)
    assert store.models() == [other]


def test_many_at_once_lose_nothing(store: Store):
    """Each change reads and writes the file under one lock."""
    many = [Pulled(f"o/{n}", snapshot(f"o/{n}", model=A)) for n in range(12)]
    threads = [threading.Thread(target=store.put, args=(one,)) for one in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.id for one in store.models()} == {one.id for one in many}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "can't be read"),
        ("[]", "can't be read"),
        ('{"format": 2, "models": []}', "format 2, this version reads 1"),
        ('{"format": 1, "models": [{"id": "x"}]}', "can't be read"),
        ('{"format": 1, "models": 3}', "can't be read"),
    ],
)
def test_a_record_that_is_broken_is_said_and_kept(store: Store, text: str, why: str):
    store.path.parent.mkdir()
    store.path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        store.models()
    with pytest.raises(ConfigError):
        store.put(Pulled("o/m", snapshot("o/m", model=A)))
    assert store.path.read_text() == text


def test_a_removal_leaves_nothing_behind(store: Store):
    one = Pulled("o/m", snapshot("o/m", model=A, config=B), snapshot("o/d", model=C))
    bring(store, *one.snapshots)
    store.put(one)
    assert store.remove(one) == 3 * 64
    assert files_of(store) == set()
    assert store.models() == []


def test_a_draft_that_another_model_uses_stays(store: Store):
    """And goes with the last of them."""
    draft = snapshot("o/d", model=C)
    first = Pulled("o/m", snapshot("o/m", model=A), draft)
    second = Pulled("o/n", snapshot("o/n", model=B), draft)
    bring(store, *first.snapshots, *second.snapshots)
    store.put(first)
    store.put(second)
    assert store.remove(first) == 64
    assert store.presence(second).is_whole
    assert store.remove(second) == 128
    assert files_of(store) == set()


def test_a_file_that_two_commits_share_stays_with_the_other(store: Store):
    """Another program may have fetched another commit of the same repository."""
    mine, theirs = snapshot("o/m", "1", model=A, same=B), snapshot("o/m", "2", model=C, same=B)
    bring(store, mine, theirs)
    store.put(Pulled("o/m", mine))
    store.remove(Pulled("o/m", mine))
    assert files_of(store) >= {B, C}
    assert A not in files_of(store)


def test_a_removal_takes_what_was_on_its_way(store: Store):
    one = Pulled("o/m", snapshot("o/m", model=A))
    partial = store.cache.partial("o/m", one.model.files[0])
    partial.parent.mkdir(parents=True)
    partial.write_text("abc")
    store.put(one)
    assert store.remove(one) == 3
    assert files_of(store) == set()


def test_what_is_here_is_counted(store: Store):
    """Whole files, files on their way, and links to files that are gone."""
    one = Pulled("o/m", snapshot("o/m", model=A, config=B))
    assert store.presence(one).n_bytes == 0
    bring(store, snapshot("o/m", config=B))
    store.cache.partial("o/m", one.model.files[0]).write_text("abc")
    presence = store.presence(one)
    assert (presence.n_bytes, presence.missing) == (67, ("model",))
    store.cache.blob("o/m", one.model.files[1]).unlink()
    assert store.presence(one).missing == ("model", "config")


def test_a_file_that_icloud_took_away_is_missing(store: Store, monkeypatch: pytest.MonkeyPatch):
    """macOS marks a file whose content is elsewhere; its size is still told."""
    one = Pulled("o/m", snapshot("o/m", model=A))
    bring(store, one.model)
    assert store.presence(one).is_whole
    real = Path.stat

    class Dataless:
        st_size = 64
        st_flags = 0x40000000

    monkeypatch.setattr(
        Path, "stat", lambda p, **o: Dataless() if "snapshots" in p.parts else real(p, **o)
    )
    assert not store.presence(one).is_whole


def test_a_download_is_seen_by_others_until_it_ends(store: Store):
    one = Pulled("o/m", snapshot("o/m", model=A))
    assert not store.presence(one).is_downloading
    with locked(store.lock("o/m")):
        assert store.presence(one).is_downloading
    assert not store.presence(one).is_downloading


# --- names ------------------------------------------------------------------------------------


def test_a_model_that_is_not_whole_is_not_located(store: Store):
    one = Pulled("o/m", snapshot("o/m", model=A, config=B))
    bring(store, snapshot("o/m", config=B))
    store.put(one)
    with pytest.raises(IncompleteModel, match=r"o/m: 1 of its 2 files is not here whole"):
        locate("o/m", store)


def test_a_model_that_another_program_fetched_is_located(store: Store):
    """With its draft, if that is here too."""
    model = snapshot("o/m", **{"config.json": A, "model.safetensors": B})
    draft = snapshot("o/m-assistant", **{"config.json": A})
    bring(store, model)
    assert locate("o/m", store) == Source("o/m", store.cache.snapshot_folder(model))
    bring(store, draft)
    found = locate("o/m", store)
    assert isinstance(found, Source)
    assert found.draft == Source("o/m-assistant", store.cache.snapshot_folder(draft))


@pytest.mark.parametrize("name", ["demo", "/some/folder", "./x", "~/x", "", " "])
def test_what_the_engine_finds_by_itself_is_left_to_it(store: Store, name: str):
    assert locate(name, store) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gemma-4-e2b", "mlx-worker pull gemma-4-e2b"),
        ("o/m", "mlx-worker pull o/m"),
        ("gema-4-e2b", "did you mean gemma-4-e2b"),
        ("x" * 5000, "owner/name as on the hub"),
    ],
)
def test_a_model_that_is_not_here_says_what_to_do(store: Store, name: str, hint: str):
    with pytest.raises(ModelNotFound) as raised:
        locate(name, store)
    assert hint in str(raised.value.hint)


def test_a_draft_may_be_a_word(store: Store):
    assert [locating.locate_draft(word, store) for word in ("auto", "none", "lookup", None)] == [
        "auto",
        "none",
        "lookup",
        None,
    ]


def test_the_record_says_nothing_twice_and_can_be_read(store: Store):
    """It is a file that a person may look at."""
    store.put(Pulled("o/m", snapshot("o/m", model=A), draft_note="the hub has none for it"))
    kept = json.loads(store.path.read_text())
    assert kept["format"] == 1
    assert kept["models"][0]["draft_note"] == "the hub has none for it"
    assert store.path.stat().st_mode & 0o777 == 0o600
