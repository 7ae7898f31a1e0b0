"""SGLang's kernels: the one bookkeeping operation that its scheduler has no other form of, and the names of the rest.

`torch.ops.sgl_kernel` stays empty, so SGLang takes PyTorch's own operations for every layer.
"""

import torch
from stand_in import attributes, with_submodules

__version__ = "0.4.10"
__getattr__ = attributes(__name__, decorates=False)
with_submodules(__name__)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write each request's new cache slots into its row of the table, from its start to its end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start
