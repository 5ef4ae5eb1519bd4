"""The local hub speaks the hub's protocol: the installed huggingface_hub is its client here."""

import hashlib
import io
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get

from tests.hub import LocalHub
from tests.hub_faults import Fault

REPO = "mlx-community/tiny-4bit"
WEIGHTS = random.Random(1).randbytes(200_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "extra/notes.txt": b"Hello.",
}
WAIT_S = 20.0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with one repository, and a client that may reach it and waits for nothing."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    with LocalHub(tmp_path / "hub") as hub:
        hub.add(REPO, FILES)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def fetch(hub: LocalHub, tmp_path: Path) -> Callable[..., bytes]:
    """hf_hub_download into a cache that is new each time; returns the file's bytes."""
    caches = itertools.count()

    def fetch(file: str, revision: str = "main", token: str | bool = False) -> bytes:
        path = hf_hub_download(
            REPO,
            file,
            revision=revision,
            endpoint=hub.endpoint,
            token=token,
            cache_dir=tmp_path / f"cache{next(caches)}",
        )
        return Path(path).read_bytes()

    return fetch


def get(hub: LocalHub, file: str = "model.safetensors", **headers: str) -> httpx2.Response:
    url = f"{hub.endpoint}/{REPO}/resolve/main/{file}"
    return httpx2.get(url, headers=headers, follow_redirects=True)


def read_into(got: bytearray, response: httpx2.Response) -> None:
    for piece in response.iter_raw():
        got += piece


def api(hub: LocalHub, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def test_model_info_has_the_commit_and_the_files(hub):
    """As a page of the real hub does."""
    commit = hub.add(REPO, FILES)
    info = api(hub).model_info(REPO, files_metadata=True)
    assert (info.id, info.sha, info.gated, info.private) == (REPO, commit, False, False)
    assert info.siblings is not None
    assert {s.rfilename: s.size for s in info.siblings} == {n: len(d) for n, d in FILES.items()}


@pytest.mark.parametrize("page_size", [None, 1, 2])
def test_a_tree_lists_every_file_on_any_number_of_pages(hub, page_size):
    """The client follows the Link headers."""
    hub.page_size = page_size
    entries = list(api(hub).list_repo_tree(REPO, recursive=True))
    files = {e.path: e for e in entries if isinstance(e, huggingface_hub.RepoFile)}
    assert [e.path for e in entries if e.path not in files] == ["extra"]
    assert set(files) == set(FILES)
    lfs = files["model.safetensors"].lfs
    assert lfs is not None
    assert (lfs.sha256, lfs.size) == (hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS))
    assert files["config.json"].lfs is None


def test_a_small_file_has_gits_own_hash(hub):
    """`git hash-object` computes the same."""
    told = subprocess.run(
        ["git", "hash-object", "--stdin"],
        input=FILES["config.json"],
        capture_output=True,
        check=True,
    )
    [entry] = [e for e in api(hub).list_repo_tree(REPO) if e.path == "config.json"]
    assert isinstance(entry, huggingface_hub.RepoFile)
    assert entry.blob_id == told.stdout.decode().strip()


@pytest.mark.parametrize("relative_redirects", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_a_download_has_the_bytes(hub, fetch, file, relative_redirects):
    """From the hub and from where it redirects to."""
    hub.relative_redirects = relative_redirects
    assert fetch(file) == FILES[file]
    assert hub.bytes_sent(REPO, file) == len(FILES[file]) == hub.bytes_sent()


def test_a_snapshot_has_all_files_of_its_commit(hub, tmp_path):
    """main moves with a second add, and the first commit stays."""
    old = api(hub).model_info(REPO).sha
    new = hub.add(REPO, {**FILES, "config.json": b"{}"})
    for revision, commit, config in [("main", new, b"{}"), (old, old, FILES["config.json"])]:
        path = Path(
            snapshot_download(
                REPO,
                revision=revision,
                endpoint=hub.endpoint,
                cache_dir=tmp_path / "cache",
                token=False,
            )
        )
        assert path.name == commit
        assert (path / "config.json").read_bytes() == config
        assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.bytes_sent(REPO, "model.safetensors") == len(WEIGHTS)


def test_refs_name_the_branches(hub):
    """main, and what branch() makes."""
    first = api(hub).model_info(REPO).sha
    hub.branch(REPO, "v1", first)
    second = hub.add(REPO, FILES)
    refs = api(hub).list_repo_refs(REPO)
    assert {b.name: b.target_commit for b in refs.branches} == {"main": second, "v1": first}


def test_the_token_does_not_go_where_an_lfs_file_is_redirected(hub, fetch):
    """The other host refuses it, and its requests are listed."""
    hub.add(REPO, FILES, gated=True, token="hf_right")
    assert fetch("model.safetensors", token="hf_right") == WEIGHTS
    asked = [(r.is_cdn, r.authorization) for r in hub.requests if r.method == "GET"]
    assert asked == [(True, None)]
    assert {r.authorization for r in hub.requests if not r.is_cdn} == {"Bearer hf_right"}


@pytest.mark.parametrize(("token", "status"), [(False, 401), ("hf_other", 403)])
def test_a_gated_repository_shows_its_page_only(hub, fetch, token, status):
    """Its files need the right token."""
    hub.tokens.add("hf_other")
    hub.add(REPO, FILES, gated=True, token="hf_right")
    assert api(hub, token).model_info(REPO).gated == "manual"
    with pytest.raises(GatedRepoError, match="is restricted") as caught:
        fetch("config.json", token=token)
    assert caught.value.response.status_code == status
    assert fetch("config.json", token="hf_right") == FILES["config.json"]


def test_a_private_repository_is_unknown_without_its_token(hub):
    """With a token of another user too."""
    hub.tokens.add("hf_other")
    hub.add(REPO, FILES, token="hf_right")
    for token in (False, "hf_other"):
        with pytest.raises(RepositoryNotFoundError):
            api(hub, token).model_info(REPO)
    assert api(hub, "hf_right").model_info(REPO).private


def test_a_token_that_nobody_has_is_refused(hub):
    """Also for a public repository."""
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        api(hub, "hf_wrong").model_info(REPO)


def test_whoami_knows_the_tokens(hub):
    """And no others."""
    hub.tokens.add("hf_right")
    assert api(hub).whoami(token="hf_right")["name"] == "tester"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api(hub).whoami(token="hf_wrong")


def test_what_is_unknown_is_told_apart(hub, fetch):
    """A repository, a revision and a file; each by its own error."""
    with pytest.raises(RepositoryNotFoundError, match="401"):
        api(hub).model_info("mlx-community/none")
    hub.tokens.add("hf_right")
    with pytest.raises(RepositoryNotFoundError, match="404"):
        api(hub, "hf_right").model_info("mlx-community/none")
    with pytest.raises(RevisionNotFoundError):
        fetch("config.json", revision="none")
    with pytest.raises(RemoteEntryNotFoundError):
        fetch("none.json")


def test_a_range_is_answered_by_its_bytes(hub):
    """206 for a part, 416 behind the end, and http_get goes on where it stood."""
    part = get(hub, Range="bytes=100-199")
    assert (part.status_code, part.content) == (206, WEIGHTS[100:200])
    assert part.headers["Content-Range"] == f"bytes 100-199/{len(WEIGHTS)}"
    assert get(hub, Range=f"bytes={len(WEIGHTS)}-").status_code == 416
    rest = io.BytesIO(WEIGHTS[:150_000])
    rest.seek(150_000)
    url = f"{hub.endpoint}/{REPO}/resolve/main/model.safetensors"
    http_get(url, rest, resume_size=150_000, expected_size=len(WEIGHTS))
    assert rest.getvalue() == WEIGHTS
    assert hub.requests[-1].range_start == 150_000
    assert hub.requests[-1].n_bytes == 50_000


def test_an_xet_file_is_listed_and_its_service_fails(hub):
    """A client that does without Xet has the bytes all the same."""
    hub.add(REPO, FILES, xet=True)
    entries = {e.path: e for e in api(hub).list_repo_tree(REPO)}
    weights = entries["model.safetensors"]
    assert isinstance(weights, huggingface_hub.RepoFile)
    url = f"{hub.endpoint}/{REPO}/resolve/main/model.safetensors"
    metadata = huggingface_hub.get_hf_file_metadata(url, endpoint=hub.endpoint, token=False)
    assert metadata.xet_file_data is not None
    assert metadata.xet_file_data.file_hash == weights.xet_hash
    assert httpx2.get(metadata.xet_file_data.refresh_route).status_code == 503
    assert get(hub).content == WEIGHTS


def test_a_status_comes_as_often_as_asked(hub):
    """With Retry-After, and for the files it matches only."""
    hub.faults.add(Fault("status", "*.safetensors", times=2, status=429, retry_after_s=7))
    assert get(hub, "config.json").status_code == 200
    first, second, third = get(hub), get(hub), get(hub)
    assert (first.status_code, first.headers["Retry-After"]) == (429, "7")
    assert (second.status_code, third.status_code) == (429, 200)
    assert hub.faults.left == []


def test_a_status_of_the_api_matches_what_follows_the_repository(hub):
    """The model's page works while its tree does not."""
    hub.faults.add(Fault("status", "tree/*", place="api", status=500, times=None))
    assert api(hub).model_info(REPO).id == REPO
    assert httpx2.get(f"{hub.endpoint}/api/models/{REPO}/tree/main").status_code == 500


@pytest.mark.parametrize("n", [0, 1, 16_384, 100_001])
def test_a_cut_is_at_its_byte(hub, n):
    """The client has the bytes before it and an error, not the end of a file."""
    hub.faults.add(Fault("cut", "model.safetensors", after_bytes=n))
    got = bytearray()
    url = f"{hub.endpoint}/{REPO}/resolve/main/model.safetensors"
    with httpx2.stream("GET", url, follow_redirects=True) as response:
        assert response.headers["Content-Length"] == str(len(WEIGHTS))
        with pytest.raises(httpx2.RemoteProtocolError):
            read_into(got, response)
    assert got == WEIGHTS[:n]
    assert hub.bytes_sent() == n


def test_a_download_goes_on_after_a_cut(hub, fetch, monkeypatch):
    """By a range that begins at the last whole chunk before it: the client drops a part of one."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.faults.add(Fault("cut", "model.safetensors", after_bytes=100_001))
    assert fetch("model.safetensors") == WEIGHTS
    assert [r.range_start for r in hub.requests if r.method == "GET"] == [None, 100_000]
    assert hub.bytes_sent() == len(WEIGHTS) + 1


def test_a_reset_and_a_drop_are_errors_of_the_connection(hub):
    """The one within a body, the other before any answer."""
    hub.faults.add(Fault("reset", "model.safetensors", after_bytes=50_000))
    with pytest.raises(httpx2.ReadError):
        get(hub)
    hub.faults.add(Fault("drop", "config.json"))
    with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
        get(hub, "config.json")
    assert get(hub).content == WEIGHTS


def test_nobody_listens_where_a_refused_file_is_redirected(hub):
    """Once; and small files, which are not redirected, are as ever."""
    hub.faults.add(Fault("refuse"))
    assert get(hub, "config.json").status_code == 200
    with pytest.raises(httpx2.ConnectError):
        get(hub)
    assert get(hub).content == WEIGHTS


def test_a_flipped_byte_leaves_the_length(hub):
    """One byte differs, in the range that has it."""
    hub.faults.add(Fault("flip", "model.safetensors", offset=70_000))
    assert get(hub, Range="bytes=0-69999").content == WEIGHTS[:70_000]
    wrong = get(hub, Range="bytes=60000-").content
    assert [n for n, (a, b) in enumerate(zip(wrong, WEIGHTS[60_000:], strict=True)) if a != b] == [
        10_000
    ]


def test_a_short_file_says_so_in_its_length(hub):
    """The client sees a whole answer."""
    hub.faults.add(Fault("short", "model.safetensors", n_bytes=10))
    answer = get(hub)
    assert answer.headers["Content-Length"] == str(len(WEIGHTS) - 10)
    assert answer.content == WEIGHTS[:-10]


def test_an_ignored_range_is_answered_by_the_whole_file(hub):
    """With 200; a request without a range is not meant."""
    hub.faults.add(Fault("ignore_range", "model.safetensors"))
    assert get(hub).status_code == 200
    answer = get(hub, Range="bytes=1000-")
    assert (answer.status_code, answer.content) == (200, WEIGHTS)
    assert get(hub, Range="bytes=1000-").status_code == 206


def test_a_gate_stops_a_body_at_its_byte_until_it_is_released(hub):
    """Without sleeping."""
    gate = hub.gate("model.safetensors", 70_001)
    answers: list[bytes] = []
    client = threading.Thread(target=lambda: answers.append(get(hub).content))
    client.start()
    assert gate.reached.wait(WAIT_S)
    assert (hub.bytes_sent(), answers) == (70_001, [])
    gate.release()
    client.join(WAIT_S)
    assert answers == [WEIGHTS]


def test_a_gate_and_a_cut_meet_one_body(hub):
    """Each at its byte."""
    gate = hub.gate("model.safetensors", 1000)
    hub.faults.add(Fault("cut", "model.safetensors", after_bytes=2000))
    gate.release()
    with pytest.raises(httpx2.RemoteProtocolError):
        get(hub)
    assert gate.reached.is_set()
    assert hub.bytes_sent() == 2000
    assert hub.faults.left == []


def test_a_fault_of_the_cdn_leaves_the_hubs_own_answer_alone(hub):
    """As an address that expired is refused by where it leads."""
    hub.faults.add(Fault("status", "model.safetensors", place="cdn", status=403))
    assert get(hub).status_code == 403
    assert [(r.is_cdn, r.status) for r in hub.requests] == [(False, 302), (True, 403)]
    assert get(hub).content == WEIGHTS


@pytest.mark.parametrize("slow", ["rate", "fault"])
def test_a_slow_body_takes_its_time(hub, slow):
    """A lower bound only: the machine may be busy."""
    if slow == "rate":
        hub.rate = 400_000.0
    else:
        hub.faults.add(Fault("slow", "model.safetensors", bytes_per_s=400_000.0))
    began = time.monotonic()
    assert get(hub).content == WEIGHTS
    assert time.monotonic() - began >= 0.45


def test_a_stopped_hub_is_at_the_same_address_again(hub, fetch):
    """Its files too, and a body at a gate does not keep it."""
    gate = hub.gate("model.safetensors", 10)
    errors: list[BaseException] = []

    def client() -> None:
        try:
            get(hub)
        except httpx2.TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    assert gate.reached.wait(WAIT_S)
    endpoint = hub.endpoint
    hub.stop()
    thread.join(WAIT_S)
    assert len(errors) == 1
    with pytest.raises(httpx2.ConnectError):
        get(hub)
    hub.start()
    assert hub.endpoint == endpoint
    assert fetch("model.safetensors") == WEIGHTS


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", repo="mlx-community/none", status=503),
        Fault("status", "none.json", status=503),
        Fault("status"),
        Fault("status", status=200),
        Fault("status", status=503, times=0),
        Fault("cut"),
        Fault("cut", after_bytes=1, place="api"),
        Fault("slow", bytes_per_s=1.0, after_bytes=1),
        Fault("cut", after_bytes=1, method="HEAD"),
        Fault("slow", bytes_per_s=0.0),
        Fault("refuse", place="cdn"),
        Fault("boom"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_fault_that_could_never_happen_is_an_error(hub, fault):
    """A test that waits for nothing fails where it is wrong."""
    with pytest.raises(ValueError):  # noqa: PT011 - of each its own message
        hub.faults.add(fault)


def test_misuse_of_the_hub_is_an_error(hub, tmp_path):
    """Unknown names, and repositories that the hub would not have."""
    for wrong in (
        lambda: hub.add("no-owner", FILES),
        lambda: hub.add(REPO, {}),
        lambda: hub.add(REPO, tmp_path / "none"),
        lambda: hub.add(REPO, FILES, lfs={"none.bin"}),
        lambda: hub.add(REPO, {"../out": b""}),
        lambda: hub.branch("mlx-community/none", "v1", "0" * 40),
        lambda: hub.branch(REPO, "v1", "0" * 40),
        lambda: hub.remove("mlx-community/none"),
        lambda: hub.bytes_sent("mlx-community/none"),
        lambda: hub.bytes_sent(file="none.json"),
        lambda: hub.gate("none.json", 1),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - of each its own message
            wrong()


def test_a_folder_is_served_by_hand(tmp_path):
    """As the command's own process; the first line is its endpoint."""
    folder = tmp_path / "models" / REPO
    (folder / "extra").mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    command = [sys.executable, str(Path(__file__).parent / "hub.py"), str(tmp_path / "models")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
    ) as server:
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            code = (
                "import sys, huggingface_hub as h;"
                "print(h.snapshot_download(sys.argv[1], cache_dir=sys.argv[2], token=False))"
            )
            environment = os.environ | {
                "HF_ENDPOINT": endpoint,
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
            }
            done = subprocess.run(
                [sys.executable, "-c", code, REPO, str(tmp_path / "cache")],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            server.terminate()
    got = Path(done.stdout.strip())
    assert {name: (got / name).read_bytes() for name in FILES} == FILES
