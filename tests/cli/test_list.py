"""`miles-plugins list`, run as a command."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import AGENT, Site, distribution, module

LIST_BAR = 0.2 * 1.25
"""Seconds: the 0.2 that design.md promises, and a quarter for a machine that does other things as well."""


def plugins(site: Site, *arguments: str, **kwargs: Any) -> list[dict[str, Any]]:
    result = site.run("list", "--json", *arguments, **kwargs)
    assert (result.returncode, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["schema"] == 1
    found: list[dict[str, Any]] = answer["plugins"]
    return found


def test_the_table_and_what_needs_attention(site: Site) -> None:
    distribution(
        site.path,
        "miles-plugins",
        "0.1.0",
        groups={"miles.tito_families": {"qwen3": "m"}, "miles.matchers": {"strict": "m"}},
    )
    groups = {"miles.tito_families": {"qwen3": "acme_families.qwen3"}}
    distribution(site.path, "acme-families", "0.4", groups=groups)
    result = site.run("list")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "KIND         NAME    STATE     VERSION  FROM\n"
        "family       qwen3   found     0.1.0    miles-plugins\n"
        "family       qwen3   shadowed  0.4      acme-families\n"
        "matcher      strict  found     0.1.0    miles-plugins\n"
        "\n"
        "1 plugin needs attention:\n"
        "  family qwen3 of acme-families 0.4 (acme_families.qwen3) is hidden by the built-in of that name\n"
        "    choose it with --tito-model acme-families:qwen3, or ask its author to rename it\n"
    )


def test_json_has_every_field(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a : run [fast, a_b]"})
    assert plugins(site) == [
        {
            "kind": "agent",
            "name": "p",
            "state": "found",
            "version": "1.0",
            "distribution": "zz-a",
            "builtin": False,
            "selector": "zz-a:p",
            "target": "zz_a:run",
            "extras": ["fast", "a_b"],
            "location": str(site.path),
            "error": None,
            "advice": None,
        }
    ]


def test_extras_are_shown_as_names(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a [fast, a_b]"})
    assert site.run("list").stdout.splitlines()[1] == "agent        p     found  1.0      zz-a[fast,a_b]"


def test_kind_limits_the_list(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "m"}, groups={"miles.matchers": {"m": "m"}})
    assert [plugin["name"] for plugin in plugins(site, "--kind", "matcher")] == ["m"]
    assert site.run("list", "--kind", "engine").stdout == "No engine is installed.\n"


def test_an_unknown_kind_is_wrong_usage(site: Site) -> None:
    result = site.run("list", "--kind", "agents")
    assert (result.returncode, result.stdout) == (2, "")
    assert "'agents' is not one of 'family', 'agent', 'generator'" in result.stderr


def test_no_plugin_is_imported_and_none_makes_it_fail(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", "import sys\nprint('imported')\nsys.exit(3)\n")
    assert [plugin["state"] for plugin in plugins(site)] == ["found"]


def test_problems_with_metadata_are_shown_and_hide_nothing(site: Site) -> None:
    info = distribution(site.path, "zz-a", raw=b"[miles.agents]\nzz = caf\xe9\n")
    distribution(site.path, "zz-b", agents={"p": "zz_b"})
    distribution(site.path, "unrelated", raw=b"\xff\xfe[[[")
    result = site.run("list")
    assert result.returncode == 0
    assert result.stdout == (
        "KIND         NAME  STATE  VERSION  FROM\n"
        "agent        p     found  1.0      zz-b\n"
        "\n"
        "1 thing needs attention:\n"
        f"  {info}/entry_points.txt is not UTF-8 (byte 23 is 0xe9)\n"
        "    its plugins are not listed; reinstall it, or tell its author\n"
    )


def test_the_order_of_the_path_changes_nothing(site: Site, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    distribution(a, "zz-a", agents={"p": "zz_a"})
    distribution(b, "zz-b", agents={"p": "zz_b"})
    found = plugins(site, path=[a, b])
    assert [plugin["state"] for plugin in found] == ["conflict", "conflict"]
    assert plugins(site, path=[b, a]) == found


def test_the_same_list_from_a_plugins_source_directory(site: Site, tmp_path: Path) -> None:
    source = tmp_path / "source"
    distribution(source, "zz-a", "0.1", agents={"p": "zz_a"}, suffix=".egg-info")
    distribution(site.path, "zz-a", "1.0", agents={"p": "zz_a"})
    assert plugins(site, cwd=source) == plugins(site)


def test_links_and_slashes_list_a_plugin_once(site: Site, tmp_path: Path) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    link = tmp_path / "lib64"
    link.symlink_to(site.path)
    assert len(plugins(site, path=[link, f"{site.path}/", site.path])) == 1


def test_environment_variables_leave_plugins_out(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a", "q": "zz_a"})
    found = plugins(site, environ={"MILES_PLUGINS_DISABLE": "zz-a:p"})
    assert [plugin["state"] for plugin in found] == ["disabled", "found"]
    found = plugins(site, environ={"MILES_PLUGINS_ALLOW": "p"})
    assert [plugin["state"] for plugin in found] == ["found", "disabled"]


def test_a_reader_that_stops_reading_is_no_error(site: Site) -> None:
    distribution(site.path, "zz-a", agents={f"p{number}": "zz_a" for number in range(5000)})
    command = [sys.executable, "-S", "-m", "miles_core", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=site.env()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("agents", [None, {"p": "zz_a"}])
def test_list_is_quick_with_300_distributions(site: Site, agents: dict[str, str] | None) -> None:
    module(site.path, "zz_a", AGENT)
    for number in range(300):
        scripts = {"console_scripts": {f"run{number}": "zz_a:run"}}
        distribution(site.path, f"zz-{number}", agents=agents, groups=scripts)
    site.run("list")  # compiles and warms the file cache
    # processor time: what the clock shows while the other tests run beside it says little
    assert min(seconds_of_list(site) for _ in range(3)) < LIST_BAR


def seconds_of_list(site: Site) -> float:
    """Processor seconds of one whole `list` process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    site.run("list")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
