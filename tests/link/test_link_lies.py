"""What a gateway may not bring about at a worker."""

from pathlib import Path

import pytest

from mlx_worker.errors import ConfigError
from mlx_worker.link.jobs import read_request
from mlx_worker.policies import Policies
from mlx_worker.records import LOCAL, MAX_REVISION
from mlx_worker.wire.link import Request


def test_no_scope_of_a_gateway_is_one_of_this_machine():
    """Else it could find out what the local user has asked, by what is cached of it."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    frame = Request(id="0" * 32, endpoint="chat", body=body, cache_scope=LOCAL)
    assert read_request(frame).call.scope != LOCAL


@pytest.mark.parametrize("revision", [MAX_REVISION, MAX_REVISION + 1])
def test_a_revision_that_none_can_follow_is_not_kept(tmp_path: Path, revision: int):
    """The file would be one that can't be read."""
    policies = Policies(tmp_path / "policies.json")
    with pytest.raises(ConfigError, match="is the last one"):
        policies.change({"speculative_decoding": "off"}, revision)
    assert policies.read().problem is None


def test_a_change_here_after_the_last_revision_is_refused(tmp_path: Path):
    """And the file stays as it was."""
    policies = Policies(tmp_path / "policies.json")
    policies.change({"kv_prefix_cache": False}, MAX_REVISION - 1)
    with pytest.raises(ConfigError):
        policies.change({"kv_prefix_cache": True})
    assert policies.read().settings.kv_prefix_cache is False
