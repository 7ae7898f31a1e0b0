"""Leave out superseded retries: leaves whose parent has a later branch."""

from __future__ import annotations

from typing import Any

from miles_core import hookimpl
from miles_core.types import Sample


@hookimpl
def pick_samples(leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
    """All leaves but superseded ones, by number of generations, then `node_id`, both descending.

    A leaf is superseded if its parent has a child that was committed later. Roots are never.
    """
    latest: dict[int, int] = {}
    for node in session_metadata["tree"]["nodes"]:
        if node["parent"] is not None:
            latest[node["parent"]] = max(latest.get(node["parent"], -1), node["seq"])
    seqs = {node["id"]: node["seq"] for node in session_metadata["tree"]["nodes"]}

    def superseded(sample: Sample) -> bool:
        leaf = sample.metadata["leaf"]
        return leaf["parent"] is not None and latest[leaf["parent"]] > seqs[leaf["node_id"]]

    kept = [sample for sample in leaf_samples if not superseded(sample)]
    return sorted(kept, key=lambda s: (-len(s.metadata["leaf"]["path_node_ids"]), -s.metadata["leaf"]["node_id"]))
