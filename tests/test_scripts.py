"""The generators and comparisons in scripts/ still work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
MISSING = "pip install -e '.[parity]' first, or run scripts/test --long"


def run(script: str, *arguments: str) -> str:
    """Standard output of one of the scripts; its error output is shown if it fails."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def peers(*arguments: str) -> dict[str, object]:
    return json.loads(run("bench_peers.py", *arguments).splitlines()[-1])


@pytest.mark.timeout(120)
def test_plain_decoding_writes_what_mlx_lm_writes():
    """The comparison with the reference compares the same work."""
    found = peers("--repeats", "1", "--max-tokens", "12")
    lines = found["lines"]
    assert isinstance(lines, list)
    assert len(lines) == 6
    assert all(line["same_ids"] for line in lines)


@pytest.mark.long
def test_plain_decoding_keeps_up_with_mlx_lm():
    """The baseline of every verdict is not a slow one; the margin below 0.98 is for noise."""
    ratio = peers("--repeats", "7", "--max-tokens", "96")["plain_over_mlx_lm"]
    assert isinstance(ratio, float)
    assert ratio > 0.93


@pytest.mark.long
def test_replies_through_the_api_are_the_engines_own():
    """The comparison with the API compares the same work; a next turn is served from the cache."""
    found = json.loads(run("bench_api.py", "--repeats", "1", "--max-tokens", "12").splitlines()[-1])
    assert all(line["same_text"] for line in found["lines"])
    assert len(found["lines"]) == 12
    assert found["follow_up_ms"]["ratio"] < 0.5


@pytest.mark.long
def test_parity_vectors_can_be_made_again():
    """The committed vectors are what the script computes."""
    pytest.importorskip("torch", reason=MISSING)
    run("make_parity_vectors.py", "--check")


@pytest.mark.long
def test_the_demo_pair_can_be_trained_again(tmp_path: Path):
    """Every stage of the training runs, at toy size, and leaves a pair that loads."""
    pytest.importorskip("torch", reason=MISSING)
    from mlx_worker.engine.load import load_pair

    run("train_demo_pair.py", "--smoke", "--out", str(tmp_path))
    pair = load_pair(str(tmp_path / "target"), str(tmp_path / "assistant"))
    assert pair.draft_kind == "assistant"
