"""The conformance kit's doors: `conforms` in a plugin's test, waivers, reports, required and optional checks."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.distributions import distribution, module
from miles_core.errors import PluginNotFound
from miles_core.plugins import Plugin, PluginRecord
from miles_core.testing import conformance, conforms

NEVER = "def message_matches(stored, replayed):\n    return False\n"
SAME = "def message_matches(stored, replayed):\n    return stored == replayed\n"


def plugin(kind: str, **hooks: Callable[..., Any]) -> Plugin:
    return Plugin(PluginRecord(kind, "p", "zz-a", "1.0", "zz_a"), hooks, types.ModuleType("zz_a"), None)


def checks(kind: str, **hooks: Callable[..., Any]) -> dict[str, tuple[str, str | None]]:
    report = conformance.run(plugin(kind, **hooks))
    return {check.name: (check.outcome.value, check.reason) for check in report.checks}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs the matcher zz_m with a source."""

    def install(source: str) -> None:
        distribution(tmp_path, "zz-a", groups={"miles.matchers": {"zz_m": f"zz_{tmp_path.name}"}})
        module(tmp_path, f"zz_{tmp_path.name}", source)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_one_line_in_a_plugins_test_runs_every_check(installed: Callable[[str], None]) -> None:
    installed(SAME)
    report = conforms("matcher", "zz_m")
    assert report.text() == (
        "matcher zz_m of zz-a 1.0\n"
        "  pass  answers with a bool\n"
        "  pass  is reflexive\n"
        "  pass  leaves its arguments\n"
        "  pass  answers alike\n"
        "  skip  sorts by a key (optional): has no message_key, so a tree asks about every branch"
    )


def test_a_failure_shows_the_whole_report(installed: Callable[[str], None]) -> None:
    installed(NEVER)
    with pytest.raises(AssertionError) as caught:
        conforms("matcher", "zz_m")
    text = str(caught.value)
    assert text.startswith("1 of 5 checks failed\nmatcher zz_m of zz-a 1.0\n  pass  answers with a bool\n")
    assert "\n  fail  is reflexive: does not match a message with itself: {'role': 'system'" in text


def test_a_check_is_waived_with_a_reason_only(installed: Callable[[str], None]) -> None:
    installed(NEVER)
    report = conforms("matcher", "zz_m", waive={"is reflexive": "every request is a branch of its own"})
    (waived,) = [check for check in report.checks if check.outcome is conformance.Outcome.WAIVED]
    assert waived.reason is not None
    assert waived.reason.startswith("every request is a branch of its own (does not match a message with itself")
    with pytest.raises(ValueError, match="there is no check 'is reflexiv' to waive; there are: answers with a bool, "):
        conforms("matcher", "zz_m", waive={"is reflexiv": "why not"})


def test_a_plugin_that_is_not_installed_is_named() -> None:
    with pytest.raises(PluginNotFound, match="no matcher is named zz_absent"):
        conforms("matcher", "zz_absent")


def test_what_a_plugin_has_beyond_the_required_must_be_right() -> None:
    def message_matches(stored: Any, replayed: Any) -> bool:
        return bool(stored["role"] == replayed["role"])

    found = checks("matcher", message_matches=message_matches, message_key=lambda message: str(message))
    outcome, reason = found["sorts by a key"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("matches {'role': 'user', 'content': 'What is 1 + 2?'} and {'role': 'user', 'content': [")
    unhashable = checks("matcher", message_matches=message_matches, message_key=lambda message: [message])
    assert unhashable["sorts by a key"][1] == "TypeError: unhashable type: 'list'"


def test_a_matcher_that_remembers_fails() -> None:
    seen: list[Any] = []

    def message_matches(stored: Any, replayed: Any) -> bool:
        seen.append(stored)
        return len(seen) > 400 or stored == replayed

    outcome, reason = checks("matcher", message_matches=message_matches)["answers alike"]
    assert outcome == "fail"
    assert reason is not None
    assert reason.startswith("answered False, then True, for {")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (True, ("pass", None)),
        (types.SimpleNamespace(keep=False, reason="all equal"), ("pass", None)),
        (None, ("fail", "keep_group returned None for the rewards (0.0, 1.0); return True or False")),
    ],
)
def test_a_group_filter_answers(answer: Any, found: tuple[str, str | None]) -> None:
    assert checks("sample-hook", keep_group=lambda args, samples: answer)["decides on groups"] == found


def test_a_sample_hook_that_trains_what_was_not_sampled_fails() -> None:
    def postprocess(leaf_samples: Any, session_metadata: Any) -> Any:
        leaf_samples[0].loss_mask = [1, 1, 1]
        return leaf_samples

    found = checks("sample-hook", postprocess_samples=postprocess)["trains only what was sampled"]
    assert found == (
        "fail",
        "trains token 4 at position 3 with log-probability 0.0, which the engine did not sample",
    )
