"""What doctor says of the disk, the folder, the settings, the models, the port and who serves."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_worker.config import Config, ModelEntry
from mlx_worker.doctor import duty, examine, models, storage
from mlx_worker.doctor.check import Check, Question, ask, within
from mlx_worker.doctor.device import Device
from mlx_worker.doctor.duty import Port
from mlx_worker.doctor.models import Model
from mlx_worker.doctor.storage import Disk, Folder
from mlx_worker.engine.checkpoint import DEMO_FOLDER
from mlx_worker.local import Seen
from mlx_worker.models.store import Store
from mlx_worker.policies import Policies
from mlx_worker.service.manager import ServiceState

GB = 1_000_000_000
HOME = Path("/home/ada/.mlx-worker")
LOG = HOME / "logs"
NEVER = Seen("never", LOG)
READY = Seen("ready", LOG, pid=41, address="http://127.0.0.1:8321/", status={"models": []})
SERVICE = ServiceState("worker", Path("/unit"), is_installed=True, is_enabled=True, is_loaded=True)
RUNS = replace(SERVICE, pid=41)
WHOLE = Model("gemma-4-e2b", is_configured=True, n_bytes=4 * GB, draft="assistant")
PORT = Port("127.0.0.1", 8321)
TAKEN = replace(PORT, problem="Address already in use", is_taken=True)


# --- looking never fails ----------------------------------------------------------------------


def fails() -> list[Check]:
    raise ZeroDivisionError("by us")


def test_a_look_that_fails_is_a_warning_and_the_others_go_on():
    """Whatever it was."""
    told = list(ask([Question("one", fails), Question("two", lambda: [Check("two", "ok", "x")])]))
    assert [(one.name, one.level) for one in told] == [("one", "warning"), ("two", "ok")]
    assert "ZeroDivisionError: by us" in told[0].value


def test_what_is_needed_by_others_is_not_waited_for_either():
    """Nor does it fail."""
    assert within(0.05, threading.Event().wait, "nothing") == "nothing"
    assert within(5, fails, []) == []
    assert within(5, lambda: 1, 0) == 1


def test_a_look_that_never_ends_is_a_warning():
    """Nobody waits for it, not even at the end of the process."""
    script = (
        "import threading\n"
        "from mlx_worker.doctor.check import Question, ask\n"
        "hangs = lambda: threading.Event().wait()\n"
        "print(next(ask([Question('slow', hangs, 0.05)])).value)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.stdout == "can't be told: no answer within 0.05 s\n"


# --- the disk, the folder, the settings -------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "level"), [(500_000_000, "fault"), (2 * GB, "warning"), (50 * GB, "ok")]
)
def test_a_disk_without_room_is_told_by_what_it_has_no_room_for(free: int, level: str):
    """Nothing at all, or no model."""
    disks = [Disk("models", HOME, free), Disk("the worker's folder", HOME, 90 * GB)]
    assert storage.disk_check(disks, 3 * GB).level == level


def test_a_folder_that_cannot_be_written_to_is_a_fault():
    """Settings, verdicts and logs would be lost."""
    told = storage.folder_check(Folder(HOME, True, "Read-only file system"), has_key=False)
    assert (told.level, "Read-only file system" in told.value) == ("fault", True)


def test_looking_at_a_folder_leaves_nothing_in_it(home: Path):
    """It may not even be there yet."""
    assert storage.folder() == Folder(home / ".mlx-worker", exists=False)
    assert not (home / ".mlx-worker").exists()
    (home / ".mlx-worker").mkdir()
    assert storage.folder().problem is None
    assert list((home / ".mlx-worker").iterdir()) == []


def test_a_folder_that_is_a_file_is_a_fault(home: Path):
    """As the system says it."""
    (home / ".mlx-worker").write_text("")
    assert storage.folder().problem == "Not a directory"


@pytest.mark.parametrize(
    ("mode", "has_key", "level"),
    [(0o644, True, "warning"), (0o600, True, "ok"), (0o644, False, "ok"), (None, False, "ok")],
)
def test_a_key_that_others_may_read_is_a_warning(mode: int | None, has_key: bool, level: str):
    """A file without a key may be read by anybody."""
    told = storage.folder_check(Folder(HOME, True, config_mode=mode), has_key=has_key)
    assert told.level == level


def test_a_broken_config_is_a_fault_and_the_defaults_are_gone_by(home: Path):
    """So that the other lines can be told."""
    file = home / ".mlx-worker" / "config.yaml"
    file.parent.mkdir()
    file.write_text("server:\n  prot: 1\n  api_key: a-secret-key\n")
    found = storage.settings()
    assert found.config == Config()
    told = storage.look_at_config(found)[0]
    assert (told.level, told.next_step) == ("fault", "did you mean server.port?")
    file.chmod(0o644)
    assert storage.look_at_folder(found)[0].level == "warning"


def test_a_broken_variable_leaves_what_the_file_says(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the variable is left out."""
    file = home / ".mlx-worker" / "config.yaml"
    file.parent.mkdir()
    file.write_text("server:\n  port: 9000\n")
    monkeypatch.setenv("MLX_WORKER_LIMITS__WAITING", "many")
    found = storage.settings()
    assert found.config.server.port == 9000
    assert "MLX_WORKER_LIMITS__WAITING" in storage.look_at_config(found)[0].value


def test_unreadable_policies_are_a_fault(tmp_path: Path):
    """Drafting is off then, whatever the user chose."""
    (tmp_path / "policies.json").write_text("{")
    told = storage.settings_check(Policies(tmp_path / "policies.json"))
    assert (told.level, "drafting is off" in told.value) == ("fault", True)
    assert told.next_step == "mend the file, or delete it to begin with the defaults"


# --- models -----------------------------------------------------------------------------------


def looked(*entries: ModelEntry) -> list[Model]:
    return models.look(Config(models=entries), Store.default())


def test_the_demo_pair_is_whole_and_its_draft_fits():
    """As every installation has it."""
    demo = looked(ModelEntry(id="demo"))[0]
    assert (demo.problem, demo.draft, demo.draft_problem) == (None, "assistant", None)


def test_a_model_that_is_not_here_is_a_fault_with_the_pull():
    """It is configured, so it is missed."""
    told = next(iter(models.model_checks(looked(ModelEntry(id="gemma-4-e2b")), 64 * GB)))
    assert (told.level, told.next_step) == ("fault", "mlx-worker pull gemma-4-e2b")


def test_a_cut_weight_file_is_found_without_loading_it(tmp_path: Path):
    """By its own header."""
    shutil.copytree(DEMO_FOLDER / "target", tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    told = next(iter(models.model_checks(looked(ModelEntry(id=str(tmp_path / "cut"))), 64 * GB)))
    assert (told.name, told.level) == ("model cut", "fault")


def test_a_draft_of_another_size_does_not_fit(tmp_path: Path):
    """Both values are named; the model is served without it."""
    shutil.copytree(DEMO_FOLDER / "target", tmp_path / "own")
    shutil.copytree(DEMO_FOLDER / "assistant", tmp_path / "own-assistant")
    config = tmp_path / "own-assistant" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"backbone_hidden_size": 7}))
    model = looked(ModelEntry(id=str(tmp_path / "own")))[0]
    assert "backbone_hidden_size" in (model.draft_problem or "")
    assert next(iter(models.model_checks([model], 64 * GB))).level == "warning"


def test_a_draft_with_another_vocabulary_does_not_fit(tmp_path: Path):
    """Sizes alone don't tell."""
    shutil.copytree(DEMO_FOLDER / "target", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    why = models.misfit(DEMO_FOLDER / "target", tmp_path / "other")
    assert why is not None
    assert why.startswith("tokenizer vocabulary: the model has ")


@pytest.mark.parametrize(
    ("model", "level"),
    [
        (WHOLE, "ok"),
        (replace(WHOLE, n_bytes=80 * GB), "fault"),
        (replace(WHOLE, draft=None, draft_problem="none was found"), "warning"),
        (replace(WHOLE, problem="2 files missing", step="pull"), "fault"),
        (replace(WHOLE, problem="2 files missing", is_coming=True), "warning"),
        (replace(WHOLE, problem="2 files missing", is_configured=False), "warning"),
    ],
)
def test_a_model_is_judged_by_whether_it_can_be_served(model: Model, level: str):
    """A fault is only what was asked for and can't be had."""
    assert next(iter(models.model_checks([model], 64 * GB))).level == level


def test_without_a_model_the_one_that_fits_is_named():
    """The demo pair is a toy."""
    told = next(iter(models.model_checks([], 8 * GB)))
    assert told.level == "warning"
    assert (told.next_step or "").startswith("mlx-worker pull ")


def test_a_model_without_room_is_not_loaded_to_be_probed(tmp_path: Path):
    """The demo pair is probed in its place, as it is for one that isn't here."""
    entry = ModelEntry(id=str(DEMO_FOLDER / "target"))
    assert models.to_probe(Config(models=(entry,)), 64 * GB) == entry
    assert models.to_probe(Config(models=(entry,)), 1000).id == "demo"
    assert models.to_probe(Config(models=(ModelEntry(id="gemma-4-e2b"),)), 64 * GB).id == "demo"


# --- the port ---------------------------------------------------------------------------------


def test_a_free_port_is_ok_and_still_free_after_the_look():
    """Nothing listens on it meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert duty.look_at_port("127.0.0.1", port) == Port("127.0.0.1", port)


def test_a_port_that_somebody_listens_on_has_its_name_and_pid():
    """Here this very process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = duty.look_at_port("127.0.0.1", server.getsockname()[1])
    assert (found.is_taken, found.pid) == (True, os.getpid())
    assert found.who


def test_an_address_of_another_machine_is_a_fault():
    """As the system says it."""
    told = duty.port_check(duty.look_at_port("192.0.2.1", 8321), NEVER)
    assert told.level == "fault"
    assert "Cannot assign requested address" in told.value


@pytest.mark.parametrize(
    ("port", "seen", "level", "text"),
    [
        (PORT, NEVER, "ok", "127.0.0.1:8321 is free"),
        (replace(TAKEN, who="python", pid=41), READY, "ok", "this worker's own"),
        (replace(TAKEN, who="ollama", pid=7), NEVER, "fault", "taken by ollama, pid 7"),
        (TAKEN, NEVER, "fault", "taken by a process of another user"),
        (replace(TAKEN, who="ollama", pid=7), READY, "warning", "taken by ollama, pid 7"),
        (replace(PORT, port=0), NEVER, "ok", "any that is free"),
    ],
)
def test_a_port_is_free_ours_or_a_strangers(port: Port, seen: Seen, level: str, text: str):
    """A stranger's is a fault where a worker would want it."""
    told = duty.port_check(port, seen)
    assert told.level == level
    assert text in told.value


# --- the service and the worker ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "seen", "level", "text"),
    [
        (replace(SERVICE, is_installed=False), NEVER, "ok", "not installed"),
        (RUNS, READY, "ok", "runs, pid 41"),
        (RUNS, replace(READY, pid=99), "warning", "pid 99 is the worker of this folder"),
        (SERVICE, READY, "warning", "pid 41 was started by hand"),
        (replace(SERVICE, last_exit=1), NEVER, "fault", "ended with code 1"),
        (replace(SERVICE, last_exit=0), NEVER, "warning", "installed, and doesn't run"),
        (replace(RUNS, is_enabled=False), READY, "ok", "does not start at the next login"),
        (replace(SERVICE, problem="no bus. hint: log in"), NEVER, "warning", "no bus"),
        (replace(RUNS, home=Path("/other")), READY, "warning", "another folder, /other"),
    ],
)
def test_the_service_is_told_with_who_owns_the_worker(
    state: ServiceState, seen: Seen, level: str, text: str
):
    """Two owners of one worker are told apart."""
    told = duty.service_check(state, seen, HOME)
    assert told.level == level
    assert text in told.value


@pytest.mark.parametrize(
    ("seen", "level", "text"),
    [
        (NEVER, "ok", "none ran here yet"),
        (READY, "ok", "noisy"),
        (replace(READY, condition="starting"), "ok", "starts"),
        (replace(READY, condition="draining"), "ok", "finishes its requests"),
        (replace(READY, condition="failing", error="out of memory"), "fault", "out of memory"),
        (replace(READY, condition="silent"), "fault", "doesn't answer"),
        (Seen("refused", LOG, error="the port is taken"), "fault", "the port is taken"),
        (Seen("crashed", LOG), "fault", "without a word"),
        (Seen("crashed", LOG, error="the engine was lost"), "fault", "the engine was lost"),
        (Seen("stopped", LOG), "ok", "was stopped"),
        (Seen("stopped", LOG, error="the key was rejected"), "warning", "key was rejected"),
    ],
)
def test_the_worker_is_told_as_it_last_said(seen: Seen, level: str, text: str):
    """With its last error."""
    told = duty.worker_check(seen)
    assert told.level == level
    assert text in told.value


def test_a_worker_that_could_not_load_a_model_is_a_fault():
    """It runs and answers, but not with that."""
    model = {"id": "gemma-4-e2b", "load_problem": "no room"}
    told = duty.worker_check(replace(READY, status={"models": [model]}))
    assert (told.level, "gemma-4-e2b: no room" in told.value) == ("fault", True)


def test_a_model_that_was_asked_for_is_not_loaded_without_room(monkeypatch: pytest.MonkeyPatch):
    """A second copy beside a worker's own can take a Mac down."""
    monkeypatch.setattr(models, "n_bytes", lambda _: 10**15)
    found = storage.Settings(Config())
    told = examine._numbers(examine.Wishes("demo"), found, Device(), NEVER)
    assert [(one.name, one.level) for one in told] == [("numbers", "warning")]
