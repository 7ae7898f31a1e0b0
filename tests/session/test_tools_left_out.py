"""A request that leaves out its history's tools is rendered as that was, also where a suffix depends on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.golden import installed_family, real_tokenizer
from helpers.histories import TOOLS
from miles_core.session.commit import commit_turn
from miles_core.session.policy import LinearPolicy, TreePolicy
from miles_core.session.reply import read_reply
from miles_core.session.turn import Session, TurnRules, prepare_turn
from miles_matchers.strict import message_matches

THINKING_OFF = {"thinking": False}


@pytest.mark.parametrize("tools", [None, [], "left out"])
@pytest.mark.parametrize("tree", [False, True])
def test_the_suffix_is_rendered_with_the_tools_of_the_history(tools: Any, tree: bool) -> None:
    family = installed_family("deepseekv4").bind(real_tokenizer("deepseekv4"), "recipe")
    rules = TurnRules(family=family, matches=message_matches, policy=TreePolicy() if tree else LinearPolicy())
    session = Session("s", chat_template_kwargs=THINKING_OFF, metadata={})
    asked: list[Any] = [{"role": "user", "content": "u"}]
    turn = prepare_turn(session, {"messages": asked, "tools": TOOLS[0]}, rules, rid="1")
    ids = family.encode("Fine.<｜end▁of▁sentence｜>")
    meta = {"completion_tokens": len(ids), "output_token_logprobs": [[-0.5, token, None] for token in ids]}
    message = {"role": "assistant", "content": "Fine."}
    reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop", "meta_info": meta}]}).encode()
    generation = read_reply(reply, vocab_size=family.tokenizer.vocab_size, engine="e")
    assert commit_turn(session, turn, generation, rules, started=0, ended=0)
    own = {"role": "assistant", "content": "Mine.", "reasoning_content": "I think."}
    asked += [message, {"role": "user", "content": "v"}, own, {"role": "user", "content": "w"}]
    body = {"messages": asked, **({} if tools == "left out" else {"tools": tools})}
    later = prepare_turn(session, body, rules, rid="2")
    whole = family.encode(family.render(asked, TOOLS[0], THINKING_OFF, True))
    assert later.prompt.tolist() == whole
    assert whole != family.encode(family.render(asked, None, THINKING_OFF, True))[-len(whole) :]
    assert later.position.base is session.forest.last
