"""What generate functions find in `input.state`."""

from __future__ import annotations

import pytest

from miles_core.errors import ConfigError
from miles_core.rollout.state import RolloutArgs, RolloutState


def test_registered_flags_become_attributes() -> None:
    args = RolloutArgs()
    args.add({"generate_max_turns": 3})
    assert args.generate_max_turns == 3  # type: ignore[attr-defined]


def test_a_flag_of_ours_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="'max_seq_len', which is one of ours"):
        RolloutArgs().add({"max_seq_len": 3})


def test_a_flag_of_ours_that_was_left_alone_is_none_of_the_plugins() -> None:
    args = RolloutArgs(max_seq_len=5)
    args.add({"max_seq_len": None, "custom_agent_function_path": None})
    assert args.max_seq_len == 5


def test_a_tokenizer_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="--checkpoint"):
        _ = RolloutState(RolloutArgs()).tokenizer
