"""Which weights sampled which token of a sample."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.session.weights import weight_versions


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("meta", "versions", "ends"),
    [
        ({"weight_version": "w"}, ("w",), (9,)),
        ({"weight_version": 3}, ("3",), (9,)),
        ({}, ("",), (9,)),
        ({"weight_versions": [span("w", 0, 9)], "weight_version": "other"}, ("w",), (9,)),
        ({"weight_versions": [span("v", 0, 4), span("w", 4, 9)]}, ("v", "w"), (4, 9)),
        ({"weight_versions": [span("v", 0, 0), span("w", 0, 9)]}, ("w",), (9,)),
        ({"weight_versions": [span("v", 0, 2), span("v", 2, 4), span("w", 4, 9)]}, ("v", "w"), (4, 9)),
        ({"weight_versions": [span("v", 0, 2), span("w", 2, 4), span("v", 4, 9)]}, ("v", "w", "v"), (2, 4, 9)),
        ({"weight_versions": [{"version": "v"}, {"version": "w"}]}, ("v", "w"), ()),
        ({"weight_versions": [span("v", 0, 4), span("w", 4, 8)]}, ("v", "w"), ()),
        ({"weight_versions": [span("v", 0, 9), span("w", 2, 4)]}, ("v", "w"), ()),
        ({"weight_versions": [span("v", 0, "4"), span("w", 4, 9)]}, ("v", "w"), ()),
        ({"weight_versions": "odd", "weight_version": "w"}, ("w",), (9,)),
        ({"weight_versions": [None, 4, {"start": 1}], "weight_version": "w"}, ("w",), (9,)),
    ],
)
def test_versions_and_where_they_end(meta: dict[str, Any], versions: tuple[str, ...], ends: tuple[int, ...]) -> None:
    assert weight_versions(meta, 9) == (versions, ends)
