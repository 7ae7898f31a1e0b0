"""Attention of one new token per sequence without copying grouped heads.

`transformers` repeats the stored keys and values for every query head of a group, at each step, for all
that is stored. With one query position, the heads of a group can stand in for query positions instead, which
is the same computation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "miles_grouped_sdpa"

PLAIN_ARGUMENTS = frozenset({"sliding_window", "position_ids", "use_cache", "output_attentions", "is_causal"})
"""Keyword arguments that change nothing here: the mask already says what they say."""


def forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls for each layer; `query` is `[rows, heads, 1, dim]` while decoding."""
    rows, heads, columns, dim = query.shape
    groups = heads // key.shape[1]
    unusual = any(value is not None for name, value in kwargs.items() if name not in PLAIN_ARGUMENTS)
    if columns > 1 or groups == 1 or unusual or attention_mask is None or attention_mask.shape[1] > 1:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    grouped = query.reshape(rows, key.shape[1], groups, dim)
    mask = attention_mask.expand(-1, -1, groups, -1)
    seen = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return seen.reshape(rows, 1, heads, seen.shape[-1]), None


def install(network: Any) -> None:
    """Make a loaded model use it."""
    AttentionInterface.register(NAME, forward)
    network.set_attn_implementation(NAME)
