"""Run the benchmarks and write RESULTS.md and results.json beside this file."""

import contextlib
import pathlib
import sys

from jaxroll.bench import main

if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    with contextlib.suppress(ValueError):
        here = here.relative_to(pathlib.Path.cwd())
    sys.exit(main([*sys.argv[1:], "--out", str(here)]))
