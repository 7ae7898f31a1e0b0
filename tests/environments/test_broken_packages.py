"""Third-party packages that are broken in every way, really built and installed: each is told, none is in the way."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import AGENT
from helpers.environments import Environment
from helpers.wheels import write_wheel

pytestmark = pytest.mark.slow

RUN = AGENT.replace("run_agent", "plugin")


def agents(**entries: str) -> str:
    return "[miles.agents]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())


MODULES = {
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "raises": ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
    "dies": ("import os\nos._exit(0)\n", "ended the process with exit code 0"),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "killed the process with SIGSEGV"),
    "needs": ("import zz_not_there\n", "No module named 'zz_not_there'"),
    "half": ("def run_agent(:\n", "SyntaxError: invalid syntax"),
    "misspelt": (AGENT.replace("run_agent", "run_agnt"), "has no hook"),
    "wrong": (AGENT.replace("prompt", "promt"), "has a run_agent with an argument 'promt' that the hook does not give"),
    "newer": (f"MILES_CONTRACT = (2, 4)\n{AGENT}", "supports versions 2 to 4 of the agent contract, and this is versi"),
    "deaf": ("async def run_agent(metadata):\n    pass\n", "takes the session: run_agent does not take base_url and"),
}
"""Agents by the module that defines them, and what is said of each."""

DISTRIBUTIONS: Mapping[str, Mapping[str, Any]] = {
    **{
        f"zz-{name}": {"modules": {f"zz_{name}.py": source}, "entry_points": agents(**{name: f"zz_{name}"})}
        for name, (source, _) in MODULES.items()
    },
    "zz-blocks": {"modules": {"zz_blocks.py": AGENT.replace("async ", "")}, "entry_points": agents(blocks="zz_blocks")},
    "zz-good": {
        "modules": {"zz_good.py": f"{AGENT}\n{RUN}\nclass Outer:\n    inner = staticmethod(plugin)\n"},
        "entry_points": agents(
            first="zz_good",
            second="zz_good",
            nested="zz_good:Outer.inner",
            spaced="zz_good : plugin",
            extra="zz_good:plugin [fast, a_b]",
        ),
    },
    "zz-extra": {
        "modules": {"zz_extra.py": "import zz_fast_thing\n"},
        "entry_points": agents(lacks="zz_extra:plugin [fast, a_b]"),
        "metadata": "Provides-Extra: fast\nProvides-Extra: a-b\n",
    },
    "zz-attribute": {
        "modules": {"zz_attribute.py": RUN},
        "entry_points": agents(attribute="zz_attribute:plugn", absent="zz_absent", typed="not a module!"),
    },
    "zz-one": {"modules": {"zz_one.py": AGENT}, "entry_points": agents(shared="zz_one", calculator="zz_one")},
    "zz-two": {"modules": {"zz_two.py": AGENT}, "entry_points": agents(shared="zz_two")},
    "zz-twice": {
        "modules": {"zz_twice.py": AGENT},
        "entry_points": "[miles.agents]\ntwice = zz_twice\ntwice = zz_twice:run_agent\n[miles.agent]\nx = zz_twice\n",
    },
    "zz-unrelated": {"modules": {}, "entry_points": "[console_scripts]\n"},
    "zz-latin": {"modules": {}, "entry_points": agents(latin="zz_latin")},
    "zz-nameless": {"modules": {"zz_nameless.py": AGENT}, "entry_points": agents(nameless="zz_nameless")},
    "zz-thread": {
        "modules": {
            "zz_thread.py": f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{AGENT}"
        },
        "entry_points": agents(thread="zz_thread"),
    },
}


@pytest.fixture(scope="module")
def env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """This project and all of the above, installed by pip; some are then damaged, as disks and people damage them."""
    work = tmp_path_factory.mktemp("broken")
    wheels = work / "wheels"
    wheels.mkdir()
    made = Environment.make(work / "env")
    made.install(wheel, *(write_wheel(wheels, name, **content) for name, content in DISTRIBUTIONS.items()))
    site = made.site
    (site / "zz_latin-1.0.dist-info" / "entry_points.txt").write_bytes(b"[miles.agents]\nlatin = zz_caf\xe9\n")
    (site / "zz_unrelated-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[[[\x00")
    (site / "zz_nameless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (site / "zz_good-0.1.dist-info").mkdir()  # what an interrupted upgrade leaves
    return made


@pytest.fixture(scope="module")
def checked(env: Environment) -> dict[str, Any]:
    """The whole answer of `check --json`."""
    result = env.miles("check", "--json", "--kind", "agent")
    assert (result.returncode, result.stderr) == (1, "")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def plugin(checked: dict[str, Any], selector: str) -> dict[str, Any]:
    (found,) = [plugin for plugin in checked["plugins"] if plugin["selector"] == selector]
    return dict(found)


def unpacked(parent: Path, name: str, source: str, agent: str) -> Path:
    """A folder of its own that a wheel was unpacked into, as `pip install --target` does."""
    folder = parent / name
    folder.mkdir()
    module = name.replace("-", "_")
    wheel = write_wheel(parent, name, modules={f"{module}.py": source}, entry_points=agents(**{agent: module}))
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_list_fails_for_none_of_them_and_hides_nothing(env: Environment) -> None:
    result = env.miles("list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    listed = json.loads(result.stdout)["plugins"]
    found = {(plugin["selector"], plugin["state"]) for plugin in listed if plugin["distribution"].startswith("zz-")}
    special = {
        ("zz-one:calculator", "shadowed"),
        ("zz-one:shared", "conflict"),
        ("zz-two:shared", "conflict"),
        ("zz-twice:twice", "failed"),
        ("zz-attribute:typed", "failed"),
    }
    fine = {f"zz-{name}:{name}" for name in (*MODULES, "blocks", "nameless", "thread")}
    fine |= {f"zz-good:{name}" for name in ("first", "second", "nested", "spaced", "extra")}
    fine |= {"zz-extra:lacks", "zz-attribute:attribute", "zz-attribute:absent"}
    assert found == special | {(selector, "found") for selector in fine}
    assert {plugin["state"] for plugin in listed if plugin["builtin"]} == {"found"}


def test_an_agent_that_gives_nothing_to_await_is_found_out_by_its_trial(env: Environment) -> None:
    """What a plain function returns is known when it is called, so that `check` without names does not tell."""
    result = env.miles("check", "--kind", "agent", "blocks")
    assert result.returncode == 1
    assert "zz_blocks.run_agent returned None, which cannot be awaited" in result.stdout
    assert "write `async def`" in result.stdout


@pytest.mark.parametrize("name", MODULES)
def test_each_fault_is_told_of_its_plugin(checked: dict[str, Any], name: str) -> None:
    found = plugin(checked, f"zz-{name}:{name}")
    assert not found["ok"]
    told = found["error"] or "; ".join(f"{c['name']}: {c['reason']}" for c in found["checks"])
    assert MODULES[name][1] in told


@pytest.mark.parametrize(
    ("selector", "told"),
    [
        ("zz-attribute:attribute", "zz_attribute has no attribute 'plugn'"),
        ("zz-attribute:absent", "there is no module 'zz_absent'"),
        ("zz-attribute:typed", "does not name a module or module:attribute"),
        ("zz-twice:twice", "has the same name as zz_twice:run_agent in the same distribution"),
        ("zz-extra:lacks", "No module named 'zz_fast_thing'"),
    ],
)
def test_targets_that_cannot_be_had_are_told(checked: dict[str, Any], selector: str, told: str) -> None:
    assert told in plugin(checked, selector)["error"]


def test_every_message_says_whose_fault_it_is_and_what_to_do(checked: dict[str, Any]) -> None:
    failed = [plugin for plugin in checked["plugins"] if plugin["error"]]
    assert len(failed) > 12
    for found in failed:
        assert f" of {found['distribution']} {found['version']} (" in found["error"]
        assert found["advice"]
    assert plugin(checked, "zz-extra:lacks")["advice"] == "install what it needs: pip install 'zz-extra[fast,a_b]'"


def test_the_good_ones_load_in_every_form(checked: dict[str, Any]) -> None:
    good = ("first", "second", "nested", "spaced", "extra")
    assert [plugin(checked, f"zz-good:{name}")["ok"] for name in good] == [True] * 5
    assert plugin(checked, "zz-good:extra")["extras"] == ["fast", "a_b"]
    for selector in ("zz-one:shared", "zz-two:shared", "zz-one:calculator", "zz-nameless:nameless", "zz-thread:thread"):
        assert plugin(checked, selector)["ok"]


def test_problems_of_metadata_are_told_where_they_concern_us(checked: dict[str, Any], env: Environment) -> None:
    told = {(problem["where"], problem["what"]) for problem in checked["problems"]}
    assert told == {
        (f"{env.site}/zz_latin-1.0.dist-info/entry_points.txt", "is not UTF-8 (byte 29 is 0xe9)"),
        (f"{env.site}/zz_nameless-1.0.dist-info", "has metadata without a name"),
        (f"{env.site}/zz_twice-1.0.dist-info/entry_points.txt", "has a group 'miles.agent' that nothing reads"),
    }
    assert all(problem["advice"] for problem in checked["problems"])


def test_a_built_in_is_chosen_by_its_bare_name_and_another_by_its_distribution(env: Environment) -> None:
    assert "miles_agents.calculator" in env.miles("info", "agent", "calculator").stdout
    assert "zz_one" in env.miles("info", "agent", "zz-one:calculator").stdout
    shared = env.miles("info", "agent", "shared")
    assert (shared.returncode, shared.stdout) == (2, "")
    assert shared.stderr == (
        "Error: agent shared is in zz-one 1.0 and zz-two 1.0\n"
        "  choose with --agent zz-one:shared or --agent zz-two:shared\n"
    )


def test_allow_and_deny_lists_settle_it(env: Environment) -> None:
    denied = env.miles("info", "agent", "shared", environ={"MILES_PLUGINS_DISABLE": "zz-two:shared"})
    assert "zz_one" in denied.stdout
    allowed = env.miles("check", environ={"MILES_PLUGINS_ALLOW": "zz-good:*,strict"})
    assert allowed.returncode == 1  # metadata that cannot be read hides plugins, whatever is allowed
    assert allowed.stdout.endswith("6 plugins checked, none failed\n")
    misspelt = env.miles("list", environ={"MILES_PLUGINS_DISABLE": "zz-two:shred"})
    assert "MILES_PLUGINS_DISABLE names zz-two:shred, which is not installed\n    did you mean" in misspelt.stdout


def test_a_broken_one_that_is_chosen_ends_the_command_with_its_reason(env: Environment, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    result = env.miles(
        "rollout", "--prompts", "prompts.jsonl", "--agent", "exits", "--output", "out", "--session-server-url",
        "http://127.0.0.1:9", cwd=tmp_path,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: agent exits of zz-exits 1.0 (zz_exits) cannot be imported: SystemExit: 3 (")
    assert result.stderr.endswith("\n  a plugin must not exit when it is imported; tell its author\n")


def test_ctrl_c_in_an_import_stops_the_command(env: Environment, tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "zz-interrupts", "raise KeyboardInterrupt\n", "interrupts")
    result = env.miles("check", "--kind", "agent", environ={"PYTHONPATH": str(folder)})
    assert (result.returncode, result.stdout) == (130, "")


def test_the_order_of_the_path_and_links_change_nothing(env: Environment, tmp_path: Path) -> None:
    site = env.site
    listed = env.miles("list", "--json").stdout
    lib64 = tmp_path / "lib64"
    lib64.symlink_to(site.parent.parent)
    linked = lib64 / site.parent.name / site.name
    for path in (linked, f"{site}/", f"{site}:{linked}"):
        assert env.miles("list", "--json", environ={"PYTHONPATH": str(path)}).stdout == listed


def test_two_folders_of_packages_give_the_same_list_in_either_order(env: Environment, tmp_path: Path) -> None:
    folders = [unpacked(tmp_path, name, AGENT, "both") for name in ("zz-left", "zz-right")]
    texts = [
        env.miles("list", environ={"PYTHONPATH": ":".join(map(str, order))}).stdout
        for order in (folders, folders[::-1])
    ]
    assert texts[0] == texts[1]
    assert "agent both of zz-left 1.0 (zz_left) has the same name as one in zz-right" in texts[0]
