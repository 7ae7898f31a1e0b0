"""Every family against its golden vectors: text, refusals, ids, increments and joins.

A file in `tests/data/golden` is enough for a family (or `family@revision`) to be tested; one whose family no entry
point brings fails. Each test goes through a whole file and names the rows that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.golden import golden_family, golden_names, golden_rows, has_ids, installed_family, served
from miles_core.errors import RenderError
from miles_core.tito import BoundFamily

Row = dict[str, Any]
Junction = dict[str, Any]

SHOWN = 3
"""How many differences a failure spells out."""

every_file = pytest.mark.parametrize("name", golden_names())


def label(row: Row) -> str:
    kwargs = "".join(f" {key}={value}" for key, value in row["chat_template_kwargs"].items())
    return f"{row['case']}{kwargs} {'prompt' if row['add_generation_prompt'] else 'whole'}"


def render(family: BoundFamily, row: Row) -> str:
    kwargs = family.merge_kwargs(row["chat_template_kwargs"])
    return family.render(row["messages"], row["tools"], kwargs, row["add_generation_prompt"])


def increment(family: BoundFamily, row: Row, junction: Junction) -> str:
    k = junction["k"]
    appended = row["messages"][k : k + junction["appended"]]
    kwargs = family.merge_kwargs(row["chat_template_kwargs"])
    return family.render_suffix(row["messages"][k - 1], appended, row["tools"], kwargs)


def digest(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def junctions(name: str) -> Iterator[tuple[Row, Junction]]:
    """The boundaries whose appended roles the format takes."""
    for row in golden_rows(name):
        for junction in row.get("junctions", []):
            if junction["roles_allowed"]:
                yield row, junction


def trusted(junction: Junction) -> bool:
    """Whether the reference's join gave its own text; else its ids are of another text than the row has."""
    return all(merge["text_ok"] for merge in junction["merge"])


def checkpoint_of(family: BoundFamily, row: Row, junction: Junction, merge: Row) -> list[int]:
    """The ids of the prefix as the engine left them: without the template's separator, with the sampled stop token."""
    ids = family.encode(row["rendered"][: junction["prefix_chars"]])
    ids = ids[: merge["prefix_len"]]
    tail = merge["prefix_tail_ids"]
    return ids + tail[len(tail) - (merge["prefix_len"] - len(ids)) :] if len(ids) < merge["prefix_len"] else ids


def report(faults: list[str]) -> None:
    assert not faults, f"{len(faults)} rows differ:\n\n" + "\n\n".join(faults[:SHOWN])


def test_there_are_vectors() -> None:
    assert golden_names()


@every_file
def test_the_family_is_installed(name: str) -> None:
    family, _, revision = name.partition("@")
    installed = installed_family(family)
    assert installed.name == family
    assert revision in {"", *(known.name for known in installed.revisions)}
    assert golden_rows(name)


@every_file
def test_text(name: str) -> None:
    family, faults = golden_family(name), []
    for row in golden_rows(name):
        if "error" in row:
            continue
        text = render(family, row)
        if text != served(row):
            faults.append(f"{label(row)}\nwant {served(row)!r}\nhave {text!r}")
    report(faults)


@every_file
def test_refusals(name: str) -> None:
    family, faults = golden_family(name), []
    for row in golden_rows(name):
        if "error" not in row:
            continue
        try:
            faults.append(f"{label(row)}\nis not refused: {render(family, row)!r}")
        except RenderError:
            pass
    report(faults)


@every_file
def test_fixed_kwargs(name: str) -> None:
    family = golden_family(name)
    for row in golden_rows(name):
        # the reference also has what an encoder derives from them
        assert family.effective_kwargs(row["chat_template_kwargs"]).items() <= row["effective_kwargs"].items(), label(
            row
        )


@every_file
def test_ids(name: str) -> None:
    family, faults = golden_family(name), []
    for row in golden_rows(name):
        if "n_ids" not in row or not has_ids(row):
            continue
        ids = family.encode(render(family, row))
        if (len(ids), digest(ids), row.get("ids", ids)) != (row["n_ids"], row["ids_sha256"], ids):
            faults.append(f"{label(row)}: {len(ids)} ids, want {row['n_ids']}")
    report(faults)


@every_file
def test_roles(name: str) -> None:
    allowed = set(golden_family(name).family.allowed_append_roles)
    for row in golden_rows(name):
        for junction in row.get("junctions", []):
            assert (set(junction["appended_roles"]) <= allowed) is junction["roles_allowed"], label(row)


@every_file
def test_increments(name: str) -> None:
    family, faults = golden_family(name), []
    for row, junction in junctions(name):
        if junction.get("incremental_text") is None:
            continue
        text = increment(family, row, junction)
        if text != junction["incremental_text"]:
            faults.append(f"{label(row)} at {junction['k']}\nwant {junction['incremental_text']!r}\nhave {text!r}")
        elif trusted(junction) and family.encode(text) != junction["incremental_ids"]:
            faults.append(f"{label(row)} at {junction['k']}: the ids of {text!r} differ")
    report(faults)


@every_file
def test_refused_increments(name: str) -> None:
    family = golden_family(name)
    for row, junction in junctions(name):
        if junction.get("reason") == "render_error":
            with pytest.raises(RenderError):
                increment(family, row, junction)


@every_file
def test_joins(name: str) -> None:
    """With each stop token that may have been sampled, and cut off before it."""
    family, faults = golden_family(name), []
    for row, junction in junctions(name):
        if junction.get("incremental_text") is None or not has_ids(row):
            continue
        suffix = family.encode(junction["incremental_text"])
        whole = family.encode(row["rendered"][: junction["prefix_chars"]] + junction["incremental_text"])
        for merge in junction["merge"]:
            checkpoint = checkpoint_of(family, row, junction, merge)
            assert len(checkpoint) == merge["prefix_len"]
            assert checkpoint[-len(merge["prefix_tail_ids"]) :] == merge["prefix_tail_ids"]
            kept, bridge = family.join(checkpoint, suffix)
            assert len(checkpoint) - kept <= family.family.max_trim_tokens
            merged = [*checkpoint[:kept], *bridge, *suffix]
            if trusted(junction):
                right = len(merged) == merge["merged_len"] and (merged == whole) is merge["ids_equal_full_encode"]
            else:
                right = merged == whole
            if not right:
                faults.append(f"{label(row)} at {junction['k']}, sampled {merge['stop']}: {merged[-len(suffix) - 4 :]}")
    report(faults)


@pytest.mark.parametrize("left", ["<|im_start|>", "naïve 数 🙂 \t\n zyx"])
@every_file
def test_the_tokenizer_encodes_any_text(name: str, left: str) -> None:
    tokenizer = golden_family(name).tokenizer
    assert tokenizer.decode(tokenizer.encode(left)) == left


def test_the_minimax_templates_differ_in_the_name_only() -> None:
    sources = [golden_family(name).template for name in ("minimax_m25", "minimax_m27")]
    first, second = (getattr(source, "text").replace("M2.7", "M2.5") for source in sources)  # noqa: B009
    assert first == second
