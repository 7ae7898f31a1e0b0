"""What generate functions find in `input.state`."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.errors import ConfigError
from miles_core.plugins import Registry
from miles_core.rollout.state import RolloutArgs, RolloutState
from miles_core.server.parts import load_family

TINY = str(Path(__file__).parents[2] / "examples" / "tiny" / "model")


def test_registered_flags_become_attributes() -> None:
    args = RolloutArgs()
    args.add({"generate_max_turns": 3})
    assert args.generate_max_turns == 3  # type: ignore[attr-defined]


def test_a_flag_of_ours_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="'max_seq_len', which is one of ours; rename it there"):
        RolloutArgs().add({"max_seq_len": 3})


def test_a_flag_of_ours_that_was_left_alone_is_none_of_the_plugins() -> None:
    args = RolloutArgs(max_seq_len=5)
    args.add({"max_seq_len": None, "custom_agent_function_path": None})
    assert args.max_seq_len == 5


def test_a_tokenizer_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="--checkpoint"):
        _ = RolloutState(RolloutArgs()).tokenizer


@pytest.mark.slow
def test_a_tokenizer_without_a_template_renders_as_the_family_does() -> None:
    """Modules for miles call it themselves; the tiny model's checkpoint has none."""
    family, _ = load_family(Registry.discover(), "qwen3", TINY, None)
    tokenizer = RolloutState(RolloutArgs(hf_checkpoint=TINY), family=family).tokenizer
    prompt = [{"role": "user", "content": "What is 1 + 1?"}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert text == family.render(prompt)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == family.encode(text)
