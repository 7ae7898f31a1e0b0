"""Install SGLang for the tests, or say why not: `PYTHONPATH=tests python -m real_sglang`."""

from __future__ import annotations

import sys
import time

from real_sglang.environment import VERSION, InstallError, forget_others, python, reason_to_skip


def main() -> int:
    """Exit 1 if it cannot be installed where it should be."""
    if (reason := reason_to_skip()) is not None:
        print(f"tests with the real SGLang are skipped: {reason}")
        return 0
    began = time.monotonic()
    try:
        path = python()
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    forget_others()
    print(f"SGLang {VERSION} for the CPU in {path.parents[1]} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
