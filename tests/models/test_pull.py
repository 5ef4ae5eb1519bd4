"""A model and its draft as one act: what is found, checked, kept, and said."""

import contextlib
import hashlib
import json
import shutil
import socket
import time
from collections import namedtuple
from random import Random
from typing import Any

import pytest

from mlx_worker.errors import (
    ConfigError,
    GatedModel,
    HubError,
    HubUnreachable,
    ModelError,
    ModelNotFound,
    NoSpace,
    UnsupportedModel,
)
from mlx_worker.models import cache, catalogue, hub
from mlx_worker.models.locate import locate
from mlx_worker.models.pull import Fetched, Finished, Planned
from mlx_worker.records import Source
from tests.hub_faults import Fault
from tests.models.shelf import (
    E2B,
    E2B_DRAFT,
    OTHER,
    WEIGHTS,
    Shelf,
    draft,
    noise,
    target,
    tokenizer_json,
)


def source(shelf: Shelf, name: str = "gemma-4-e2b") -> Source:
    found = locate(name, shelf.store)
    assert isinstance(found, Source)
    return found


# --- what comes -------------------------------------------------------------------------------


def test_one_name_brings_the_model_and_its_draft(e2b: Shelf):
    """From nothing: the user need not know that drafts exist."""
    finished = e2b.pull()
    assert finished.is_new
    found = source(e2b)
    assert found.name == "gemma-4-e2b"
    assert (found.folder / WEIGHTS).read_bytes() == target()[WEIGHTS]
    assert found.draft
    assert found.draft.name == E2B_DRAFT
    assert (found.draft.folder / WEIGHTS).read_bytes() == draft()[WEIGHTS]


@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-e2b:4bit", E2B, E2B.upper()])
def test_every_spelling_is_the_same_model(e2b: Shelf, name: str):
    e2b.pull(name)
    assert [one.id for one in e2b.store.models()] == ["gemma-4-e2b"]


def test_programs_pickles_and_folders_are_never_fetched(e2b: Shelf):
    """Only configs, tokenizer, card and safetensors of the top folder are asked for."""
    e2b.pull()
    asked = {one.file for one in e2b.local.requests if one.repo == E2B and one.file}
    assert asked == {"config.json", "tokenizer.json", WEIGHTS, "README.md"}


def test_progress_only_grows_and_ends_with_everything(e2b: Shelf):
    """One count for both repositories; what is planned is what comes."""
    events = list(e2b.events())
    planned = next(event for event in events if isinstance(event, Planned))
    counts = [event.n_present for event in events if isinstance(event, Fetched) and event.n_bytes]
    sizes = [len(one) for files in (target(), draft()) for name, one in files.items()]
    sizes = [
        len(v) for k, v in (*target().items(), *draft().items()) if k[-3:] not in (".py", "bin")
    ]
    assert planned.n_bytes == sum(sizes)
    assert counts == sorted(counts)
    assert counts[-1] == planned.n_bytes
    assert isinstance(events[-1], Finished)


def test_the_commit_is_recorded_and_stays(e2b: Shelf):
    """A new commit on the hub changes nothing here until the next pull."""
    e2b.pull()
    before = source(e2b)
    newer = e2b.local.add(E2B, target(seed=5))
    assert source(e2b) == before
    assert e2b.pull().is_new
    assert e2b.pulled().model.commit == newer
    assert e2b.read() == noise(300_000, 5)


def test_what_a_newer_commit_replaces_is_deleted(e2b: Shelf):
    e2b.pull()
    before = source(e2b).folder
    e2b.local.add(E2B, target(seed=5))
    e2b.pull()
    assert not before.exists()
    blobs = list((e2b.cache.repo_folder(E2B) / "blobs").iterdir())
    assert len(blobs) == len(e2b.pulled().model.files)


def test_while_a_newer_commit_comes_the_old_one_is_served(e2b: Shelf):
    """And a pull of it that was given up leaves it so."""
    e2b.pull()
    before = source(e2b)
    e2b.local.add(E2B, target(seed=5))
    with contextlib.closing(e2b.events()) as events:
        next(e for e in events if isinstance(e, Fetched) and e.n_bytes and e.file == WEIGHTS)
        assert source(e2b) == before
    assert source(e2b) == before
    e2b.pull()
    assert source(e2b) != before


def test_a_revision_can_be_named(e2b: Shelf):
    first = e2b.pull().pulled.model.commit
    e2b.local.add(E2B, target(seed=5))
    e2b.pull(revision=first)
    assert e2b.pulled().model.commit == first
    with pytest.raises(ModelNotFound, match=r"at nowhere.*check the revision"):
        e2b.pull(revision="nowhere")


def test_a_second_pull_checks_and_fetches_nothing(e2b: Shelf):
    e2b.pull()
    e2b.local.forget()
    assert not e2b.pull().is_new
    assert e2b.local.bytes_sent() == 0


# --- interrupted ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_stopped_anywhere_the_same_command_goes_on(e2b: Shelf, seed: int):
    """Ctrl-C is a closed generator: between any two events. No weights come twice."""
    stop_at = Random(seed).randrange(1, sum(1 for _ in e2b.events()))
    e2b.store.remove(e2b.pulled())
    e2b.local.forget()
    with contextlib.closing(e2b.events()) as events:
        for _ in range(stop_at):
            next(events, None)
    contents = {E2B: target()[WEIGHTS], E2B_DRAFT: draft()[WEIGHTS]}
    here = {repo: n_partial(e2b, repo, content) for repo, content in contents.items()}
    e2b.local.forget()
    e2b.pull()
    assert e2b.read() == target()[WEIGHTS]
    for one in e2b.local.requests:
        if one.file == WEIGHTS:
            assert (one.range_start or 0) == here[str(one.repo)]
    assert e2b.leftovers() == []


def n_partial(shelf: Shelf, repo: str, content: bytes) -> int:
    """Bytes of a file that is on its way."""
    name = f"{hashlib.sha256(content).hexdigest()}.incomplete"
    return cache.size_of(shelf.cache.repo_folder(repo) / "blobs" / name) or 0


def test_half_a_model_is_not_served_and_says_what_to_do(e2b: Shelf):
    with contextlib.closing(e2b.events()) as events:
        next(e for e in events if isinstance(e, Fetched) and e.n_bytes and e.file == WEIGHTS)
    with pytest.raises(Exception, match="mlx-worker pull gemma-4-e2b gets what is missing"):
        source(e2b)


@pytest.mark.parametrize("what", ["blob", "link", "snapshot", "repository", "cache"])
def test_what_was_removed_by_hand_is_fetched_again(e2b: Shelf, what: str):
    """Of a whole model, anything may be deleted; the record remains."""
    e2b.pull()
    folder = e2b.cache.snapshot_folder(e2b.pulled().model)
    gone = {
        "blob": (folder / WEIGHTS).resolve(),
        "link": folder / WEIGHTS,
        "snapshot": folder,
        "repository": e2b.cache.repo_folder(E2B),
        "cache": e2b.cache.folder,
    }[what]
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    assert WEIGHTS in e2b.presence().missing
    e2b.pull()
    assert e2b.read() == target()[WEIGHTS]


def test_a_wrong_byte_on_the_disk_is_mended(e2b: Shelf):
    """Found by its digest, though name and size are right."""
    e2b.pull()
    blob = (e2b.cache.snapshot_folder(e2b.pulled().model) / WEIGHTS).resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    assert e2b.pull().is_new
    assert e2b.read() == target()[WEIGHTS]


def test_without_a_network_what_is_here_is_said_to_be(e2b: Shelf):
    e2b.pull()
    e2b.local.stop()
    finished = e2b.pull()
    assert not finished.is_new
    assert finished.is_unchecked
    assert "can't be reached" in finished.is_unchecked
    e2b.local.start()


def test_without_a_network_what_is_not_here_is_an_error(e2b: Shelf):
    e2b.local.stop()
    with pytest.raises(HubUnreachable, match=r"can't be reached.*check the network"):
        e2b.pull()
    e2b.local.start()


def test_an_offline_machine_asks_nobody(e2b: Shelf, monkeypatch: pytest.MonkeyPatch):
    """HF_HUB_OFFLINE=1: what is here is used, what isn't is an error that names the variable."""
    from huggingface_hub import constants

    e2b.pull()
    e2b.local.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not e2b.pull().is_new
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE is set"):
        e2b.pull("gemma-4-12b")
    assert e2b.local.requests == []


# --- the draft --------------------------------------------------------------------------------


def test_a_quantised_draft_is_preferred(e2b: Shelf):
    quantised = catalogue.drafts_of("gemma-4-e2b")[0]
    e2b.local.add(quantised, draft(seed=3))
    e2b.pull()
    assert quantised.endswith("-4bit")
    assert source(e2b).draft.name == quantised  # type: ignore[union-attr]


def test_a_model_without_a_draft_works_and_says_so(shelf: Shelf):
    shelf.local.add(E2B, target())
    pulled = shelf.pull().pulled
    assert pulled.draft is None
    assert pulled.draft_note == "the hub has none for it"
    assert source(shelf).draft_problem == "the hub has none for it"


def test_a_draft_of_another_size_is_passed_over_and_said(shelf: Shelf):
    """What is found must fit; the model works without."""
    shelf.local.add(E2B, target())
    shelf.local.add(E2B_DRAFT, draft(backbone_hidden_size=48))
    pulled = shelf.pull().pulled
    assert pulled.draft is None
    note = "backbone_hidden_size: the model has 32, the draft has 48"
    assert pulled.draft_note == f"{E2B_DRAFT}: {note}"
    assert not shelf.cache.repo_folder(E2B_DRAFT).exists()


def test_a_draft_with_another_vocabulary_is_not_used(shelf: Shelf):
    """By the content of tokenizer.json; that another file has the name is no reason."""
    shelf.local.add(E2B, target())
    shelf.local.add(E2B_DRAFT, {**draft(), "tokenizer.json": tokenizer_json({"a": 1, "b": 0})})
    pulled = shelf.pull().pulled
    assert pulled.draft is None
    assert "vocabulary" in str(pulled.draft_note)


def test_a_tokenizer_in_other_words_is_the_same_vocabulary(shelf: Shelf):
    """Another order, template and version: only tokens and ids count."""
    shelf.local.add(E2B, target())
    other = tokenizer_json({"b": 1, "a": 0}, version="9", truncation=None)
    shelf.local.add(E2B_DRAFT, {**draft(), "tokenizer.json": other})
    assert shelf.pull().pulled.draft


def test_no_draft_is_fetched_where_none_is_wanted(e2b: Shelf):
    e2b.pull(draft="none")
    assert e2b.pulled().draft is None
    assert not any(one.repo == E2B_DRAFT for one in e2b.local.requests)


def test_a_named_draft_is_taken(e2b: Shelf):
    e2b.local.add("someone/draft", draft(seed=9))
    e2b.pull(draft="someone/draft")
    assert source(e2b).draft.name == "someone/draft"  # type: ignore[union-attr]


def test_a_named_draft_that_is_not_there_or_does_not_fit_is_an_error(e2b: Shelf):
    """Whoever names one wants that one; nothing is put in its place."""
    with pytest.raises(ModelNotFound, match="someone/nothing"):
        e2b.pull(draft="someone/nothing")
    e2b.local.add("someone/draft", draft(backbone_hidden_size=48))
    with pytest.raises(UnsupportedModel, match="the model has 32, the draft has 48"):
        e2b.pull(draft="someone/draft")
    assert e2b.store.models() == []


def test_what_was_asked_for_holds_for_the_next_pull(e2b: Shelf):
    """Without a draft, at a commit: a repair brings neither a draft nor another revision."""
    first = e2b.pull(draft="none").pulled.model.commit
    e2b.pull(revision=first)
    e2b.local.add(E2B, target(seed=5))
    assert not e2b.pull().is_new
    assert (e2b.pulled().draft, e2b.pulled().model.commit) == (None, first)
    e2b.pull(draft="auto", revision="main")
    assert e2b.pulled().draft
    assert e2b.read() == noise(300_000, 5)


def test_a_change_of_draft_deletes_the_other(e2b: Shelf):
    e2b.local.add("someone/draft", draft(seed=9))
    e2b.pull()
    e2b.pull(draft="someone/draft")
    assert not e2b.cache.repo_folder(E2B_DRAFT).exists()
    e2b.pull(draft="none")
    assert not e2b.cache.repo_folder("someone/draft").exists()


def test_the_same_hub_is_searched_for_a_draft_by_name(shelf: Shelf):
    """`<id>-assistant` belongs to a conversion that the catalogue doesn't know."""
    shelf.local.add("someone/my-gemma", target())
    shelf.local.add("someone/my-gemma-assistant", draft())
    shelf.pull("someone/my-gemma")
    assert shelf.pulled("someone/my-gemma").draft.repo == "someone/my-gemma-assistant"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spelling",
    ["google/gemma-4-E2B-it", "google/gemma-4-e2b-it", ["google/gemma-4-E2B-it"]],
)
def test_the_card_says_whose_draft_fits(shelf: Shelf, spelling: Any):
    """A conversion by anyone names what it was made from; cards spell it in several ways."""
    card = f"---\nbase_model: {json.dumps(spelling)}\nlicense: x\n---\n# Mine\n"
    shelf.local.add("someone/mine", {**target(), "README.md": card.encode()})
    shelf.local.add(E2B_DRAFT, draft())
    shelf.pull("someone/mine")
    assert shelf.pulled("someone/mine").draft.repo == E2B_DRAFT  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"---\n",
        b"---\n: [\n---\n",
        b"---\n[1]\n---\n",
        b"\xff\xfe",
        b"---\nbase_model: 3\n---\n",
    ],
)
def test_a_card_that_can_not_be_read_is_no_error(shelf: Shelf, card: bytes):
    shelf.local.add(OTHER, {**target(), "README.md": card})
    assert shelf.pull(OTHER).pulled.draft is None


def test_any_other_model_is_pulled_without_a_draft(shelf: Shelf):
    """Nothing of Gemma is expected of it."""
    files = target()
    files["config.json"] = json.dumps({"model_type": "llama", "vocab_size": 2}).encode()
    shelf.local.add(OTHER, files)
    shelf.pull(OTHER)
    assert source(shelf, OTHER).draft is None


def test_a_gated_draft_is_passed_over_and_said(shelf: Shelf):
    shelf.local.add(E2B, target())
    shelf.local.add(E2B_DRAFT, draft(), gated=True, token="hf_right")
    note = shelf.pull().pulled.draft_note
    assert f"{E2B_DRAFT} is gated" in str(note)


# --- refused ----------------------------------------------------------------------------------


def test_an_unknown_name_names_the_nearest(shelf: Shelf):
    with pytest.raises(ModelNotFound, match="did you mean gemma-4-e2b"):
        shelf.pull("gema4-e2b")
    with pytest.raises(ModelNotFound, match=r"someone/nothing.*check the spelling"):
        shelf.pull("someone/nothing")


@pytest.mark.parametrize(
    "name", ["", ".", "/", "~", "a/b/c", "-", "a b", "../x", "demo", "x" * 9999, "a/b\ud800", "a/é"]
)
def test_what_is_no_name_is_refused(shelf: Shelf, name: str):
    with pytest.raises((ModelNotFound, HubError)):
        shelf.pull(name)
    assert shelf.store.models() == []


def test_a_gated_model_says_how_to_get_access(shelf: Shelf):
    shelf.local.add(E2B, target(), gated=True, token="hf_right")
    with pytest.raises(GatedModel, match=r"licence must be accepted.*hf auth login"):
        shelf.pull()


def test_a_full_disk_is_said_before_the_first_byte(e2b: Shelf, monkeypatch: pytest.MonkeyPatch):
    """Both repositories count; what is here doesn't."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 500_200_000))
    with pytest.raises(NoSpace, match=r"500 MB free.*HF_HOME"):
        e2b.pull()
    assert e2b.local.bytes_sent(E2B, WEIGHTS) == 0
    assert e2b.store.models() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 501_000_000))
    e2b.pull()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"README.md": b"x"}, "no config.json"),
        ({"config.json": b"{}", "model.gguf": b"x"}, r"no model\*.safetensors but gguf"),
        ({"config.json": b"[]", WEIGHTS: b"x"}, "no JSON object"),
        ({"config.json": b"\xff", WEIGHTS: b"x"}, "no JSON object"),
        ({"config.json": b"[" * 100_000, WEIGHTS: b"x"}, "no JSON object"),
        (draft(), "is a draft .gemma4_assistant., not a model"),
    ],
)
def test_what_is_no_model_is_said_before_its_weights_come(
    shelf: Shelf, files: dict[str, bytes], why: str
):
    shelf.local.add(OTHER, files)
    with pytest.raises(UnsupportedModel, match=why):
        shelf.pull(OTHER)
    assert shelf.store.models() == []


def test_a_hub_that_fails_is_quoted(e2b: Shelf, monkeypatch: pytest.MonkeyPatch):
    """Asked a few times more first."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    e2b.local.faults.add(Fault("status", "tree/*", place="api", status=500, times=None))
    with pytest.raises(HubError, match="the hub answered 500"):
        e2b.pull()


def test_a_record_that_can_not_be_read_is_not_written_over(e2b: Shelf):
    e2b.store.path.parent.mkdir()
    e2b.store.path.write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        e2b.pull()
    assert e2b.store.path.read_text() == "{"


def test_a_cache_that_can_not_be_written_is_said(e2b: Shelf):
    e2b.cache.folder.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cache.*can't be used.*HF_HOME"):
        e2b.pull()


def test_a_hub_that_never_answers_is_given_up(shelf: Shelf, monkeypatch: pytest.MonkeyPatch):
    """A stall has an end for every question, not only for files."""
    monkeypatch.setattr(hub, "ANSWERS_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shelf.hub = hub.Hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HubUnreachable, match="did not answer in time"):
            shelf.pull()


def test_a_list_of_many_pages_is_read_to_its_end(e2b: Shelf):
    e2b.local.page_size = 2
    e2b.pull()
    assert e2b.read() == target()[WEIGHTS]


def test_two_pulls_at_once_bring_it_once(e2b: Shelf):
    """Event by event in turn: neither breaks the other's files, and all of it comes once."""
    first, second = e2b.events(), e2b.events()
    ends: list[Any] = []
    running = [first, second]
    while running:
        for one in list(running):
            event = next(one, None)
            if event is None:
                running.remove(one)
            elif isinstance(event, Finished):
                ends.append(event)
    assert len(ends) == 2
    assert e2b.read() == target()[WEIGHTS]
    assert e2b.local.bytes_sent(E2B, WEIGHTS) == 300_000
