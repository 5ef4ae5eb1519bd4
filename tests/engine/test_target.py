"""The target taken apart computes what it computes whole; any other mlx-lm model works whole."""

import importlib
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4_text

from mlx_worker.engine.target import FULL, SLIDING, Target
from tests.tiny import SHAPES, VOCAB, WINDOW, gemma_args, randomised, tiny_pair, tiny_target, write

PROMPT = [2, *range(40, 60)]
COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}
# Each has another arrangement of caches; windows are shorter than the prompt.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "gemma3_text": {
        **COMMON,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "cohere2": {**COMMON, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gpt_oss": {
        **COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "qwen3": {
        **COMMON,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    },
    # These hold a state that can't be rewound, alone or beside keys and values.
    "mamba": {
        **COMMON,
        "state_size": 4,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
    "recurrent_gemma": {
        **COMMON,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_hidden_layers": 3,
        "rope_theta": 1e4,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "lfm2": {
        **COMMON,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 16,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 16,
        "full_attn_idxs": [1],
    },
}
RECURRENT = ("mamba", "recurrent_gemma", "lfm2")


@cache
def family(name: str) -> Target:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict({**FAMILIES[name], "model_type": name}))
    return Target(randomised(model, 0), VOCAB, 4096)


def logits(target: Target, ids: list[int]) -> np.ndarray:
    return np.array(target.head(target.hidden(mx.array([ids]), None)[0]))


# --- Gemma 4, taken apart ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_trunk_and_head_are_the_whole_model(shape: str):
    """Bit for bit."""
    target = tiny_target(shape)
    whole = np.array(target.model(mx.array([PROMPT]))[0])
    assert np.array_equal(logits(target, PROMPT), whole)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_other_heads_are_the_whole_models_too(softcap: float | None):
    """With weights of its own instead of the embedding's, with another softcap, without one."""
    args = gemma_args("own", tie_word_embeddings=False, final_logit_softcapping=softcap)
    target = Target(randomised(gemma4_text.Model(args), 0), VOCAB, 4096)
    whole = np.array(target.model(mx.array([PROMPT]))[0])
    assert np.array_equal(logits(target, PROMPT), whole)
    assert softcap is None or np.abs(whole).max() <= softcap


@pytest.mark.parametrize("shape", SHAPES)
def test_an_assistant_reads_the_last_layer_of_each_type_that_caches(shape: str):
    """Counted in the caches the model makes, which are fewer than its layers on E2B and E4B."""
    target = tiny_target(shape)
    types = target.gemma.args.layer_types[: len(target.gemma.make_cache())]
    for kind in (FULL, SLIDING):
        index = target.donor_layers[kind]
        assert types[index] == kind
        assert kind not in types[index + 1 :]


def test_layers_that_share_are_no_donors():
    """The last layers of "shared" have no cache of their own."""
    target = tiny_target("shared")
    assert len(target.gemma.make_cache()) < len(target.gemma.layers)
    assert max(target.donor_layers.values()) < len(target.gemma.make_cache())


def test_the_embedding_is_scaled_as_the_trunk_scales_it():
    """By the root of the hidden size."""
    target = tiny_target("own")
    table = np.array(target.gemma.model.embed_tokens.weight)
    assert np.allclose(np.array(target.embed(mx.array([[5]])))[0, 0], table[5] * 32**0.5)


@pytest.mark.parametrize(
    ("shape", "expected"), [("own", (True, 32, WINDOW)), ("llama", (False, VOCAB, None))]
)
def test_a_target_says_whether_it_comes_apart(shape: str, expected: tuple[bool, int, int | None]):
    """Another family's hidden state is its logits."""
    target = tiny_target(shape)
    assert (target.is_separable, target.hidden_size, target.window) == expected


def test_another_familys_head_does_nothing():
    """Its hidden states are the logits already."""
    target = tiny_target("llama")
    hidden = target.hidden(mx.array([PROMPT]), None)[0]
    assert target.head(hidden) is hidden
    assert target.donor_layers == {}


# --- other families, whole --------------------------------------------------------------------


@cache
def reference(name: str) -> list[int]:
    """What mlx-lm's own loop writes, greedily."""
    steps = generate_step(mx.array(PROMPT), family(name).model, max_tokens=20)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", FAMILIES)
def test_another_family_writes_what_mlx_lm_writes(name: str):
    """Prompt in chunks, past the window, whatever its caches are."""
    pair = tiny_pair("own", target=family(name))
    reply = write(pair, PROMPT, 20, ignore_eos=True, chunk_tokens=6)
    assert reply.ids == reference(name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT])
def test_lookup_leaves_another_familys_text_alone(name: str):
    """Rejected drafts are taken back from every kind of layer."""
    pair = tiny_pair("own", "lookup", target=family(name))
    reply = write(pair, [*PROMPT, *PROMPT[-8:]], 20, ignore_eos=True, speculation="on", depth=4)
    plain = write(pair, [*PROMPT, *PROMPT[-8:]], 20, ignore_eos=True, speculation="off")
    assert reply.ids == plain.ids
    assert reply.done.timing.drafted > 0


@pytest.mark.parametrize("name", RECURRENT)
def test_a_model_with_a_state_is_decoded_plainly(name: str):
    """Whatever was asked for, nothing is drafted; a stop ends it as any other."""
    pair = tiny_pair("own", "lookup", target=family(name))
    reply = write(pair, PROMPT, 20, ignore_eos=True, speculation="on", depth=4)
    assert reply.ids == reference(name)
    assert reply.done.timing.drafted == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_memory_of_a_token_is_measured_for_any_family(name: str):
    """Keys and values only: a state does not grow with the context."""
    n_attention = {"mamba": 0, "recurrent_gemma": 1, "lfm2": 1}.get(name, 2)
    assert family(name).kv_bytes_per_token == n_attention * 2 * 8 * 4
