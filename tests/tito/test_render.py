"""Templates that run outside Jinja's sandbox write what they write inside of it."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.tito.render import ChatTemplate

MESSAGE: dict[str, Any] = {
    "role": "user", "content": {"a": [1, {"b": None}]}, "items": "an item", "get": 1, "keys": None, "x-y": 2, "": 3,
    "update": "u", "__class__": "c", "name": "",
}  # fmt: skip

ASKED = (
    "m.role", "m.content.a[1].b", "m['items']", "m.items is string", "m.items() | length", "m.get('role')", "m.keys",
    "m.missing is defined", "m.missing", "m.content.missing is defined", "m['missing'] is defined", "m.name",
    "m['x-y']", "m.content.a.index(1)", "m.role.upper()", "m.__class__ is defined", "(m | items | list)[0]",
    "m.get is callable", "messages[0].role", "m | map(attribute='role') | list | length", "m | attr('role') is defined",
)  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_an_attribute_or_key_is_the_same_in_and_out_of_the_sandbox(asked: str) -> None:
    text = f"{{%- set m = messages[0] -%}}{{{{ {asked} }}}}"
    inside, outside = (
        ChatTemplate(text, source="a test", trusted=trusted).render([MESSAGE], None, {}, add_generation_prompt=False)
        for trusted in (False, True)
    )
    inside, outside = (text.partition(" at 0x")[0] for text in (inside, outside))  # where a bound method is
    assert outside == inside or "__class__" in asked  # which the sandbox denies
