"""Shell completion: the scripts for the shells, and what is offered."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers.distributions import AGENT, Site, distribution, module


def complete(site: Site, *words: str, shell: str = "bash") -> list[str]:
    """What is offered for the last of the words."""
    environ = {
        "_MILES_PLUGINS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(("miles-plugins", *words)),
        "COMP_CWORD": str(len(words)),
    }
    result = site.run(environ=environ)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def names(offered: list[str]) -> list[str]:
    return [line.removeprefix("plain,") for line in offered]


def test_commands_are_completed(site: Site) -> None:
    assert names(complete(site, "li")) == ["list"]
    assert {"list", "new", "check", "serve"} <= set(names(complete(site, "")))


def test_commands_are_shown_with_their_helps_where_the_shell_can(site: Site) -> None:
    assert complete(site, "lis", shell="zsh") == ["plain", "list", "List installed plugins and what needs attention."]


def test_flags_and_choices_are_completed(site: Site) -> None:
    assert names(complete(site, "list", "--ki")) == ["--kind"]
    assert names(complete(site, "list", "--kind", "ma")) == ["matcher"]
    assert names(complete(site, "new", "ag")) == ["agent"]


def test_names_of_plugins_are_completed_without_importing_any(site: Site) -> None:
    distribution(
        site.path, "zz-a", agents={"good": "zz_a", "guide": "zz_a"}, groups={"miles.matchers": {"gold": "zz_a"}}
    )
    distribution(site.path, "zz-b", agents={"guide": "zz_a"})
    module(site.path, "zz_a", f"raise SystemExit\n{AGENT}")
    assert names(complete(site, "check", "g")) == ["gold", "good"]
    assert names(complete(site, "check", "--kind", "agent", "g")) == ["good"]
    assert names(complete(site, "check", "zz-")) == ["zz-a:guide", "zz-b:guide"]
    assert names(complete(site, "check", "gold", "go")) == ["good"]
    assert names(complete(site, "info", "goo")) == ["good"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_it_can_read(site: Site, shell: str) -> None:
    result = site.run(environ={"_MILES_PLUGINS_COMPLETE": f"{shell}_source"})
    assert result.returncode == 0
    assert "_MILES_PLUGINS_COMPLETE" in result.stdout
    if (program := shutil.which(shell)) is not None:
        read = subprocess.run([program, "-n"], input=result.stdout, capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, "")
