"""policies.json: read, changed, kept whole, and never written over while it can't be read."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_worker.errors import ConfigError, InvalidParameter
from mlx_worker.policies import Kept, Policies
from mlx_worker.records import Settings


@pytest.fixture
def policies(tmp_path: Path) -> Policies:
    return Policies(tmp_path / "home" / "policies.json")


def test_without_a_file_everything_is_at_its_default(policies: Policies):
    """And none is made by asking."""
    assert policies.read() == Kept(Settings())
    assert not policies.path.exists()


def test_a_change_is_kept(policies: Policies):
    """For the next start, in a file of the user's own."""
    changed = policies.change({"speculative_decoding": "off"})
    assert changed == Kept(Settings(speculative_decoding="off"), revision=1)
    assert Policies(policies.path).read() == changed
    assert json.loads(policies.path.read_text()) == {
        "speculative_decoding_disabled": True,
        "revision": 1,
    }
    assert policies.path.stat().st_mode & 0o777 == 0o600


def test_other_keys_stay(policies: Policies):
    """They are another's."""
    policies.path.parent.mkdir()
    policies.path.write_text('{"of_another": [1, 2], "kv_prefix_cache": false}')
    policies.change({"speculative_decoding": "off"})
    kept = json.loads(policies.path.read_text())
    assert kept["of_another"] == [1, 2]
    assert kept["kv_prefix_cache"] is False


BROKEN = [
    "{",
    "[]",
    '{"speculative_decoding": "sometimes"}',
    '{"kv_prefix_cache": 1}',
    '{"kv_prefix_cache": "true"}',
    '{"speculative_decoding_disabled": "true"}',
    '{"speculative_decoding_disabled": 1}',
    '{"run_requests_together": null}',
    '{"revision": -1}',
    '{"revision": true}',
    '{"revision": 1e3}',
    '{"revision": 9007199254740992}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_can_not_be_read_counts_as_off(policies: Policies, text: str):
    """With the file, what is wrong with it and what to do."""
    policies.path.parent.mkdir()
    policies.path.write_text(text)
    settings, problem, revision = policies.read()
    assert revision == 0
    assert settings.speculative_decoding == "off"
    assert problem is not None
    assert str(policies.path) in problem
    assert "hint: " in problem


@pytest.mark.parametrize("text", BROKEN)
def test_what_can_not_be_read_is_not_written_over(policies: Policies, text: str):
    """A change is refused, and the file is as it was."""
    policies.path.parent.mkdir()
    policies.path.write_text(text)
    with pytest.raises(ConfigError):
        policies.change({"kv_prefix_cache": False})
    assert policies.path.read_text() == text


@pytest.mark.parametrize(
    "changes",
    [{"speculative_decoding": "on"}, {"kv_prefix_cache": 0}, {"run": True}, {"revision": 4}],
)
def test_what_is_no_setting_is_refused(policies: Policies, changes: dict[str, object]):
    """Nothing is written."""
    with pytest.raises(InvalidParameter):
        policies.change(changes)
    assert not policies.path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_can_not_be_written_is_named(policies: Policies):
    """And the settings stay what they were."""
    policies.path.parent.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="can't be written"):
        policies.change({"kv_prefix_cache": False})


def test_a_write_that_fails_leaves_the_file_whole(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
):
    """The disk is full; nothing half-written stays either."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    policies.change({"kv_prefix_cache": False})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="can't be written: No space left"):
        policies.change({"kv_prefix_cache": True})
    assert policies.read() == Kept(Settings(kv_prefix_cache=False), revision=1)
    assert [file.name for file in policies.path.parent.iterdir()] == ["policies.json"]


def test_changes_at_the_same_time_never_break_the_file(tmp_path: Path):
    """They used to write one draft of it together; a reader then met half a file."""
    path = tmp_path / "policies.json"
    policies, others = Policies(path), Policies(path)  # a second one, as another worker's
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit((policies, others)[n % 2].change, {"kv_prefix_cache": n % 4 < 2})
            for n in range(200)
        ]
        while not all(one.done() for one in asked):
            assert policies.read()[1] is None
    assert all(one.exception() is None for one in asked)
    assert [file.name for file in tmp_path.iterdir()] == ["policies.json"]


def test_what_the_file_does_not_say_is_the_configurations(tmp_path: Path):
    """And what it says wins over that."""
    policies = Policies(tmp_path / "policies.json", Settings(speculative_decoding="off"))
    assert policies.read() == Kept(Settings(speculative_decoding="off"))
    kept = policies.change({"kv_prefix_cache": False})
    assert kept.settings.speculative_decoding == "off"
    kept = policies.change({"speculative_decoding": "auto"})
    assert kept == policies.read() == Kept(Settings(kv_prefix_cache=False), revision=2)


@pytest.mark.parametrize(("old", "is_disabled"), [("auto", False), ("off", True)])
def test_an_older_file_is_understood_and_renewed_by_the_next_change(
    policies: Policies, old: str, is_disabled: bool
):
    """It names the mode; there is one key for it afterwards."""
    policies.path.parent.mkdir()
    policies.path.write_text(json.dumps({"speculative_decoding": old, "of_another": 1}))
    assert policies.read().settings.speculative_decoding == old
    assert policies.change({"kv_prefix_cache": False}).settings.speculative_decoding == old
    assert json.loads(policies.path.read_text()) == {
        "of_another": 1,
        "speculative_decoding_disabled": is_disabled,
        "kv_prefix_cache": False,
        "revision": 1,
    }


def test_without_its_line_drafting_is_automatic_again(policies: Policies):
    """Whatever else is in the file."""
    policies.change({"speculative_decoding": "off", "kv_prefix_cache": False})
    values = json.loads(policies.path.read_text())
    del values["speculative_decoding_disabled"]
    policies.path.write_text(json.dumps(values))
    assert policies.read() == Kept(Settings(kv_prefix_cache=False), revision=1)


@pytest.mark.parametrize(("revision", "is_obeyed"), [(1, False), (2, False), (3, True), (9, True)])
def test_a_change_from_elsewhere_counts_if_it_is_newer(
    policies: Policies, revision: int, is_obeyed: bool
):
    """Than the last one made here."""
    policies.change({"kv_prefix_cache": False})
    policies.change({"run_requests_together": True})
    kept = policies.change({"speculative_decoding": "off"}, revision)
    assert (kept.settings.speculative_decoding == "off") is is_obeyed
    assert kept == policies.read()
    assert kept.revision == (revision if is_obeyed else 2)


def test_a_change_of_nothing_is_no_change(policies: Policies):
    """The revision stays."""
    assert policies.change({}) == Kept(Settings())
    assert not policies.path.exists()
