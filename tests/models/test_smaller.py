"""Which draft a copy is made of, where it lies, and what becomes of it when the model changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_worker.errors import ConfigError, IncompleteModel
from mlx_worker.models import smaller
from mlx_worker.models.listing import pulled_json
from mlx_worker.models.locate import locate
from mlx_worker.models.store import Pulled, SmallerDraft, Store
from mlx_worker.records import Source
from tests.drafts import DRAFT_COMMIT, REPO, pull_demo


@pytest.fixture
def store() -> Store:
    store = Store.default()
    pull_demo(store)
    return store


def now(store: Store) -> Pulled:
    pulled = store.find(REPO)
    assert pulled is not None
    return pulled


def make(store: Store, bits: int = 4, *, is_chosen: bool = True) -> SmallerDraft:
    """A copy as it is kept, of one small file."""
    copy = replace(smaller.plan(REPO, store, bits, 64).copy, is_chosen=is_chosen)
    copy.folder.mkdir(parents=True, exist_ok=True)
    (copy.folder / "config.json").write_text("{}")
    store.keep_smaller(REPO, copy)
    return copy


def draft_of(store: Store) -> Path:
    source = locate(REPO, store)
    assert isinstance(source, Source)
    assert source.draft is not None
    return source.draft.folder


# --- the plan ---------------------------------------------------------------------------------


def test_a_plan_names_the_files_of_both_and_a_folder_of_ours(store: Store, home: Path):
    """Nothing is written."""
    plan = smaller.plan(REPO, store, 4, 64)
    assert plan.copy.folder == home / ".mlx-worker/drafts/acme--demo-it-assistant-4bit"
    assert (plan.copy.of_commit, plan.is_made) == (DRAFT_COMMIT, False)
    assert (plan.model_folder / "tokenizer.json").exists()
    assert (plan.draft_folder / "model.safetensors").exists()
    assert not store.drafts.exists()


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("gemma-4-e2b:8bit", "gemma-4-e2b--8bit-assistant-4bit"),
        ("../../etc", "etc-assistant-4bit"),
        ("owner/näme", "owner--n--me-assistant-4bit"),
    ],
)
def test_a_folders_name_is_no_path(id: str, name: str):
    """Whatever a model is called."""
    assert smaller.folder_name(id, 4) == name


def test_the_same_copy_is_not_made_twice(store: Store):
    """Other bits, another group size or a folder that is gone make a new one."""
    copy = make(store)
    assert smaller.plan(REPO, store, 4, 64).is_made
    assert smaller.plan(REPO, store, 4, 64).copy.is_chosen
    assert not smaller.plan(REPO, store, 8, 64).is_made
    other = smaller.plan(REPO, store, 4, 32)
    assert (other.is_made, other.copy.is_chosen) == (False, False)
    (copy.folder / "config.json").unlink()
    assert not smaller.plan(REPO, store, 4, 64).is_made


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo", r"'demo' was not pulled\. hint: only the draft of a pulled model.*acme/demo-it"),
        ("./folder", r"'\./folder' was not pulled\. hint: only the draft of a pulled model"),
        ("gemma-4-e2b", r"'gemma-4-e2b' was not pulled\. hint: mlx-worker pull gemma-4-e2b; pul"),
        ("a/b", r"'a/b' was not pulled\. hint: mlx-worker pull a/b; pulled: acme/demo-it"),
    ],
)
def test_a_model_that_was_not_pulled_is_refused(store: Store, name: str, message: str):
    """With what to do, and what there is."""
    with pytest.raises(ConfigError, match=message):
        smaller.plan(name, store, 4, 64)


def test_a_model_without_a_draft_is_refused_with_the_reason(store: Store):
    """None, or lookup: there are no weights."""
    store.put(replace(now(store), draft=None, draft_note="none was asked for"))
    message = rf"{REPO} has no draft that could be quantised: none was asked for\. hint: mlx-w"
    with pytest.raises(ConfigError, match=message):
        smaller.plan(REPO, store, 4, 64)


def test_a_model_that_is_not_whole_is_refused(store: Store):
    """As when it is to be served."""
    (smaller.plan(REPO, store, 4, 64).draft_folder / "model.safetensors").unlink()
    with pytest.raises(IncompleteModel, match=rf"mlx-worker pull {REPO}"):
        smaller.plan(REPO, store, 4, 64)


# --- the choice -------------------------------------------------------------------------------


def test_a_copy_serves_only_when_it_is_chosen(store: Store):
    """And no longer once it isn't, or its folder is gone."""
    published = draft_of(store)
    copy = make(store, is_chosen=False)
    assert draft_of(store) == published
    store.keep_smaller(REPO, replace(copy, is_chosen=True))
    assert draft_of(store) == copy.folder
    assert pulled_json(store, {})[0]["smaller_draft"] == {"bits": 4, "is_chosen": True}
    store.keep_smaller(REPO, copy)
    assert draft_of(store) == published


def test_a_copy_with_other_bits_takes_the_earlier_ones_place(store: Store):
    """A model has one."""
    four, eight = make(store, 4), make(store, 8)
    assert (four.folder.exists(), eight.folder.exists()) == (False, True)
    assert now(store).smaller_draft == eight


def test_a_model_that_was_removed_meanwhile_keeps_no_copy(store: Store):
    """Measuring takes minutes."""
    copy = make(store)
    store.remove(now(store))
    copy.folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"was removed, or got another draft, while"):
        store.keep_smaller(REPO, copy)
    assert not copy.folder.exists()


def test_removing_a_model_deletes_its_copy(store: Store):
    """And counts its bytes."""
    copy = make(store)
    (copy.folder / "model.safetensors").write_bytes(bytes(1000))
    weights = now(store).n_bytes
    assert store.remove(now(store)) == weights + 1000 + 2
    assert not copy.folder.exists()


def test_a_folder_that_is_not_ours_is_never_deleted(store: Store, tmp_path: Path):
    """models.json is a file that people may edit."""
    folder = tmp_path / "precious"
    folder.mkdir()
    store.put(replace(now(store), smaller_draft=SmallerDraft(folder, 4)))
    store.remove(now(store))
    assert folder.exists()


def test_another_commit_of_the_draft_makes_a_copy_void(store: Store):
    """It would draft, but as the old one: it is neither used nor shown, and goes with the pull."""
    copy = make(store)
    newer = pull_demo(store, draft_commit="c" * 40)
    store.put(replace(newer, smaller_draft=copy))
    assert draft_of(store) == store.cache.snapshot_folder(newer.snapshots[1])
    assert pulled_json(store, {})[0]["smaller_draft"] is None
    store.finish(newer)
    assert now(store).smaller_draft is None
    assert not copy.folder.exists()


def test_pulling_the_same_draft_again_keeps_its_copy(store: Store):
    """Even a pull that was begun before the copy was made."""
    begun = now(store)
    copy = make(store)
    store.finish(replace(begun, model=replace(begun.model, commit="d" * 40)))
    assert now(store).smaller_draft == copy
    assert copy.folder.exists()
