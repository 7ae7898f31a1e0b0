"""Who gets a bare name, and what the environment leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.distributions import AGENT, distribution, module
from miles_core.errors import ConfigError, PluginAmbiguous, PluginDisabled, PluginNotFound
from miles_core.plugins import Registry


def discover(*path: Path, **environ: str) -> Registry:
    return Registry.discover(path=[str(entry) for entry in path], environ=environ)


def states(registry: Registry) -> list[tuple[str, str]]:
    return [(record.selector, record.state.value) for record in registry.records]


@pytest.fixture
def rivals(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories, each with a third party's agent p."""
    a, b = tmp_path / "a", tmp_path / "b"
    distribution(a, "zz-a", agents={"p": "zz_a"})
    distribution(b, "zz-b", "2.0", agents={"p": "zz_b"})
    return a, b


def test_two_third_parties_of_one_name_are_in_conflict_whatever_the_order(rivals: tuple[Path, Path]) -> None:
    a, b = rivals
    registry = discover(a, b)
    assert registry.records == discover(b, a).records
    assert states(registry) == [("zz-a:p", "conflict"), ("zz-b:p", "conflict")]
    assert registry.records[0].error == "agent p of zz-a 1.0 (zz_a) has the same name as one in zz-b"
    advice = "choose it with --agent zz-a:p, or leave the other out with MILES_PLUGINS_DISABLE"
    assert registry.records[0].advice == advice


def test_a_bare_name_in_conflict_is_an_error_that_lists_them(rivals: tuple[Path, Path]) -> None:
    with pytest.raises(PluginAmbiguous) as caught:
        discover(*rivals).find("agent", "p")
    assert caught.value.message == (
        "agent p is in zz-a 1.0 and zz-b 2.0\n  choose with --agent zz-a:p or --agent zz-b:p"
    )


def test_the_distribution_always_chooses(rivals: tuple[Path, Path]) -> None:
    assert discover(*rivals).find("agent", "zz-b:p").target == "zz_b"
    assert discover(*rivals).find("agent", "ZZ_B:p").target == "zz_b"


def test_a_conflict_of_many_is_told_in_short(tmp_path: Path) -> None:
    for letter in "abcdef":
        distribution(tmp_path, f"zz-{letter}", agents={"p": "zz_a"})
    record = discover(tmp_path).records[0]
    assert record.error == "agent p of zz-a 1.0 (zz_a) has the same name as one in zz-b, zz-c, zz-d and 2 more"


def test_a_built_in_keeps_its_bare_name(rivals: tuple[Path, Path]) -> None:
    a, b = rivals
    distribution(a, "miles-plugins", "0.1.0", agents={"p": "miles_agents.p"})
    registry = discover(b, a)
    expected = [("miles-plugins:p", "found"), ("zz-a:p", "shadowed"), ("zz-b:p", "shadowed")]
    assert states(registry) == expected
    assert registry.find("agent", "p").builtin
    assert registry.find("agent", "zz-a:p").target == "zz_a"
    assert registry.records[1].error == "agent p of zz-a 1.0 (zz_a) is hidden by the built-in of that name"


def test_one_name_in_two_kinds_is_no_conflict(tmp_path: Path) -> None:
    distribution(tmp_path, "zz-a", agents={"p": "zz_a"}, groups={"miles.matchers": {"p": "zz_m"}})
    assert {state for _, state in states(discover(tmp_path))} == {"found"}


def test_a_failed_rival_does_not_take_the_name(tmp_path: Path) -> None:
    distribution(tmp_path, "zz-a", agents={"p": "not valid!"})
    distribution(tmp_path, "zz-b", agents={"p": "zz_b"})
    assert discover(tmp_path).find("agent", "p").distribution == "zz-b"


def test_a_conflict_stays_one_after_a_rival_has_failed_to_load(site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_absent"})
    distribution(site, "zz-b", agents={"p": "zz_b"})
    module(site, "zz_b", AGENT)
    registry = discover(site)
    with pytest.raises(Exception, match="zz_absent"):
        registry.load("agent", "zz-a:p")
    registry.load("agent", "zz-b:p")
    with pytest.raises(PluginAmbiguous):
        registry.find("agent", "p")


@pytest.mark.parametrize("value", ["p", "zz-a:p,zz-b:p", " zz_a:p , ZZ.B:p,", "zz-a:*,p"])
def test_disabled_plugins_cannot_be_chosen(rivals: tuple[Path, Path], value: str) -> None:
    registry = discover(*rivals, MILES_PLUGINS_DISABLE=value)
    assert states(registry) == [("zz-a:p", "disabled"), ("zz-b:p", "disabled")]
    with pytest.raises(PluginDisabled) as caught:
        registry.find("agent", "zz-a:p")
    with pytest.raises(PluginDisabled):
        registry.load_record(registry.records[0])
    assert caught.value.message.startswith(
        f"agent p of zz-a 1.0 (zz_a) is disabled by MILES_PLUGINS_DISABLE={value}\n  take "
    )


def test_disabling_one_of_two_settles_the_conflict(rivals: tuple[Path, Path]) -> None:
    registry = discover(*rivals, MILES_PLUGINS_DISABLE="zz-a:p")
    assert states(registry) == [("zz-a:p", "disabled"), ("zz-b:p", "found")]
    assert registry.find("agent", "p").distribution == "zz-b"


def test_only_what_is_allowed_may_load(rivals: tuple[Path, Path]) -> None:
    registry = discover(*rivals, MILES_PLUGINS_ALLOW="zz-b:p")
    assert states(registry) == [("zz-a:p", "disabled"), ("zz-b:p", "found")]
    with pytest.raises(PluginDisabled) as caught:
        registry.find("agent", "zz-a:p")
    assert caught.value.message == (
        "agent p of zz-a 1.0 (zz_a) is not among those allowed by MILES_PLUGINS_ALLOW=zz-b:p\n"
        "  add p to MILES_PLUGINS_ALLOW to use it"
    )


def test_disabling_goes_before_allowing(rivals: tuple[Path, Path]) -> None:
    registry = discover(*rivals, MILES_PLUGINS_ALLOW="p", MILES_PLUGINS_DISABLE="zz-a:*")
    assert states(registry) == [("zz-a:p", "disabled"), ("zz-b:p", "found")]


def test_a_misspelled_exclusion_is_told(rivals: tuple[Path, Path]) -> None:
    (problem,) = discover(*rivals, MILES_PLUGINS_DISABLE="zz-a:q").problems
    assert (problem.where, problem.what) == ("MILES_PLUGINS_DISABLE", "names zz-a:q, which is not installed")
    assert (problem.advice, problem.lost) == ("did you mean zz-a:p?", False)


@pytest.mark.parametrize(
    ("kind", "selector", "message"),
    [
        ("agent", "calculater", "no agent is named calculater; did you mean calculator?\n  installed: calculator"),
        ("agent", "zzz", "no agent is named zzz\n  installed: calculator"),
        ("engine", "zzz", "no engine is named zzz\n  installed: none"),
        (
            "agent",
            "strict",
            "no agent is named strict; the matcher of that name is chosen with --message-matcher\n"
            "  installed: calculator",
        ),
        ("agent", "acme:calculator", "no agent is named acme:calculator\n  there is zz-a:calculator"),
        (
            "agent",
            "my_pkg.my_agent:run",
            "no agent is named my_pkg.my_agent:run\n  for a dotted path write my_pkg.my_agent.run",
        ),
    ],
)
def test_an_unknown_name_says_what_was_meant(tmp_path: Path, kind: str, selector: str, message: str) -> None:
    distribution(tmp_path, "zz-a", agents={"calculator": "m"}, groups={"miles.matchers": {"strict": "m"}})
    with pytest.raises(PluginNotFound) as caught:
        discover(tmp_path).find(kind, selector)
    assert caught.value.message == message


def test_the_name_of_a_module_says_how_its_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zz_mine.py").write_text("raise RuntimeError('it is only looked for')\n")
    (tmp_path / "zz_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, advice in (
        ("zz_mine", "\n  for the module of that name write zz_mine.run_agent"),
        ("zz_folder", ""),
        ("json", ""),
    ):
        with pytest.raises(PluginNotFound) as caught:
            discover(tmp_path).find("agent", name)
        assert caught.value.message == f"no agent is named {name}\n  installed: none{advice}"


def test_only_families_have_revisions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(tmp_path).find("agent", "p@one")
    assert caught.value.message == "'p@one' has a revision, and only families have any\n  write --agent p"


def test_an_unknown_kind_says_which_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(tmp_path).find("agents", "p")
    assert caught.value.message == "there is no kind of plugin 'agents'\n  did you mean agent?"
