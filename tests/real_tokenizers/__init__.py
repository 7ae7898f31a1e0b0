"""The families' tokenizers with their real ids, made from packages of the `dev` extra and kept in `.cache/tokenizers`.

`make test` makes them before the tests (`PYTHONPATH=tests python -m real_tokenizers`); a test that finds one missing
makes it. A folder is a checkpoint without weights: `tokenizer.json` and `tokenizer_config.json`.
"""

from real_tokenizers.cache import checkpoint
from real_tokenizers.sources import NAMES

__all__ = ["NAMES", "checkpoint"]
