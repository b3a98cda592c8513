"""Benchmarks side by side with the peers: `jaxroll bench`, or `python -m jaxroll.bench`.

Every row times jaxroll and what one would use instead in turn, in one process, and gives the
ratios with their spread. Peers that are not installed are left out (`pip install jaxroll[bench]`).
"""

from jaxroll.bench.suite import SECTIONS, main

__all__ = ["SECTIONS", "main"]
