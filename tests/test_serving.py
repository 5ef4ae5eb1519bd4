"""Which models are served, in which order, by which names; and how that follows what is pulled."""

from pathlib import Path

import pytest

from mlx_worker.config import Config, ModelEntry
from mlx_worker.errors import ConfigError
from mlx_worker.models import catalogue
from mlx_worker.models.store import Store
from mlx_worker.serving import Offer, default, models, named, preloaded, with_flags
from tests.pulled import complete, cut, pull, store_in


@pytest.fixture
def store(home: Path) -> Store:
    return store_in(home)


def config(*entries: ModelEntry, **limits: int) -> Config:
    return Config.model_validate(
        {"models": [each.model_dump() for each in entries], "limits": limits}
    )


def entry(id: str, **keys: object) -> ModelEntry:
    return ModelEntry.model_validate({"id": id, **keys})


def test_the_demo_pair_is_served_where_there_is_nothing_else(store: Store):
    """So that a fresh installation answers."""
    assert models(Config(), store) == {"demo": entry("demo")}


def test_what_is_configured_comes_first_then_what_was_pulled(store: Store):
    """In the order of the file, then of the pulls; an entry of a pulled model counts alone."""
    for id in ("first", "second", "third"):
        pull(store, id)
    served = models(config(entry("org/other"), entry("second", draft="none")), store)
    assert list(served) == ["org/other", "second", "first", "third"]
    assert served["second"].draft == "none"
    assert default(Config(), store).id == "first"


def test_one_model_by_two_names_is_one(store: Store):
    """Its repository is in the configuration, its short name was pulled."""
    variant = catalogue.find("gemma-4-e2b")
    assert variant is not None
    pull(store, "gemma-4-e2b")
    assert list(models(config(entry(variant.weights.repo)), store)) == ["gemma-4-e2b"]
    with pytest.raises(ConfigError, match="would be called gemma-4-e2b, as"):
        models(config(entry(variant.weights.repo), entry("gemma-4-e2b")), store)


def test_a_folder_is_called_by_its_last_part(store: Store, tmp_path: Path):
    """Two with the same one can't be told apart, and one that isn't there is no model."""
    for parent in "ab":
        (tmp_path / parent / "mine").mkdir(parents=True)
    one, other = str(tmp_path / "a" / "mine"), str(tmp_path / "b" / "mine")
    assert list(models(config(entry(one)), store)) == ["mine"]
    with pytest.raises(ConfigError, match=r"models\.1\.id: .* would be called mine, as"):
        models(config(entry(one), entry(other)), store)
    with pytest.raises(ConfigError, match=r"models\.0\.id: ~no-such-user/x is no folder"):
        models(config(entry("~no-such-user/x")), store)
    with pytest.raises(ConfigError, match=r"models\.0\.id: /nowhere is no folder"):
        models(config(entry("/nowhere")), store)


def test_a_model_that_is_being_pulled_is_not_served_yet(store: Store):
    """Unless there is nothing else, so that a worker that starts says what is missing."""
    pull(store, "partial", is_whole=False)
    assert list(models(Config(), store)) == ["partial"]
    pull(store, "whole")
    assert list(models(Config(), store)) == ["whole"]


def test_the_model_of_a_flag_is_the_default(store: Store):
    """The other keys of its entry count, the other entries follow; --draft is its draft."""
    pull(store, "pulled")
    mine, other = entry("org/mine", context_tokens=100), entry("org/other")
    both = config(other, mine)
    assert with_flags(both, None, None, store) == both
    assert with_flags(both, "org/mine", None, store).models == (mine, other)
    assert with_flags(both, "new", "none", store).models == (
        entry("new", draft="none"),
        other,
        mine,
    )
    drafted = with_flags(both, None, "lookup", store)
    assert drafted.models == (entry("org/other", draft="lookup"), mine)
    assert with_flags(Config(), None, "none", store).models == (entry("pulled", draft="none"),)


def test_a_named_model_has_the_keys_of_its_entry(store: Store):
    """By any of its names."""
    assert named(config(entry("org/a", context_tokens=9)), "org/a", store).context_tokens == 9
    assert named(Config(), "org/b", store) == entry("org/b")
    assert named(Config(), None, store) == entry("demo")


def test_the_default_is_loaded_at_the_start_if_there_is_room(store: Store):
    """What says so comes before it; false means on demand."""
    a, b, c = entry("a"), entry("b", preload=True), entry("c", preload=True)
    never = entry("d", preload=False)
    assert preloaded(models(config(a, never), store), 1) == ["a"]
    assert preloaded(models(config(a, b), store), 1) == ["b"]
    assert preloaded(models(config(a, b), store), 2) == ["a", "b"]
    assert preloaded(models(config(b, c, loaded=2), store), 2) == ["b", "c"]
    assert preloaded(models(config(never, a), store), 2) == []


# --- while it runs ----------------------------------------------------------------------------


def offered(offer: Offer) -> list[str] | None:
    found = offer.changed()
    return None if found is None else list(found)


def test_a_pull_changes_what_is_offered_once(store: Store):
    """The demo pair goes with the first; what is removed goes, and the demo pair is back."""
    offer = Offer(Config(), store)
    assert offered(offer) is None
    pulled = pull(store, "new")
    assert offered(offer) == ["new"]
    assert offered(offer) is None
    store.remove(pulled)
    assert offered(offer) == ["demo"]


def test_a_pull_on_its_way_changes_nothing_until_it_is_whole(store: Store):
    """Though its record stays as it is meanwhile."""
    offer = Offer(Config(), store)
    pulled = pull(store, "new", is_whole=False)
    assert offered(offer) == ["demo"]
    assert offered(offer) is None
    complete(store, pulled)
    assert offered(offer) == ["new"]


def test_a_model_that_is_here_stays_while_it_is_pulled_anew(store: Store):
    """It is in memory, whatever becomes of its files."""
    pulled = pull(store, "mine")
    offer = Offer(Config(), store)
    cut(store, pulled)
    pull(store, "other")
    assert offered(offer) == ["mine", "other"]


def test_a_record_that_can_not_be_read_is_told_once(store: Store):
    """And what was offered is still."""
    pull(store, "mine")
    offer = Offer(Config(), store)
    text = store.path.read_text()
    store.path.write_text("{")
    with pytest.raises(ConfigError, match=r"models\.json: can't be read"):
        offer.changed()
    assert offered(offer) is None
    assert list(offer.models) == ["mine"]
    store.path.write_text(text)
    assert offered(offer) == ["mine"]
