"""`python -m miles_core` is `miles-plugins`."""

from __future__ import annotations

from miles_core.cli import main

if __name__ == "__main__":
    main(prog_name="miles-plugins")
