"""Make the parity vectors: tiny random Gemma 4 checkpoints and what transformers computes on them.

Owns everything under tests/vectors/parity/. One folder per member of the family:

    <family>/target/       a genuine save_pretrained folder (config.json, model.safetensors, ...)
    <family>/assistant/    the matching draft, saved the same way
    <family>/vectors.safetensors
    manifest.json          versions, seeds, measured facts, and the sha256 of every file

31b/{target,assistant} also hold config.legacy.json, the older spelling (`global_head_dim`,
`num_global_key_value_heads`) of their config.json; it loads to the same model, bit for bit.

Run with the `parity` extra (torch, transformers), one CPU thread, under a minute:

    python scripts/make_parity_vectors.py            write tests/vectors/parity
    python scripts/make_parity_vectors.py --check    make them elsewhere and compare every file

Two runs on one machine are byte-identical. Another CPU or another torch may change the last bits
of the float arrays; --check then says so. The ids do not move: every argmax and every choice of
centroids was decided by more than MIN_MARGIN, every choice of experts by more than
MIN_ROUTER_MARGIN (seeds are tried until that holds).

Weights are stored in the family's `dtype`; everything is computed in float32 from the stored
(hence, for bfloat16, rounded) weights, in one pass without a cache. `sequence` below is
prompt_ids followed by greedy_ids, T = P + G ids; V vocabulary, H hidden size, C cuts.

    prompt_ids       (P,)      int32    random, longer than three windows
    greedy_ids       (G,)      int32    the target's greedy continuation, longer than the window;
                                        generate() with its cache and the one pass agree on it
    greedy_margins   (G,)      float32  top-1 minus top-2 logit behind each greedy id
    hidden           (T, H)    float32  after the final norm, every position of the sequence
    logit_rows       (R,)      int32    positions whose logits are kept (e2b: all of them)
    logits           (R, V)    float32  softcapped where the config has a softcap
    keys.<type>      (N, T, D) float32  donor layer of that type (its last layer with its own K/V),
    values.<type>    (N, T, D) float32  N kv heads; K after norm and rope, V after norm
    cuts             (C,)      int32    n: sequence[:n] is committed and cached, nothing else
    bonus_ids        (C,)      int32    the target's greedy id after position n-1; not cached
    draft_ids        (C, 2, 6) int32    the assistant's greedy chain that follows the bonus id
    draft_margins    (C, 2, 6) float32  top-1 minus top-2 logit behind each draft id
    draft_logits     (C, 2, V) float32  the first step's logits; transformers applies no softcap
                                        here, though the assistants' configs have one
    draft_hidden     (C, 2, 6, H) f32   post_projection output of each step
    draft_candidates (C, 2, K) int32    centroid heads only: the first step's candidate ids, sorted

Axis 1 of the draft arrays is the query position: 0 = n-1 (the last cached one), 1 = n (the bonus
id's own, transformers' choice). It stays the same for all six steps.

One draft step: concat[target embedding(id) * sqrt(H), h] -> assistant -> argmax, next h. The first
step takes the bonus id and hidden[n-1]; a later one takes the previous draft id and the previous
step's post_projection output. Centroid heads: transformers fills the rows of ids that are not
candidates with min(candidate logits) - 1, and so does draft_logits.

The sliding window. In the target a sliding query at position p sees keys p-window+1..p: `window`
keys. In the assistant transformers 5.24 builds create_bidirectional_sliding_window_mask for one
query at index 0, which keeps |q - kv| <= window, and flips it: the query sees the last
**window + 1** of the keys it is given, whatever its position (measured below, in the manifest as
`assistant_sliding_keys_seen`). The rule kept here is `window` keys at either position, so the
module is given K/V already cut: sliding layers the last min(n, window) keys of 0..n-1, full layers
all n. transformers' own assisted-generation loop is not used: it leaves one rejected key in view.
"""

import argparse
import filecmp
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)

OUT = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "parity"
COMMAND = "python scripts/make_parity_vectors.py"

SLIDING, FULL = "sliding_attention", "full_attention"
HEAD_DIM, FULL_HEAD_DIM = 16, 32
DRAFT_DEPTH = 6
MIN_MARGIN = 1e-3  # top-1 over top-2 logit, last centroid taken over the first one left
MIN_ROUTER_MARGIN = 2e-5  # probability of the last expert taken over the first one left
MAX_NOISE = 6e-5  # largest logit difference between the float32 and the float64 pass
MIN_DISTINCT = 17  # different ids in a greedy continuation
AVOIDED_IDS = (0, 1, 2, 50, 106)  # pad, bos, the released eos ids: never in greedy_ids


@dataclass(frozen=True)
class Family:
    """One member of the family, scaled down; the fields are what differs between members."""

    name: str
    model_type: str  # gemma4 | gemma4_text | gemma4_unified
    seed: int  # the first seed tried
    dtype: str = "bfloat16"  # of the stored weights
    hidden: int = 32
    intermediate: int = 24
    layers: int = 12
    pattern: int = 6  # every pattern-th layer is a full one
    heads: int = 4
    kv_heads: int = 2
    full_kv_heads: int | None = None  # None: k and v projections apart, kv_heads everywhere
    window: int = 16
    vocab: int = 256
    softcap: float | None = 30.0
    kv_shared: int = 0
    ple: int = 0  # per-layer embedding size
    double_wide: bool = False
    experts: int = 0
    top_experts: int = 0
    expert_intermediate: int = 0
    bidirectional: str | None = None
    draft_hidden: int = 24
    draft_intermediate: int = 32
    draft_heads: int = 4
    centroids: int = 0  # 0: tied head
    top_centroids: int = 0
    prompt: int = 56
    greedy: int = 44
    all_logits: bool = False
    legacy_config: bool = False

    @property
    def k_eq_v(self) -> bool:
        return self.full_kv_heads is not None

    @property
    def cuts(self) -> list[int]:
        """Committed lengths: inside, at and past the window, the prompt's end, and the reply."""
        w, p = self.window, self.prompt
        return [5, w - 1, w, w + 1, 2 * w + 3, p, p + 1, p + w + 2, p + self.greedy - 1]

    @property
    def logit_rows(self) -> list[int]:
        if self.all_logits:
            return list(range(self.prompt + self.greedy))
        w, p = self.window, self.prompt
        edges = [0, 1, w - 2, w - 1, w, w + 1, 2 * w - 1, 2 * w, 3 * w, 3 * w + 1, p - 2, p - 1]
        return [*edges, p, p + w, p + self.greedy - 2, p + self.greedy - 1]


FAMILIES = (
    Family(
        name="e2b",
        model_type="gemma4",
        seed=133,
        layers=15,
        pattern=5,
        kv_heads=1,
        kv_shared=5,
        ple=8,
        double_wide=True,
        draft_heads=2,
        centroids=16,
        top_centroids=4,
        all_logits=True,
    ),
    Family(
        name="e4b",
        model_type="gemma4_text",
        seed=226,
        kv_shared=6,
        ple=8,
        vocab=320,
        softcap=None,
        draft_heads=4,
        centroids=20,
        top_centroids=3,
    ),
    Family(
        name="12b",
        model_type="gemma4_unified",
        seed=393,
        dtype="float32",
        hidden=40,
        layers=6,
        full_kv_heads=1,
        window=24,
        prompt=80,
        greedy=40,
        bidirectional="vision",
    ),
    Family(
        name="26b",
        model_type="gemma4_text",
        seed=432,
        layers=6,
        full_kv_heads=1,
        window=24,
        prompt=80,
        greedy=40,
        experts=8,
        top_experts=2,
        expert_intermediate=12,
    ),
    Family(
        name="31b",
        model_type="gemma4",
        seed=500,
        layers=12,
        kv_heads=4,
        full_kv_heads=2,
        vocab=384,
        bidirectional="vision",
        draft_hidden=32,
        legacy_config=True,
    ),
)


# Configs


def attention_fields(family: Family) -> dict:
    """What the target and its assistant share: the shapes of the K/V one writes and both read."""
    return {
        "vocab_size": family.vocab,
        "num_key_value_heads": family.kv_heads,
        "head_dim": HEAD_DIM,
        "global_head_dim": FULL_HEAD_DIM,
        "num_global_key_value_heads": family.full_kv_heads,
        "attention_k_eq_v": family.k_eq_v,
        "sliding_window": family.window,
        "max_position_embeddings": 1024,
        "use_bidirectional_attention": family.bidirectional,
        "final_logit_softcapping": family.softcap,
    }


def layer_types(n_layers: int, pattern: int) -> list[str]:
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(n_layers)]


def target_config(family: Family):
    fields = attention_fields(family) | {
        "hidden_size": family.hidden,
        "intermediate_size": family.intermediate,
        "num_hidden_layers": family.layers,
        "layer_types": layer_types(family.layers, family.pattern),
        "num_attention_heads": family.heads,
        "num_kv_shared_layers": family.kv_shared,
        "use_double_wide_mlp": family.double_wide,
    }
    if family.model_type == "gemma4_unified":
        return Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**fields))
    fields |= {
        "hidden_size_per_layer_input": family.ple,
        "vocab_size_per_layer_input": family.vocab,
        "enable_moe_block": family.experts > 0,
        "num_experts": family.experts or None,
        "top_k_experts": family.top_experts or None,
        "moe_intermediate_size": family.expert_intermediate or None,
    }
    text = Gemma4TextConfig(**fields)
    return Gemma4Config(text_config=text) if family.model_type == "gemma4" else text


def assistant_config(family: Family):
    fields = attention_fields(family) | {
        "hidden_size": family.draft_hidden,
        "intermediate_size": family.draft_intermediate,
        "num_hidden_layers": 4,
        "layer_types": layer_types(4, 4),
        "num_attention_heads": family.draft_heads,
        "num_kv_shared_layers": 4,
    }
    head = {"backbone_hidden_size": family.hidden}
    if family.centroids:
        head |= {
            "use_ordered_embeddings": True,
            "num_centroids": family.centroids,
            "centroid_intermediate_top_k": family.top_centroids,
        }
    if family.model_type == "gemma4_unified":
        return Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**fields), **head)
    fields |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    return Gemma4AssistantConfig(text_config=Gemma4TextConfig(**fields), **head)


MODEL_CLASSES = {
    "gemma4": Gemma4ForConditionalGeneration,
    "gemma4_text": Gemma4ForCausalLM,
    "gemma4_unified": Gemma4UnifiedForConditionalGeneration,
    "gemma4_assistant": Gemma4AssistantForCausalLM,
    "gemma4_unified_assistant": Gemma4UnifiedAssistantForCausalLM,
}


def legacy_config(config: dict) -> dict:
    """Spell a saved config.json the older way: two keys instead of the `per_layer_config` map."""
    text = dict(config["text_config"])
    full_layers = list(text.pop("per_layer_config").values())
    assert all(layer == full_layers[0] for layer in full_layers)
    text["global_head_dim"] = full_layers[0]["head_dim"]
    text["num_global_key_value_heads"] = full_layers[0].get("num_key_value_heads")
    return config | {"text_config": text}


# Weights


def norm_scale(name: str) -> float:
    """The mean of a norm's weights."""
    if name.endswith(("model.norm.weight", "language_model.norm.weight")):
        return 2.5
    return 0.6 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0


def initial_value(name: str, tensor: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Draw one weight so that every parameter matters and no softmax or softcap is idle.

    The final norm is scaled up (logits reach the softcap's bend), embeddings are small beside the
    layers' output (a continuation does not just repeat its last id), other scales sit around 1.
    Query and key norms are below 1: sharper attention multiplies float32 rounding by layers.
    """
    if name.endswith("token_ordering"):
        return torch.randperm(tensor.numel(), generator=rng)
    noise = torch.randn(tensor.shape, generator=rng)
    if name.endswith("layer_scalar"):
        return 1 + 0.15 * noise
    if tensor.ndim == 1:
        return norm_scale(name) * (1 + 0.2 * noise)
    if name.endswith("embed_tokens.weight"):
        return 0.15 * noise
    if name.endswith("embed_tokens_per_layer.weight"):
        return 0.35 * noise
    gain = 1.5 if name.endswith("router.proj.weight") else 1.0
    return gain / math.sqrt(tensor.shape[-1]) * noise if "router" not in name else gain * noise


@torch.no_grad()
def random_model(config, dtype: torch.dtype, seed: int):
    """A model of this config whose every stored tensor comes from the seed, in name order."""
    model = MODEL_CLASSES[config.model_type](config)
    rng = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if name != "lm_head.weight":  # tied to the embedding
            tensor.copy_(initial_value(name, tensor, rng))
    return model.to(dtype)


def save_checkpoint(config, folder: Path, dtype: torch.dtype, seed: int) -> None:
    random_model(config, dtype, seed).save_pretrained(folder)


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32):
    """Load what was saved, for computing in `dtype` with the plain (eager) kernels."""
    model_class = MODEL_CLASSES[AutoConfig.from_pretrained(folder).model_type]
    model = model_class.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


# The target


class Rejected(Exception):
    """This seed's vectors hang on a near-tie or are dull; try the next seed."""


def margins(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 minus top-2 along the last axis."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def require(claim: bool, why: str) -> None:
    if not claim:
        raise Rejected(why)


def random_prompt(family: Family, seed: int) -> torch.Tensor:
    allowed = torch.tensor([i for i in range(family.vocab) if i not in AVOIDED_IDS])
    rng = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (family.prompt,), generator=rng)]


def router_margin(router_probs: tuple[torch.Tensor, ...], top_k: int) -> float:
    """Smallest gap between the last expert taken and the first one left, over layers and rows."""
    ordered = torch.stack(router_probs).sort(dim=-1, descending=True).values
    return float((ordered[..., top_k - 1] - ordered[..., top_k]).min())


@torch.no_grad()
def target_arrays(family: Family, target, seed: int) -> dict[str, torch.Tensor]:
    """Everything the docstring lists up to `values.<type>`; all logits, not yet the kept rows."""
    prompt = random_prompt(family, seed)
    generated = target.generate(
        prompt[None], max_new_tokens=family.greedy, do_sample=False, pad_token_id=0
    )
    sequence = generated[0]
    greedy = sequence[family.prompt :]
    require(len(set(greedy.tolist())) >= MIN_DISTINCT, "the continuation repeats itself")
    require(not set(greedy.tolist()) & set(AVOIDED_IDS), "the continuation holds a special id")

    out = target(
        sequence[None],
        use_cache=False,
        return_shared_kv_states=True,
        output_hidden_states=True,
        output_router_logits=family.experts > 0,
    )
    logits, hidden = out.logits[0], out.hidden_states[-1][0]
    assert_post_norm(target, hidden, logits, family.softcap)
    rows = logits[family.prompt - 1 : -1]
    require(bool((margins(logits[: family.prompt]) > MIN_MARGIN).all()), "near-tie in the prompt")
    require(bool((margins(rows) > MIN_MARGIN).all()), "near-tie in the continuation")
    require(torch.equal(rows.argmax(-1), greedy), "generate() and one pass disagree")
    if family.experts:
        gap = router_margin(out.router_logits, family.top_experts)
        require(gap > MIN_ROUTER_MARGIN, "near-tie in a router")

    arrays = {
        "prompt_ids": prompt,
        "greedy_ids": greedy,
        "greedy_margins": margins(rows),
        "hidden": hidden,
        "logits": logits,
    }
    for layer_type in (SLIDING, FULL):
        keys, values = out.shared_kv_states[layer_type]
        arrays[f"keys.{layer_type}"], arrays[f"values.{layer_type}"] = keys[0], values[0]
    return arrays


def assert_post_norm(target, hidden, logits, softcap: float | None) -> None:
    """hidden_states[-1] is what the head reads, that is after the final norm."""
    raw = target.lm_head(hidden)
    capped = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    assert torch.allclose(capped, logits, atol=1e-5), "hidden_states[-1] is not post-norm"


# The assistant


def cut_kv(family: Family, arrays: dict, n: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K/V of sequence[:n] as the assistant may see it: (1, N, keys, D) pairs by layer type."""
    first = {SLIDING: max(0, n - family.window), FULL: 0}
    return {
        t: (
            arrays[f"keys.{t}"][None, :, first[t] : n],
            arrays[f"values.{t}"][None, :, first[t] : n],
        )
        for t in (SLIDING, FULL)
    }


def draft_step(target, assistant, token, h, kv, position: int):
    """One draft step at a constant position. Returns (logits (V,), next h (H,))."""
    embedded = target.get_input_embeddings()(token.view(1, 1))
    out = assistant(
        inputs_embeds=torch.cat([embedded, h.view(1, 1, -1)], dim=-1),
        position_ids=torch.tensor([[position]]),
        shared_kv_states=kv,
    )
    return out.logits[0, 0], out.last_hidden_state[0, 0]


def draft_chain(target, assistant, token, h, kv, position: int) -> dict[str, torch.Tensor]:
    """DRAFT_DEPTH greedy steps after `token`."""
    rows, hiddens = [], []
    for _ in range(DRAFT_DEPTH):
        logits, h = draft_step(target, assistant, token, h, kv, position)
        token = logits.argmax()
        rows.append(logits)
        hiddens.append(h)
    logits = torch.stack(rows)
    chain = {"ids": logits.argmax(-1), "margins": margins(logits), "logits": rows[0]}
    return chain | {"hidden": torch.stack(hiddens)}


class CentroidWatch:
    """Remembers each centroid choice of an assistant: its candidates and how close it was."""

    def __init__(self, assistant, top_k: int):
        self.head, self.top_k = assistant.masked_embedding, top_k
        self.candidates: list[torch.Tensor] = []
        self.gap = math.inf
        self.head.centroids.register_forward_hook(self.observe)

    def observe(self, _module, _inputs, scores: torch.Tensor) -> None:
        top = scores[0, 0].topk(self.top_k + 1)
        self.gap = min(self.gap, float(top.values[-2] - top.values[-1]))
        clusters = self.head.token_ordering.view(self.head.num_centroids, -1)
        self.candidates.append(clusters[top.indices[:-1]].flatten().sort().values)


@torch.no_grad()
def draft_arrays(family: Family, target, assistant, arrays: dict) -> dict[str, torch.Tensor]:
    watch = CentroidWatch(assistant, family.top_centroids) if family.centroids else None
    bonus_ids = torch.stack([arrays["logits"][n - 1].argmax() for n in family.cuts])
    chains = []
    for n, bonus in zip(family.cuts, bonus_ids, strict=True):
        kv, h = cut_kv(family, arrays, n), arrays["hidden"][n - 1]
        chains.append([draft_chain(target, assistant, bonus, h, kv, at) for at in (n - 1, n)])
    drafts = {"cuts": torch.tensor(family.cuts), "bonus_ids": bonus_ids} | {
        f"draft_{key}": torch.stack([torch.stack([c[key] for c in pair]) for pair in chains])
        for key in chains[0][0]
    }
    require(bool((drafts["draft_margins"] > MIN_MARGIN).all()), "near-tie in a draft")
    ids = drafts["draft_ids"]
    require(not torch.equal(ids[:, 0], ids[:, 1]), "the position changes no draft id")
    if watch:
        require(watch.gap > MIN_MARGIN, "near-tie among centroids")
        first_steps = torch.stack(watch.candidates[::DRAFT_DEPTH])
        drafts["draft_candidates"] = first_steps.view(len(family.cuts), 2, -1)
    return drafts


@torch.no_grad()
def sliding_keys_seen(family: Family, target, assistant, arrays: dict) -> int:
    """How many sliding keys move the assistant's output when it is given the whole prompt's."""
    n = family.prompt
    keys, values = (arrays[f"{name}.{SLIDING}"][None, :, :n] for name in ("keys", "values"))
    full = cut_kv(family, arrays, n)[FULL]
    token, h = arrays["prompt_ids"][-1], arrays["hidden"][n - 1]

    def step(values):
        kv = {SLIDING: (keys, values), FULL: full}
        return draft_step(target, assistant, token, h, kv, n - 1)[1]

    def moves(at: int) -> bool:
        changed = values.clone()
        changed[:, :, at] += 1e3
        return not torch.equal(step(changed), step(values))

    seen = [at for at in range(n) if moves(at)]
    assert seen == list(range(n - len(seen), n)), "the keys in view are not the last ones"
    return len(seen)


# Files


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    dtype = np.float32 if tensor.is_floating_point() else np.int32
    return np.ascontiguousarray(tensor.numpy().astype(dtype))


def write_legacy_config(folder: Path) -> None:
    """Write config.legacy.json beside config.json and assert that both load to one model."""
    legacy = folder / "config.legacy.json"
    config = json.loads((folder / "config.json").read_text())
    legacy.write_text(json.dumps(legacy_config(config), indent=2) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "model.safetensors", scratch)
        shutil.copy(legacy, Path(scratch) / "config.json")
        ours, theirs = load_checkpoint(folder), load_checkpoint(Path(scratch))
    assert ours.config.to_diff_dict() == theirs.config.to_diff_dict()
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


@torch.no_grad()
def float32_noise(folder: Path, arrays: dict) -> float:
    """Largest logit difference to the same pass in float64 (norms and angles stay float32)."""
    sequence = torch.cat([arrays["prompt_ids"], arrays["greedy_ids"]])
    exact = load_checkpoint(folder, torch.float64)(sequence[None], use_cache=False).logits[0]
    return float((exact - arrays["logits"]).abs().max())


def try_seed(family: Family, folder: Path, seed: int) -> dict:
    """Write one family's folder from one seed. Returns its facts; raises Rejected."""
    dtype = getattr(torch, family.dtype)
    save_checkpoint(target_config(family), folder / "target", dtype, seed)
    save_checkpoint(assistant_config(family), folder / "assistant", dtype, seed + 10_000)
    target, assistant = (load_checkpoint(folder / part) for part in ("target", "assistant"))
    arrays = target_arrays(family, target, seed + 20_000)
    noise = float32_noise(folder / "target", arrays)
    require(noise < MAX_NOISE, f"float32 noise {noise:.1e}")
    seen = sliding_keys_seen(family, target, assistant, arrays)
    arrays |= draft_arrays(family, target, assistant, arrays)
    rows = torch.tensor(family.logit_rows)
    arrays |= {"logit_rows": rows, "logits": arrays["logits"][rows]}
    save_file({k: to_numpy(v) for k, v in arrays.items()}, folder / "vectors.safetensors")
    if family.legacy_config:
        for part in ("target", "assistant"):
            write_legacy_config(folder / part)
    return {"seed": seed, "float32_noise": float(f"{noise:.1e}")} | facts(family, seen, arrays)


def facts(family: Family, seen: int, arrays: dict) -> dict:
    spec = {k: v for k, v in asdict(family).items() if k not in ("name", "seed")}
    return {
        "spec": spec,
        "assistant_sliding_keys_seen": seen,
        "distinct_greedy_ids": len(set(arrays["greedy_ids"].tolist())),
        "max_abs_logit": round(float(arrays["logits"].abs().max()), 3),
        "min_greedy_margin": round(float(arrays["greedy_margins"].min()), 5),
        "min_draft_margin": round(float(arrays["draft_margins"].min()), 5),
        "arrays": {k: [str(to_numpy(v).dtype), list(v.shape)] for k, v in sorted(arrays.items())},
    }


def make_family(family: Family, folder: Path) -> dict:
    for seed in itertools.count(family.seed):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            return try_seed(family, folder, seed)
        except Rejected as why:
            print(f"{family.name}: seed {seed}: {why}", flush=True)
    raise AssertionError("unreachable")


def file_table(out: Path) -> dict[str, dict]:
    paths = sorted(p for p in out.rglob("*") if p.is_file() and p.name != "manifest.json")
    return {
        p.relative_to(out).as_posix(): {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in paths
    }


def make(out: Path) -> None:
    families = {f.name: make_family(f, out / f.name) for f in FAMILIES}
    manifest = {
        "command": COMMAND,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "min_margin": MIN_MARGIN,
        "min_router_margin": MIN_ROUTER_MARGIN,
        "max_noise": MAX_NOISE,
        "draft_depth": DRAFT_DEPTH,
        "families": families,
        "files": file_table(out),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def check(out: Path) -> list[str]:
    """Make everything again and name the files that are not byte-identical."""
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
        names = sorted({*file_table(Path(scratch)), *file_table(out), "manifest.json"})
        _same, different, missing = filecmp.cmpfiles(out, scratch, names, shallow=False)
        return sorted(different + missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not args.check:
        make(OUT)
        return 0
    different = check(OUT)
    print("\n".join(f"differs: {name}" for name in different) or "every file is identical")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
