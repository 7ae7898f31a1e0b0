"""Flags, defaults, variables and help texts: what is written about them is what they are."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from helpers.pages import ROOT, prose_of
from helpers.program import COMMANDS, engine_flags, flags, options, registered_flags
from helpers.tables import codes, docs, page, tables
from miles_agents import command

CLI = page("docs/cli.md")


OTHERS = frozenset({
    "--reasoning-parser", "--tool-call-parser", "--model-path", "--tokenizer-path", "--nnodes", "--node-rank",
    "--enable-dp-attention", "--enable-return-routed-experts", "--tokenizer-worker-num", "--mem-fraction-static",
    "--tp", "--version", "--help",
})  # fmt: skip
"""Flags of other programs that pages name: SGLang's, and those that every command has."""


def section_of(name: str) -> str:
    found = re.search(rf"^## `{re.escape(name)}\b.*?(?=^## |\Z)", CLI, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/cli.md has no heading ## `{name}`"
    return found[0]


def rows_of(name: str) -> dict[str, list[str]]:
    """The rows of a command's tables of flags, by each flag in their first two cells."""
    found: dict[str, list[str]] = {}
    for rows in tables(section_of(name)):
        if rows[0][0] == "flag":
            for row in rows[1:]:
                cells = [*codes(row[0]), *(codes(row[1]) if rows[0][1] == "alias" else [])]
                found.update({flag: [*rows[0], *row] for flag in cells if flag.startswith("--")})
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_every_flag_of_a_command_and_no_other(name: str) -> None:
    known = {flag for option in options(COMMANDS[name]) for flag in flags(option)} - {"--help"}
    written = set(rows_of(name))
    assert known - written == set(), "docs/cli.md lacks them"
    brought = engine_flags() if name == "engine" else set()
    assert written - known - brought == set(), "no such flags any more"


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_on_the_page_are_those_of_the_command(name: str) -> None:
    for option in options(COMMANDS[name]):
        for flag in flags(option):
            row = rows_of(name).get(flag)
            if row is None or "default" not in row[: len(row) // 2]:
                continue
            cell = row[len(row) // 2 + row[: len(row) // 2].index("default")].strip("`")
            if isinstance(option.default, int | float | str) and not isinstance(option.default, bool):
                shown = [part.strip().strip("`") for part in cell.split(",")]
                assert any(same(option.default, part) for part in shown), f"{flag}: {option.default!r}, not {cell!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_flag_accepts_stands_on_the_page(name: str) -> None:
    for option in options(COMMANDS[name]):
        if isinstance(option.type, click.Choice):
            accepted, row = set(option.type.choices), rows_of(name)[flags(option)[0]]
            assert accepted <= set(codes(" ".join(row))), f"{name} {flags(option)}: {row}"


def same(value: float | str, text: str) -> bool:
    if isinstance(value, str):
        return value == text
    try:
        return float(text) == value
    except ValueError:
        return value == 0 and text == ""


def test_pages_name_no_flag_that_does_not_exist() -> None:
    known = {flag for command in COMMANDS.values() for option in command.params for flag in option.opts}
    known |= registered_flags() | engine_flags() | OTHERS
    stale = [
        f"{path.relative_to(ROOT)}: {flag}"
        for path in docs()
        for flag in sorted(set(re.findall(r"`(--[a-z][a-z0-9-]+)", prose_of(path))))
        if flag not in known
    ]
    assert not stale, "\n".join(["", *stale])


def test_pages_name_every_flag_that_built_in_plugins_register() -> None:
    written = "\n".join(path.read_text(encoding="utf-8") for path in docs())
    assert {flag for flag in registered_flags() | engine_flags() if not re.search(rf"`{flag}\b(?!-)", written)} <= {
        "--help"
    }


VARIABLE = re.compile(r"\b_?MILES_[A-Z_]+[A-Z]\b")


def test_variables_of_the_environment_are_documented_and_no_others(tmp_path: Path) -> None:
    sources = [*(ROOT / "core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    read = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        read |= {name for name in VARIABLE.findall(text) if re.search(rf"[\"'(]{name}[\"')=]", text)}
    read |= set(command.write_inputs(tmp_path, dict.fromkeys(("prompt", "metadata", "request_kwargs"))))
    read -= {"MILES_CONTRACT"}  # an attribute of plugins
    written = {name for path in docs() for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    written -= {"MILES_CONTRACT"}
    assert read - written == set(), "no page names them"
    assert written - read - {"_MILES_PLUGINS_COMPLETE"} == set(), "nothing reads them"


# -- help texts: facts of the contract that the help of other projects got wrong ---------------------------------------

FACTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("serve", "--chat-template-path"): ("default",),
    ("rollout", "--chat-template-path"): ("default",),
    ("render", "--chat-template-path"): ("default",),
    ("serve", "--tito-model"): ("family", "auto"),
    ("rollout", "--tito-model"): ("family", "auto"),
    ("rollout", "--apply-chat-template"): ("not with agentic",),
    ("serve", "--max-rollback"): ("retry",),
    ("serve", "--on-tools-change"): ("keep", "refuse"),
    ("serve", "--api-key"): ("MILES_API_KEY",),
    ("serve", "--reject-control-tokens"): ("user and tool",),
    ("rollout", "--history"): ("leaf", "v1", "v2"),
    ("serve", "--port"): ("0 takes a free one",),
}
"""Words that the help of an option must have, by what the contract says of it."""

WRONG = (
    "download", "fixed template", "fixed_template", "set the template", "token ids of the agent", "pretokenize",
    "requires a chat template",
)  # fmt: skip
"""What would be false of any option: families bring their templates, and agents send no tokens."""


@pytest.mark.parametrize(("name", "flag"), FACTS)
def test_a_help_text_says_what_the_contract_says(name: str, flag: str) -> None:
    (option,) = [option for option in options(COMMANDS[name]) if flag in option.opts]
    text = f"{option.help} {'|'.join(option.type.choices) if isinstance(option.type, click.Choice) else ''}"
    assert all(word.lower() in text.lower() for word in FACTS[name, flag]), text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_and_none_is_wrong(name: str) -> None:
    for option in options(COMMANDS[name]):
        assert option.help, f"{name} {option.opts}"
        assert not any(word in option.help.lower() for word in WRONG), option.help
    assert COMMANDS[name].help
