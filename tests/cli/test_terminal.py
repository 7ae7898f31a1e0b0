"""How the views for people look in a terminal, and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from helpers.distributions import AGENT, Site, distribution, module


def on_terminal(site: Site, *arguments: str, columns: int = 80) -> list[str]:
    """The lines that a command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-S", "-m", "miles_core", *arguments]
    environ = {**site.env(), "COLUMNS": str(columns)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, env=environ, cwd=site.path
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 65536):
                written += data
        except OSError:  # Linux says so when the other end is closed
            pass
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(ours)
    return written.decode().replace("\r\n", "\n").rstrip("\n").split("\n")


@pytest.fixture
def crowded(site: Site) -> Site:
    """Conflicts, a hidden plugin, a broken one, and metadata that cannot be read."""
    distribution(site.path, "miles-plugins", "0.1.0", groups={"miles.matchers": {"strict": "miles_matchers.strict"}})
    distribution(site.path, "zz-a-rather-long-name", "2026.11.30", agents={"p": "zz_good", "q": "zz_bad"})
    distribution(site.path, "zz-b", agents={"p": "zz_good"}, groups={"miles.matchers": {"strict": "zz_good"}})
    distribution(site.path, "zz-c", raw=b"[miles.agents]\nzz = caf\xe9\n")
    module(site.path, "zz_good", AGENT)
    module(site.path, "zz_bad", "import json\njson.loads('{\"a rather long text\": ')\n")
    return site


@pytest.mark.parametrize("command", [("list",), ("check",), ("check", "q", "zz-b:p")])
def test_no_line_is_wider_than_the_terminal(crowded: Site, command: tuple[str, ...]) -> None:
    lines = on_terminal(crowded, *command)
    # a path is not broken, so that it can be copied
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    assert any(line.startswith("      ") for line in lines)


def test_a_wrapped_line_goes_on_with_two_more_spaces(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    distribution(site.path, "zz-b", agents={"p": "zz_b"})
    assert on_terminal(site, "list", columns=60) == [
        "KIND         NAME  STATE     VERSION  FROM",
        "agent        p     conflict  1.0      zz-a",
        "agent        p     conflict  1.0      zz-b",
        "",
        "2 plugins need attention:",
        "  agent p of zz-a 1.0 (zz_a) has the same name as one in",
        "    zz-b",
        "    choose it with --agent zz-a:p, or leave the other out",
        "      with MILES_PLUGINS_DISABLE",
        "  agent p of zz-b 1.0 (zz_b) has the same name as one in",
        "    zz-a",
        "    choose it with --agent zz-b:p, or leave the other out",
        "      with MILES_PLUGINS_DISABLE",
    ]


def test_in_a_pipe_a_statement_is_one_line(crowded: Site) -> None:
    listed = crowded.run("list", environ={"COLUMNS": "40"}).stdout
    assert "  matcher strict of zz-b 1.0 (zz_good) is hidden by the built-in of that name\n" in listed
    checked = crowded.run("check", environ={"COLUMNS": "40"}).stdout
    (line,) = [line for line in checked.splitlines() if line.startswith("FAIL  agent q")]
    assert line.endswith("zz_bad.py, line 2)")
