"""The conformance kit, and the default system prompt."""

from acme_qwen25 import FAMILY

from miles_core.testing import conforms, tokenizer_for


def test_it_keeps_the_contract() -> None:
    conforms("family", "qwen25")


def test_a_system_prompt_is_written_where_none_is_given() -> None:
    bound = FAMILY.bind(tokenizer_for(FAMILY))
    assert bound.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
