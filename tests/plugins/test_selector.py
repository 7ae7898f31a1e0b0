"""How selectors are read."""

from __future__ import annotations

import pytest

from miles_core.errors import ConfigError
from miles_core.plugins import Selector


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen3", Selector("qwen3", "qwen3")),
        (" qwen3 ", Selector(" qwen3 ", "qwen3")),
        ("acme:qwen3", Selector("acme:qwen3", "qwen3", "acme")),
        ("Acme_Families.X:qwen3", Selector("Acme_Families.X:qwen3", "qwen3", "acme-families-x")),
        ("glm47@glm-5.2", Selector("glm47@glm-5.2", "glm47", None, "glm-5.2")),
        ("acme:glm47@a:b@c", Selector("acme:glm47@a:b@c", "glm47", "acme", "a:b@c")),
        ("pkg.mod.run", Selector("pkg.mod.run", "pkg.mod.run", dotted=True)),
        ("pkg.mod.run@one", Selector("pkg.mod.run@one", "pkg.mod.run", None, "one", dotted=True)),
    ],
)
def test_revision_then_distribution_then_path(text: str, expected: Selector) -> None:
    assert Selector.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' names no plugin\n  write a name, distribution:name, or a dotted path"),
        ("acme:", "'acme:' names no plugin\n  write a name, distribution:name, or a dotted path"),
        ("qwen3@", "the revision after '@' in 'qwen3@' is empty\n  write name@revision, or name alone"),
        (
            "Loose-Tool-Call",
            "'Loose-Tool-Call' is no plugin name: those have only a-z, 0-9 and _\n  did you mean loose_tool_call?",
        ),
        (
            ":qwen3",
            "'' in ':qwen3' is no distribution name\n  write distribution:name, as list shows them",
        ),
        (
            "./agent.py",
            "'./agent.py' is neither a plugin name nor a dotted path\n"
            "  write a path such as my_package.my_module.my_function",
        ),
    ],
)
def test_malformed_selector_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Selector.parse(text)
    assert caught.value.message == message
