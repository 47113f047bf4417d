from __future__ import annotations

from loramux.kernels.layout import LinearShape

Linears = tuple[LinearShape, ...]


def llama_linears(hidden: int, queries: int, keys: int, intermediate: int) -> Linears:
    """The linear layers of a Llama. `queries` and `keys` are numbers of features, heads times head_dim."""
    return (
        LinearShape("self_attn.q_proj", hidden, queries),
        LinearShape("self_attn.k_proj", hidden, keys),
        LinearShape("self_attn.v_proj", hidden, keys),
        LinearShape("self_attn.o_proj", queries, hidden),
        LinearShape("mlp.gate_proj", hidden, intermediate),
        LinearShape("mlp.up_proj", hidden, intermediate),
        LinearShape("mlp.down_proj", intermediate, hidden),
    )


def fused_linears(hidden: int, queries: int, keys: int, intermediate: int) -> Linears:
    """The linear layers of a Phi-3, with fused q/k/v and gate/up."""
    return (
        LinearShape("self_attn.qkv_proj", hidden, queries + 2 * keys),
        LinearShape("self_attn.o_proj", queries, hidden),
        LinearShape("mlp.gate_up_proj", hidden, 2 * intermediate),
        LinearShape("mlp.down_proj", intermediate, hidden),
    )


def outer_linears(vocab: int, hidden: int) -> Linears:
    return (
        LinearShape("model.embed_tokens", vocab, hidden, is_embedding=True),
        LinearShape("lm_head", hidden, vocab),
    )
