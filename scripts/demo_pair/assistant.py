"""The demo assistant: a two-layer draft on the target's keys and values, trained to follow it.

Training runs every position of a row at once. At position t the draft has seen the cache of 0..t,
the target's hidden state h_t and the newest id x_{t+1}; step k predicts x_{t+1+k} from x_{t+k} and
its own last output, always at position t (the last cached one).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    GenerationConfig,
)

from demo_pair.target import Rows, Team, causal_masks, save_pretrained, train_loop

STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.5)
HARD_SHARE = 0.3  # of the loss: the target's own first choice; the rest follows its distribution
N_CENTROIDS = 64
TOP_CENTROIDS = 16
SIZES = {"demo": (128, 384), "smoke": (32, 32)}  # hidden, intermediate


def config(target: Gemma4ForCausalLM, size: str = "demo") -> Gemma4AssistantConfig:
    """Heads, window, vocabulary and rotary settings are the target's: its cache is shared."""
    text = target.config.to_dict()
    for key in ("per_layer_config", "eos_token_id", "architectures", "dtype", "_name_or_path"):
        text.pop(key, None)
    hidden, intermediate = SIZES[size]
    text |= {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": target.model.layers[3].self_attn.head_dim,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.config.hidden_size,
        use_ordered_embeddings=False,
        num_centroids=N_CENTROIDS,
        centroid_intermediate_top_k=TOP_CENTROIDS,
    )


def create(target: Gemma4ForCausalLM, size: str = "demo", seed: int = 1):
    """A fresh draft; its queries start at the target's own scale, for they meet the same keys."""
    torch.manual_seed(seed)
    draft = Gemma4AssistantForCausalLM(config(target, size))
    draft.generation_config = GenerationConfig(num_assistant_tokens=4)
    donors = {"sliding_attention": target.model.layers[4], "full_attention": target.model.layers[7]}
    for layer in draft.model.layers:
        attention = layer.self_attn
        attention.q_norm.load_state_dict(donors[attention.layer_type].self_attn.q_norm.state_dict())
        layer.post_attention_layernorm.weight.data.fill_(0.5)
        layer.post_feedforward_layernorm.weight.data.fill_(0.5)
    borrow_directions(draft, target.model.embed_tokens.weight.detach())
    return draft


def borrow_directions(draft, rows: torch.Tensor) -> None:
    """Start the draft in the main directions of the target's embedding, so that it knows the words.

    rows  (V, backbone)
    """
    directions = torch.linalg.svd(rows, full_matrices=False)[2][: draft.hidden_size]
    draft.lm_head.weight.data.copy_(rows @ directions.T)
    draft.pre_projection.weight.data.copy_(torch.cat([directions, directions], 1) / 2)
    draft.post_projection.weight.data.copy_(directions.T)


def full_masks(n: int) -> dict[str, torch.Tensor]:
    """Masks (1, 1, n, n) for a draft query at every position: it sees the cache up to there."""
    masks = causal_masks(n)
    return masks | {"full_attention": torch.ones(n, n, dtype=torch.bool).tril()[None, None]}


@torch.no_grad()
def target_states(target: Gemma4ForCausalLM, ids: torch.Tensor, masks: dict):
    """What a draft step reads of the target.

    ids  (B, T)

    Returns hidden (B, T, H) after the final norm, logits (B, T, V), and the shared keys and values,
    each (B, kv heads, T, head size) by layer type.
    """
    out = target.model(
        input_ids=ids, attention_mask=masks, use_cache=False, return_shared_kv_states=True
    )
    hidden = out.last_hidden_state
    cap = target.config.final_logit_softcapping
    logits = torch.tanh(target.lm_head(hidden).float() / cap) * cap
    return hidden, logits, dict(out.shared_kv_states)


def step(draft, token_embedding: torch.Tensor, hidden: torch.Tensor, masks: dict, shared: dict):
    """One draft step at every position.

    token_embedding, hidden  (B, T, H), of the target's size

    Returns the draft's final state (B, T, h), which `head` reads, and the next hidden (B, T, H).
    """
    inputs = draft.pre_projection(torch.cat([token_embedding, hidden], -1))
    state = draft.model(
        inputs_embeds=inputs,
        attention_mask=masks,
        shared_kv_states=shared,
        use_cache=False,
        logits_to_keep=None,  # an integer would make it slice per-layer inputs that a draft lacks
    ).last_hidden_state
    return state, draft.post_projection(state)


def head(draft, state: torch.Tensor) -> torch.Tensor:
    """Logits (…, V) of the draft's final states (…, h), by whichever head it has."""
    if draft.config.use_ordered_embeddings:
        return draft.masked_embedding(state, draft.lm_head.weight)
    return draft.lm_head(state)


def unroll(draft, embed, ids, hidden, shared, masks):
    """The draft's final states (B, T-k, h) of step k = 1, 2, …; its own output feeds the next step.

    ids (B, T), hidden (B, T, H): the target's; embed maps ids to the target's embeddings
    """
    n = ids.shape[1]
    for k in range(1, len(STEP_WEIGHTS) + 1):
        state, hidden = step(draft, embed(F.pad(ids[:, k:], (0, k))), hidden, masks, shared)
        yield k, state[:, : n - k]


def draft_loss(draft, embed, ids, mask, hidden, wanted, shared, masks) -> torch.Tensor:
    """Cross entropy towards the target's own predictions, over the unrolled steps.

    ids, mask  (B, T); mask is 1 where the target speaks
    hidden     (B, T, H) and wanted (B, T, V): the target's states and logits
    """
    total = torch.zeros(())
    for k, state in unroll(draft, embed, ids, hidden, shared, masks):
        keep = counted(mask, k)
        loss = follow(head(draft, state[keep]), wanted[:, k:][keep])
        total = total + STEP_WEIGHTS[k - 1] * loss
    return total / sum(STEP_WEIGHTS)


def counted(mask: torch.Tensor, k: int) -> torch.Tensor:
    """(B, T-k) bool: where the id after the k-th is the target's to choose."""
    return F.pad(mask[:, k + 1 :], (0, 1)) > 0


def follow(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mixed soft and hard cross entropy of N rows of logits (N, V), averaged."""
    log_probs = F.log_softmax(logits.float(), -1)
    soft = -(wanted.softmax(-1) * log_probs).sum(-1)
    hard = -log_probs.gather(-1, wanted.argmax(-1, keepdim=True)).squeeze(-1)
    return ((1 - HARD_SHARE) * soft + HARD_SHARE * hard).mean()


def train(target, rows: Rows, folder: Path, minutes: float, team: Team, size: str, report) -> dict:
    """Train the draft with its tied head into `folder`/assistant; see target.train_loop."""
    target = target.eval().requires_grad_(False)
    draft, embed = create(target, size), target.model.embed_tokens
    masks = {n: full_masks(n) for n in rows.lengths}

    def loss_of(ids, mask):
        seen = masks[ids.shape[1]]
        hidden, wanted, shared = target_states(target, ids, seen)
        return draft_loss(draft, embed, ids, mask, hidden, wanted, shared, seen)

    result = train_loop(draft, folder / "assistant.pt", rows, minutes, team, loss_of, report)
    if team.rank == 0:
        save_pretrained(draft, folder / "assistant")
    return result


def restore(target, file: Path, size: str = "demo", rounded: bool = False):
    """The trained draft with its tied head; `rounded` to bfloat16 as a saved one would be."""
    draft = create(target, size)
    draft.load_state_dict(torch.load(file)["model"])
    return draft.to(torch.bfloat16).float().eval() if rounded else draft.eval()


# --- the centroid head ------------------------------------------------------------------------


def balanced_clusters(rows: torch.Tensor, n_clusters: int, rounds: int = 20, seed: int = 0):
    """Balanced k-means of the embedding rows (V, H), by direction.

    Returns members (n_clusters, V / n_clusters) int64: every row in exactly one cluster.
    """
    unit = F.normalize(rows.float(), dim=-1)
    generator = torch.Generator().manual_seed(seed)
    centers = unit[torch.randperm(len(unit), generator=generator)[:n_clusters]]
    for _ in range(rounds):
        members = assign_balanced(unit @ centers.T, len(rows) // n_clusters)
        centers = F.normalize(unit[members].mean(1), dim=-1)
    return members


def assign_balanced(closeness: torch.Tensor, capacity: int) -> torch.Tensor:
    """Each row to its closest cluster with room, the surest pairs first.

    closeness  (V, C)

    Returns members (C, capacity) int64.
    """
    n_clusters = closeness.shape[1]
    members: list[list[int]] = [[] for _ in range(n_clusters)]
    placed = set()
    for flat in closeness.flatten().argsort(descending=True).tolist():
        row, cluster = divmod(flat, n_clusters)
        if row not in placed and len(members[cluster]) < capacity:
            members[cluster].append(row)
            placed.add(row)
    return torch.tensor(members)


def with_centroids(draft, top_k: int = TOP_CENTROIDS):
    """The same draft with the centroid head: a centroid starts as the mean of its members' rows."""
    settings = draft.config.to_dict() | {
        "use_ordered_embeddings": True,
        "num_centroids": N_CENTROIDS,
        "centroid_intermediate_top_k": top_k,
    }
    ordered = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**settings))
    ordered.load_state_dict(draft.state_dict(), strict=False)
    rows = draft.lm_head.weight.detach()
    members = balanced_clusters(rows, N_CENTROIDS)
    ordered.masked_embedding.centroids.weight.data.copy_(rows[members].mean(1))
    ordered.masked_embedding.token_ordering.copy_(members.reshape(-1))
    ordered.generation_config = draft.generation_config
    return ordered


@torch.no_grad()
def draft_states(target, draft, rows: Rows, n_batches: int = 40) -> torch.Tensor:
    """The draft's final states (N, h) wherever the target speaks, over some batches."""
    masks, found = {n: full_masks(n) for n in rows.lengths}, []
    for _, (ids, mask) in zip(range(n_batches), rows, strict=False):
        seen = masks[ids.shape[1]]
        hidden, _, shared = target_states(target, ids, seen)
        states = unroll(draft, target.model.embed_tokens, ids, hidden, shared, seen)
        found += [state[counted(mask, k)] for k, state in states]
    return torch.cat(found)


def fit_centroids(ordered, states: torch.Tensor, n_steps: int = 600, seed: int = 0) -> None:
    """Turn the centroids until the cluster of the draft's own first choice scores best.

    states  (N, h) as draft_states gives them
    """
    embedder, rows = ordered.masked_embedding, ordered.lm_head.weight.detach()
    n_members = embedder.vocab_size_per_centroid
    cluster_of = torch.empty_like(embedder.token_ordering)
    cluster_of[embedder.token_ordering] = torch.arange(len(rows)) // n_members
    wanted = cluster_of[(states @ rows.T).argmax(-1)]
    optimizer = torch.optim.Adam([embedder.centroids.weight], lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        some = torch.randint(len(states), (1024,), generator=generator)
        loss = F.cross_entropy(embedder.centroids(states[some]), wanted[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
