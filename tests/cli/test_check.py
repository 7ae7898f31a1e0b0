"""`miles-plugins check`, run as a command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.distributions import AGENT, Site, distribution, module

WHOLE = (
    "async def run_agent(base_url, prompt, request_kwargs, metadata):\n    pass\n\nasync def abort(args):\n    pass\n"
)

WORKING = (
    "import aiohttp\n\n"
    "async def run_agent(base_url, prompt, request_kwargs, metadata):\n"
    "    body = {'model': 'm', 'messages': prompt, **request_kwargs}\n"
    "    async with aiohttp.ClientSession() as http:\n"
    "        async with http.post(f'{base_url}/v1/chat/completions', json=body) as response:\n"
    "            await response.read()\n"
)


def test_every_plugin_has_its_line_and_a_failing_one_its_reason(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"good": "zz_good", "bad": "zz_bad"})
    distribution(site.path, "zz-b", groups={"miles.matchers": {"never": "zz_never"}})
    module(site.path, "zz_good", WHOLE)
    file = module(site.path, "zz_bad", "import sys\nsys.exit(3)\n")
    module(site.path, "zz_never", "def message_matches(stored, replayed):\n    return False\n")
    result = site.run("check")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout == (
        f"FAIL  agent bad of zz-a 1.0 (zz_bad) cannot be imported: SystemExit: 3 ({file}, line 2)\n"
        "        a plugin must not exit when it is imported; tell its author\n"
        "ok    agent good of zz-a 1.0: 3 passed, 1 skipped\n"
        "FAIL  matcher never of zz-b 1.0: 3 passed, 1 skipped\n"
        "        fail  is reflexive: does not match a message with itself: "
        "{'role': 'system', 'content': 'Be brief.'}\n"
        "\n"
        "3 plugins checked, 2 failed\n"
    )


def test_all_well_is_exit_code_0(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"good": "zz_good"})
    module(site.path, "zz_good", AGENT)
    result = site.run("check")
    assert result.returncode == 0
    assert result.stdout == "ok    agent good of zz-a 1.0: 2 passed, 2 skipped\n\n1 plugin checked, none failed\n"


def test_a_name_limits_the_check_and_shows_every_check(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"good": "zz_good", "bad": "zz_absent"})
    module(site.path, "zz_good", WORKING)
    result = site.run("check", "good", "zz-a:good")
    lines = (
        "ok    agent good of zz-a 1.0: 5 passed, 3 skipped\n"
        "        pass  takes the session\n"
        "        pass  passes sampling parameters on\n"
        "        skip  can be stopped (optional): has no abort, which is optional\n"
        "        skip  registers its flags (optional): has no add_arguments, which is optional\n"
        "        pass  works in its session\n"
        "        pass  returns metadata\n"
        "        pass  sends the sampling parameters\n"
        "        skip  sends answers back as they came (optional): it made one request, or none\n"
    )
    assert result.stdout == f"{lines}{lines}\n2 plugins checked, none failed\n"
    assert result.returncode == 0


def test_an_agent_that_is_named_is_tried_out(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"deaf": "zz_deaf", "needy": "zz_needy"})
    module(site.path, "zz_deaf", WORKING.replace("**request_kwargs", "'temperature': 0"))
    module(site.path, "zz_needy", WORKING.replace("    body =", "    metadata['container']\n    body ="))
    result = site.run("check", "deaf", "needy")
    assert result.returncode == 1
    assert "        fail  sends the sampling parameters: of request_kwargs {'temperature': 0.7, " in result.stdout
    assert "its request has {'temperature': 0, 'top_p': None, " in result.stdout
    assert "ok    agent needy of zz-a 1.0: 2 passed, 6 skipped\n" in result.stdout
    assert "skip  works in its session: it raised KeyError: 'container'" in result.stdout
    assert "give it a task of its own: conforms(…, trial=AgentTrial(" in result.stdout
    assert site.run("check").returncode == 0


def test_prints_of_a_plugin_do_not_reach_the_json(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"loud": "zz_loud", "bad": "zz_bad"})
    noise = (
        "import atexit, logging, os, subprocess, sys\n"
        "print('noise')\n"
        "sys.stdout.write('noise')\n"
        "os.write(1, b'noise')\n"
        "subprocess.run(['echo', 'noise'], check=True)\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "logging.error('noise')\n"
        "atexit.register(print, 'noise')\n"
    )
    module(site.path, "zz_loud", noise + AGENT)
    module(site.path, "zz_bad", noise + "raise ValueError('no')\n")
    result = site.run("check", "--json")
    assert result.returncode == 1
    answer = json.loads(result.stdout)
    assert [(plugin["name"], plugin["ok"]) for plugin in answer["plugins"]] == [("bad", False), ("loud", True)]
    assert result.stderr.count("noise") == 12


def test_json_has_checks_hooks_and_the_error(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"good": "zz_good", "bad": "zz_absent"})
    module(site.path, "zz_good", AGENT)
    answer = json.loads(site.run("check", "--json").stdout)
    bad, good = answer["plugins"]
    assert (answer["schema"], answer["problems"]) == (1, [])
    assert bad["error"] == "agent bad of zz-a 1.0 (zz_absent) cannot be imported: there is no module 'zz_absent'"
    assert (bad["state"], bad["checks"], bad["hooks"]) == ("failed", [], [])
    assert (good["state"], good["error"], good["hooks"]) == ("loaded", None, ["run_agent"])
    assert good["checks"][0] == {
        "name": "takes the session",
        "outcome": "pass",
        "required": True,
        "reason": None,
    }


def test_disabled_plugins_are_not_checked(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"bad": "zz_absent"})
    result = site.run("check", environ={"MILES_PLUGINS_DISABLE": "bad"})
    assert (result.returncode, result.stdout) == (0, "0 plugins checked, none failed\n")


def test_both_of_a_conflict_are_checked(site: Site) -> None:
    for name in ("zz-a", "zz-b"):
        distribution(site.path, name, agents={"p": "zz_good"})
    module(site.path, "zz_good", AGENT)
    result = site.run("check")
    assert result.returncode == 0
    assert result.stdout.endswith("2 plugins checked, none failed\n")


def test_metadata_that_hides_plugins_is_a_failure(site: Site) -> None:
    distribution(site.path, "zz-a", raw=b"[miles.agents]\nzz = caf\xe9\n")
    result = site.run("check")
    assert result.returncode == 1
    assert "is not UTF-8" in result.stdout


def test_a_dotted_path_needs_a_kind(site: Site) -> None:
    module(site.path, "zz_good", AGENT)
    result = site.run("check", "zz_good.run_agent")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: a dotted path is a plugin of any kind\n  say which: --kind agent zz_good.run_agent\n"
    )
    assert site.run("check", "--kind", "agent", "zz_good.run_agent").returncode == 0


def test_ctrl_c_while_a_plugin_is_imported_stops_the_command(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", "raise KeyboardInterrupt\n")
    result = site.run("check")
    assert (result.returncode, result.stdout) == (130, "")


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (
            "agents",
            "async def run_agent(metadata):\n    pass\n",
            "fail  takes the session: run_agent does not take base_url and prompt",
        ),
        (
            "matchers",
            "def message_matches(stored, replayed):\n    return 1\n",
            "fail  answers with a bool: answered 1 for",
        ),
        (
            "matchers",
            "def message_matches(stored, replayed):\n    stored.clear()\n    return True\n",
            "fail  leaves its arguments: changed its arguments from",
        ),
        (
            "generators",
            "async def generate(input):\n    pass\n"
            "def add_arguments(parser):\n    parser.add_argument('--zz', required=True)\n",
            "fail  registers its flags (optional): makes zz required; give a default",
        ),
        (
            "engines",
            "def launch_engine():\n    pass\n",
            "fail  takes its configuration: launch_engine does not take config",
        ),
        (
            "sample_hooks",
            "def pick_samples(leaf_samples):\n    return leaf_samples + leaf_samples\n",
            "fail  picks a subset (optional): pick_samples returned a sample twice",
        ),
        (
            "tito_families",
            "def tito_family():\n    return {}\n",
            "fail  declares a family: tito_family returned dict; return a TitoFamily",
        ),
    ],
)
def test_a_plugin_that_breaks_its_contract_fails(site: Site, kind: str, source: str, reason: str) -> None:
    distribution(site.path, "zz-a", groups={f"miles.{kind}": {"p": "zz_a"}})
    module(site.path, "zz_a", source)
    result = site.run("check")
    assert result.returncode == 1
    assert f"        {reason}" in result.stdout


def test_an_object_that_raises_when_looked_at_is_a_broken_plugin_like_any_other(site: Site) -> None:
    source = "class O:\n    def __getattribute__(self, name):\n        raise ValueError('no peeking')\n\nthing = O()\n"
    distribution(site.path, "zz-a", groups={"miles.matchers": {"p": "zz_a:thing", "q": "zz_b"}})
    module(site.path, "zz_a", source)
    module(site.path, "zz_b", "def message_matches(stored, replayed):\n    return stored == replayed\n")
    result = site.run("check", "p", "q")
    assert result.returncode == 1
    assert "cannot be looked into: ValueError: no peeking" in result.stdout
    assert "ok    matcher q of zz-a 1.0" in result.stdout


# -- what a plugin may do to the process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os\nos._exit(0)\n", "ended the process with exit code 0"),
        ("import os\nos._exit(7)\n", "ended the process with exit code 7"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "killed the process with SIGSEGV"),
        ("import os\nos.abort()\n", "killed the process with SIGABRT"),
        ("import os\nos.closerange(3, 256)\n" + AGENT, "ended the process with exit code 70"),
    ],
)
def test_a_plugin_that_ends_the_process_is_told_and_the_others_are_checked(site: Site, source: str, how: str) -> None:
    distribution(site.path, "zz-a", agents={"a": "zz_good", "b": "zz_bad", "c": "zz_good"})
    module(site.path, "zz_bad", source)
    module(site.path, "zz_good", AGENT)
    result = site.run("check")
    assert result.returncode == 1
    assert result.stdout == (
        "ok    agent a of zz-a 1.0: 2 passed, 2 skipped\n"
        f"FAIL  agent b of zz-a 1.0 (zz_bad) {how}\n"
        "        a plugin must leave the program that uses it alone; tell its author\n"
        "ok    agent c of zz-a 1.0: 2 passed, 2 skipped\n"
        "\n"
        "3 plugins checked, 1 failed\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n",
        "import atexit, threading\natexit.register(threading.Event().wait)\n",
        "import concurrent.futures, threading\n"
        "concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)\n",
        "import sys\nsys.stdout.close()\nsys.stderr.close()\n",
        "import os, tempfile\nos.chdir(tempfile.mkdtemp())\n",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    ],
)
@pytest.mark.parametrize("command", ["check", "info"])
def test_no_plugin_keeps_the_command_from_ending(site: Site, command: str, source: str) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", source + AGENT)
    result = site.run(command, *(["p"] if command == "info" else []))
    assert result.returncode == 0
    assert "agent" in result.stdout


def test_a_plugin_that_asks_for_input_gets_none(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", f"input('Which? ')\n{AGENT}")
    result = site.run("check", "--json")
    (plugin,) = json.loads(result.stdout)["plugins"]
    assert "EOFError: EOF when reading a line" in plugin["error"]


def test_a_plugin_that_takes_long_is_named_while_it_does(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", f"import time\ntime.sleep(1.5)\n{AGENT}")
    patience = "import miles_core.cli.apart as apart; apart.PATIENCE = 0.3; from miles_core.cli import main; "
    command = [sys.executable, "-S", "-c", f"{patience}main(['check'])"]
    result = subprocess.run(command, env=site.env(), cwd=site.path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "still at agent p of zz-a 1.0 ...\n")


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.path.clear()\nsys.modules.clear()\n",
        "import builtins\nbuiltins.open = builtins.isinstance = None\n",
        "import sys\nsys.setrecursionlimit(60)\n",
        "import sys\nsys.excepthook = None\n",
        "import importlib\nimportlib.import_module = None\n",
    ],
)
def test_a_distribution_that_breaks_its_process_leaves_the_others_alone(site: Site, source: str) -> None:
    distribution(site.path, "zz-a", agents={"a": "zz_bad"})
    distribution(site.path, "zz-b", agents={"b": "zz_good"})
    module(site.path, "zz_bad", source)
    module(site.path, "zz_good", AGENT)
    result = site.run("check")
    first, *_, last = result.stdout.splitlines()
    assert first.startswith("FAIL  agent a of zz-a 1.0 ")
    assert "ok    agent b of zz-b 1.0: 2 passed, 2 skipped\n" in result.stdout
    assert (result.returncode, last) == (1, "2 plugins checked, 1 failed")
