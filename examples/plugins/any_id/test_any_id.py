"""The conformance kit, and that ids do not count."""

import copy
from typing import Any

from acme_any_id import same_but_for_ids

from miles_core.testing import conforms

CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_it_keeps_the_contract() -> None:
    conforms("matcher", "any_id")


def test_ids_do_not_count_and_arguments_do() -> None:
    stored: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    renamed = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "mine"}]}
    assert same_but_for_ids(stored, renamed)
    other = copy.deepcopy(stored)
    other["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    assert not same_but_for_ids(stored, other)
