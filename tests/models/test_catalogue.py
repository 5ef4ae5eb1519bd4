"""Short names: which repository each is, whose draft fits, and what fits the machine."""

import re

import pytest
import yaml

from mlx_worker.models import catalogue

REPO = re.compile(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+")


def test_every_row_is_whole():
    """A repository, a size, a unique name: a slip in the data file shows here."""
    rows = catalogue.variants()
    assert len({one.id for one in rows}) == len(rows)
    assert len({one.weights.repo for one in rows}) == len(rows)
    for one in rows:
        for weights in (one.weights, *one.drafts):
            assert REPO.fullmatch(weights.repo)
            assert weights.n_bytes > 50_000_000
        assert one.drafts, f"{one.id} has no draft"
        assert one.need_bytes > one.weights.n_bytes


def test_every_model_of_the_family_is_there_in_every_width():
    ids = {one.id for one in catalogue.variants()}
    for name in ("e2b", "e4b", "12b", "26b-a4b", "31b"):
        assert f"gemma-4-{name}" in ids
        for tag in ("8bit", "bf16", "qat-4bit"):
            assert f"gemma-4-{name}:{tag}" in ids


def test_drafts_are_smaller_than_their_models():
    for one in catalogue.variants():
        assert all(draft.n_bytes * 5 < one.weights.n_bytes for draft in one.drafts)


def test_the_file_has_no_other_keys():
    """An unknown key is a misspelt one."""
    models = yaml.safe_load(catalogue.FILE.read_text())["models"]
    for model in models.values():
        assert set(model) == {"title", "default", "base", "variants", "drafts"}
        for row in (*model["variants"].values(), *model["drafts"]):
            assert set(row) <= {"repo", "gigabytes", "size", "seen", "qat"}
            assert row.get("size", "estimate") == "estimate"


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("gemma-4-e2b", "gemma-4-e2b"),
        ("Gemma-4-E2B", "gemma-4-e2b"),
        ("gemma-4-e2b:4bit", "gemma-4-e2b"),
        ("gemma-4-12b:8bit", "gemma-4-12b:8bit"),
        ("mlx-community/gemma-4-12B-it-8bit", "gemma-4-12b:8bit"),
        ("mlx-community/gemma-4-12b-it-8bit", "gemma-4-12b:8bit"),
        ("someone/else", "someone/else"),
        ("gemma-4-12b:3bit", "gemma-4-12b:3bit"),
    ],
)
def test_a_model_has_one_id_however_it_is_spelt(name: str, id: str):
    assert catalogue.canonical(name) == id


def test_quantised_drafts_come_first_and_the_same_checkpoints_before_others():
    plain, qat = catalogue.drafts_of("gemma-4-12b"), catalogue.drafts_of("gemma-4-12b:qat-4bit")
    assert plain[0] == "mlx-community/gemma-4-12B-it-assistant-4bit"
    assert qat[0] == "mlx-community/gemma-4-12B-it-qat-assistant-4bit"
    assert plain[-1] == qat[-1] or set(plain) == set(qat)
    for order in (plain, qat):
        widths = [not order[i].endswith("bit") for i in range(len(order))]
        assert widths == sorted(widths)


@pytest.mark.parametrize(
    ("base", "id"),
    [
        ("google/gemma-4-31B-it", "gemma-4-31b"),
        ("google/gemma-4-31b-it", "gemma-4-31b"),
        ("google/gemma-4-e4b-it-qat-q4_0-unquantized", "gemma-4-e4b:qat-4bit"),
        ("google/gemma-3-27b-it", None),
        ("", None),
    ],
)
def test_what_a_card_calls_its_base_is_found(base: str, id: str | None):
    found = catalogue.by_base(base)
    assert (found.id if found else None) == id


def test_the_largest_that_fits_is_picked():
    """8, 16, 24, 64 GB of budget, and one that nothing fits."""
    picked = [catalogue.pick(int(gb * 1e9)) for gb in (6, 8, 16, 24, 64, 2)]
    names = ["gemma-4-e2b", "gemma-4-e4b", "gemma-4-12b", "gemma-4-31b", "gemma-4-31b", None]
    assert [one and one.id for one in picked] == names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("gemma4-e2b", "gemma-4-e2b"), ("gemma-4-12", "gemma-4-12b"), ("12b", "gemma-4-12b")],
)
def test_a_misspelt_name_has_a_nearest(name: str, nearest: str):
    assert catalogue.nearest(name) == nearest
