"""What the session server costs, as ratios to a floor in the same run. Run by `make bench`.

`python benchmarks/server [PART …] [--short] [--json FILE] [--results FOLDER]`: all parts, or some of table, growth,
workers, waits, many, ages, starts, commands. Prints each figure with its bar and the value of the run before, and exits
with 1 if one is over its bar. A whole run is kept as `.cache/benchmarks/last.json`, with a drawing beside it; any run
is where `--results` names a folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from processes import Bench
from report import heading, keep, lines, previous, write_json
from starts import commands, starts
from turns import ages, growth, many, table, workers
from waits import waits

from real_tokenizers import checkpoint

PARTS = {part.__name__: part for part in (table, growth, workers, waits, many, ages, starts, commands)}
RESULTS = Path(__file__).parents[2] / ".cache" / "benchmarks"


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(prog="benchmarks/server", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--short", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep the run there")
    asked = parser.parse_args()
    unknown = set(asked.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = asked.results or RESULTS
    before, figures = previous(results), []
    for name in asked.parts or PARTS:
        with Bench(checkpoint("qwen3")) as bench:
            for figure in PARTS[name](bench, short=asked.short):
                figures.append(figure)
                print(f"  {figure.name}: {figure.value:.2f} {figure.unit}", file=sys.stderr, flush=True)
    print(heading(figures), *lines(figures, before), sep="\n")
    if asked.json is not None:
        write_json(figures, asked.json)
    if asked.results is not None or not (asked.json or asked.parts or asked.short):
        keep(figures, results)
    return 1 if any(figure.over for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
