"""What is found from metadata alone, whatever state the metadata is in."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.distributions import distribution, module
from miles_core.plugins import PluginRecord, Registry


def discover(*path: Path | str, **environ: str) -> Registry:
    return Registry.discover(path=[str(entry) for entry in path], environ=environ)


def only(registry: Registry) -> PluginRecord:
    (record,) = registry.records
    return record


def told(registry: Registry) -> list[tuple[str, str, str]]:
    return [(problem.where, problem.what, problem.advice) for problem in registry.problems]


def test_a_record_says_what_and_where_from(site: Path) -> None:
    distribution(site, "Zz_A.plugins", "1.2", agents={"p": "zz_a.agent:run"})
    assert only(discover(site)) == PluginRecord(
        "agent", "p", "zz-a-plugins", "1.2", "zz_a.agent:run", location=str(site.resolve())
    )


def test_discovery_imports_no_plugin(site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_never_imported"})
    module(site, "zz_never_imported", "raise SystemExit(3)")
    assert only(discover(site)).state == "found"
    assert "zz_never_imported" not in sys.modules


def test_records_are_sorted_by_kind_then_name(site: Path) -> None:
    distribution(site, "zz-b", agents={"b": "m", "a": "m"}, groups={"miles.engines": {"a": "m"}})
    distribution(site, "zz-a", groups={"miles.tito_families": {"z": "m"}, "miles.matchers": {"a": "m"}})
    found = [(record.kind, record.name) for record in discover(site).records]
    assert found == [("family", "z"), ("agent", "a"), ("agent", "b"), ("matcher", "a"), ("engine", "a")]


@pytest.mark.parametrize(
    ("value", "target", "extras"),
    [
        ("zz_a", "zz_a", ()),
        ("zz_a:Outer.inner", "zz_a:Outer.inner", ()),
        ("zz_a : plugin", "zz_a:plugin", ()),
        ("zz_a:plugin [fast, a_b]", "zz_a:plugin", ("fast", "a_b")),
        ("zz_a[a-b]", "zz_a", ("a-b",)),
    ],
)
def test_every_form_of_a_value_is_read(site: Path, value: str, target: str, extras: tuple[str, ...]) -> None:
    distribution(site, "zz-a", agents={"p": value})
    record = only(discover(site))
    assert (record.target, record.extras, record.state) == (target, extras, "found")


@pytest.mark.parametrize("value", ["not valid!", "zz_a:", ":run", "zz_a:run:again", "zz-a", "1st"])
def test_a_value_that_names_nothing_is_a_failed_record(site: Path, value: str) -> None:
    distribution(site, "zz-a", agents={"p": value})
    record = only(discover(site))
    assert record.state == "failed"
    assert record.error == f"agent p of zz-a 1.0 ({value}) does not name a module or module:attribute"


def test_a_name_that_cannot_be_selected_is_a_failed_record(site: Path) -> None:
    distribution(site, "zz-a", agents={"My-Agent": "zz_a"})
    record = only(discover(site))
    assert record.state == "failed"
    assert record.error == "agent My-Agent of zz-a 1.0 (zz_a) has a name with more than a-z, 0-9 and _"


def test_two_targets_under_one_name_in_one_distribution_fail(site: Path) -> None:
    distribution(site, "zz-a", raw=b"[miles.agents]\np = zz_a\np = zz_b\nq = zz_a\nq = zz_a\n")
    p, q = discover(site).records
    assert (p.state, q.state) == ("failed", "found")
    assert p.error == "agent p of zz-a 1.0 (zz_a) has the same name as zz_b in the same distribution"


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe[\x00", b"[console_scripts\nx", b"no group\n[a]\n=\n", b"[a]\nx = caf\xe9\n"]
)
def test_metadata_of_no_concern_is_passed_over(site: Path, raw: bytes) -> None:
    distribution(site, "broken", raw=raw)
    distribution(site, "zz-a", agents={"p": "zz_a"})
    registry = discover(site)
    assert only(registry).name == "p"
    assert registry.problems == ()


def test_entry_points_that_are_not_utf8_are_a_problem_and_hide_nothing_else(site: Path) -> None:
    info = distribution(site, "broken", raw=b"[miles.agents]\nzz = caf\xe9\n")
    distribution(site, "zz-a", agents={"p": "zz_a"})
    registry = discover(site)
    assert only(registry).name == "p"
    what, advice = "is not UTF-8 (byte 23 is 0xe9)", "its plugins are not listed; reinstall it, or tell its author"
    assert told(registry) == [(str(info / "entry_points.txt"), what, advice)]


def test_a_line_that_cannot_be_read_costs_that_line_only(site: Path) -> None:
    info = distribution(site, "zz-a", raw=b"# ours\n[miles.agents]\nlonely\np = zz_a\n[miles.matchers\nx = y\n")
    registry = discover(site)
    assert [record.name for record in registry.records] == ["p", "x"]
    file = str(info / "entry_points.txt")
    assert told(registry) == [
        (file, "line 3 is not \"name = module\": 'lonely'", "tell its author"),
        (file, "line 5 is a group without its closing bracket", "tell its author"),
    ]


def test_a_byte_order_mark_hides_nothing(site: Path) -> None:
    distribution(site, "zz-a", raw="\ufeff[miles.agents]\np = zz_a\n".encode())
    assert only(discover(site)).name == "p"


def test_a_misspelled_group_is_told_and_others_of_the_prefix_are_not(site: Path) -> None:
    info = distribution(site, "zz-a", groups={"miles.agent": {"p": "a", "q": "b"}, "miles.rewards": {"r": "c"}})
    registry = discover(site)
    assert registry.records == ()
    what = "has a group 'miles.agent' that nothing reads"
    assert told(registry) == [(str(info / "entry_points.txt"), what, "did its author mean miles.agents?")]


def test_metadata_without_a_name_goes_by_its_directory(site: Path) -> None:
    info = distribution(site, "zz-a", "3", agents={"p": "zz_a"}, metadata="Metadata-Version: 2.1\n")
    registry = discover(site)
    record = only(registry)
    assert (record.distribution, record.version) == ("zz-a", "3")
    advice = "taken for zz-a, as the directory is called; reinstall it"
    assert told(registry) == [(str(info), "has metadata without a name", advice)]
    assert not registry.problems[0].lost


def test_metadata_that_is_not_utf8_is_read_all_the_same(site: Path) -> None:
    info = distribution(site, "zz-a", agents={"p": "zz_a"})
    (info / "METADATA").write_bytes(b"Author: Ren\xe9\nName: zz-a\nVersion: 7\n")
    registry = discover(site)
    assert (only(registry).version, registry.problems) == ("7", ())


def test_a_stale_empty_directory_beside_the_real_one_changes_nothing(site: Path) -> None:
    (site / "zz_a-0.9.dist-info").mkdir()
    distribution(site, "zz-a", "1.0", agents={"p": "zz_a"})
    (site / "zz_a-1.1.dist-info").mkdir()
    registry = discover(site)
    assert (only(registry).version, registry.problems) == ("1.0", ())


def test_what_pip_left_behind_half_removed_is_not_listed(site: Path) -> None:
    distribution(site, "zz-a", "2.0", agents={"p": "zz_a"})
    (distribution(site, "zz-b", "1.0", agents={"p": "zz_a"})).rename(site / "~z_a-1.0.dist-info")
    assert only(discover(site)).version == "2.0"


def test_egg_info_beside_dist_info_is_one_plugin_from_anywhere(tmp_path: Path, site: Path) -> None:
    source = tmp_path / "source"
    distribution(source, "zz-a", "0.1", agents={"p": "zz_a_old"}, suffix=".egg-info")
    distribution(site, "zz-a", "1.0", agents={"p": "zz_a"})
    expected = discover(site).records
    assert [record.version for record in expected] == ["1.0"]
    assert discover(source, site).records == discover(site, source).records == expected


def test_egg_info_alone_counts(site: Path) -> None:
    distribution(site, "zz-a", "0.1", agents={"p": "zz_a"}, suffix=".egg-info")
    assert only(discover(site)).version == "0.1"


def test_one_directory_reached_twice_gives_one_plugin(tmp_path: Path, site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_a"})
    link = tmp_path / "lib64"
    link.symlink_to(site)
    record = only(discover(site, f"{site}/", link, site))
    assert record.state == "found"


def test_the_first_of_two_versions_on_the_path_counts_as_it_does_for_import(tmp_path: Path, site: Path) -> None:
    other = tmp_path / "other"
    distribution(site, "zz-a", "1.0", agents={"p": "zz_a"})
    distribution(other, "zz-a", "2.0")
    assert only(discover(site, other)).version == "1.0"
    assert discover(other, site).records == ()


def test_path_entries_that_are_no_directory_are_passed_over(tmp_path: Path, site: Path) -> None:
    file = tmp_path / "archive.zip"
    file.write_bytes(b"PK")
    distribution(site, "zz-a", agents={"p": "zz_a"})
    assert only(discover(tmp_path / "absent", file, site)).name == "p"


_PIECES = st.sampled_from(
    [
        b"[miles.agents]",
        b"[miles.agent",
        b"\n",
        b"p",
        b"=",
        b" ",
        b"zz_a",
        b":",
        b"[x]",
        b"#",
        b"\xff",
        b"\x00",
        b"\r",
        b";",
    ]
)


@given(
    raw=st.lists(st.one_of(_PIECES, st.binary(max_size=4)), max_size=30).map(b"".join), metadata=st.binary(max_size=60)
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bytes_in_the_metadata_stop_discovery_or_hide_another(tmp_path: Path, raw: bytes, metadata: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        path = Path(name)
        info = distribution(path, "odd", raw=raw)
        (info / "METADATA").write_bytes(metadata)
        distribution(path, "zz-good", agents={"good": "zz_good"})
        registry = discover(path)
    assert registry.find("agent", "zz-good:good").target == "zz_good"
    for record in registry.records:
        assert record.state == "found" or (record.error and record.advice)
    assert all(problem.what and problem.advice for problem in registry.problems)


def test_entry_points_that_are_a_folder_or_a_broken_link_are_passed_over(site: Path) -> None:
    for name in ("a", "b", "c"):
        info = distribution(site, f"zz-{name}", agents={name: "zz"})
        if name == "a":
            (info / "entry_points.txt").unlink()
            (info / "entry_points.txt").mkdir()
        elif name == "b":
            (info / "entry_points.txt").unlink()
            (info / "entry_points.txt").symlink_to(info / "entry_points.txt")
    (site / "file.dist-info").write_text("not a folder")
    (site / "loop.dist-info").symlink_to(site / "loop.dist-info")
    assert only(discover(site)).name == "c"
