"""SGLang as released, on the CPU: installed by `make test` into `.cache/sglang`, served to tests by our own launcher.

SGLang pins torch, transformers and tokenizers, and so has an environment of its own. What has no CPU build (`triton`,
`sgl_kernel`, `torchvision`) is replaced by `stand_ins`: nothing that computes a token comes from there but one
bookkeeping operation of the scheduler.
"""

from real_sglang.environment import VERSION, python, reason_to_skip

__all__ = ["VERSION", "python", "reason_to_skip"]
