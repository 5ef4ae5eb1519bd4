"""What another version wrote is read, and what a later one added is kept."""

import json
from pathlib import Path

import pytest

from mlx_worker import state
from mlx_worker.config import ModelEntry, load
from mlx_worker.config_file import set, unset
from mlx_worker.errors import ConfigError
from mlx_worker.policies import Policies
from mlx_worker.records import Settings

OF_0_1_0 = """\
model:
  # Folder or Hugging Face id of the model; null is the embedded demo pair.
  id: null
  draft: auto
generation:
  max_tokens: 300
  prefill_chunk_tokens: 512
speculation:
  mode: auto
  depth: null
  acceptance: coupled
  assistant_position: last_cached
"""
LATER = "server:\n  port: 9000\n  quic: true  # of a later version\nfuture: {a: [1]}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_the_configuration_of_0_1_0_loads(file: Path):
    """Each of its keys has the same effect; the one that nothing reads any more has none."""
    file.write_text(OF_0_1_0)
    config = load(file, {})
    assert config.models == ()
    assert config.generation.max_tokens == 300


def test_its_model_is_the_first_of_the_list(file: Path):
    """With its draft; also where it stood in a variable."""
    file.write_text("model: {id: org/large, draft: lookup}\n")
    assert load(file, {}).models == (ModelEntry(id="org/large", draft="lookup"),)
    file.write_text("")
    assert load(file, {"MLX_WORKER_MODEL__ID": "org/large"}).models[0].id == "org/large"


def test_further_models_of_a_file_before_the_list_follow_it(file: Path):
    """As `others` had them."""
    file.write_text("model: {id: a, others: [{id: b, draft: none}]}\n")
    assert [(entry.id, entry.draft) for entry in load(file, {}).models] == [
        ("a", "auto"),
        ("b", "none"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# mine\nmodel: {id: a, drat: b}\n", "line 2: unknown key: models.0.drat"),
        ("model: {id: a}\nmodels: [{id: b}]\n", "line 1: unknown key: model. .* models"),
        ("model: a\n", "line 1: unknown key: model. .* models"),
    ],
)
def test_an_old_section_with_a_mistake_is_named_with_its_line(file: Path, text: str, message: str):
    """Never guessed at."""
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file, {})


def test_a_setting_of_an_old_file_is_changed_in_it(file: Path):
    """Every other line stays; only the list has to be written by hand."""
    file.write_text(OF_0_1_0)
    set(file, "server.port", "9000")
    assert file.read_text() == f"{OF_0_1_0}server:\n  port: 9000\n"
    with pytest.raises(ConfigError, match="has model, of an older version"):
        set(file, "models.x.draft", "none")


def test_unknown_keys_are_kept_when_another_is_set(file: Path):
    """A later version wrote them, and may come back."""
    file.write_text(LATER)
    set(file, "server.port", "9001")
    set(file, "limits.waiting", "3")
    unset(file, "limits.waiting")
    assert file.read_text().startswith(LATER.replace("9000", "9001"))


def test_an_unknown_key_is_named_at_the_start(file: Path):
    """With its line; it may matter, so that nothing is served without it."""
    file.write_text(LATER)
    with pytest.raises(ConfigError, match=r"config.yaml, line 3: unknown key: server\.quic"):
        load(file, {})


def test_a_bad_value_is_refused_beside_unknown_keys(file: Path):
    """What this version knows is checked as ever."""
    file.write_text(LATER)
    with pytest.raises(ConfigError, match=r"server\.port: 70000"):
        set(file, "server.port", "70000")
    assert file.read_text() == LATER


def test_policies_of_another_version_are_read_and_kept(tmp_path: Path):
    """The key of the version before, and those of one after."""
    path = tmp_path / "policies.json"
    path.write_text('{"speculative_decoding": "off", "later": {"a": [1]}, "revision": 4}')
    policies = Policies(path)
    assert policies.read().settings == Settings(speculative_decoding="off")
    policies.change({"kv_prefix_cache": False})
    assert json.loads(path.read_text()) == {
        "speculative_decoding_disabled": True,
        "kv_prefix_cache": False,
        "later": {"a": [1]},
        "revision": 5,
    }


def test_the_state_of_a_later_version_is_read(home: Path):
    """What is unknown in it is left; a phase that is unknown counts as stopped."""
    said = state.own("ready", "9.0", address="http://127.0.0.1:1/")
    state.write(said)
    values = json.loads(state.default_path().read_text())
    state.default_path().write_text(
        json.dumps({**values, "phase": "napping", "new": 1, "models": {"demo": {"text": "On"}}})
    )
    found = state.read()
    assert found is not None
    assert (found.phase, found.version, found.models) == ("stopped", "9.0", ())
