"""`python -m jaxroll.bench` is `jaxroll bench`."""

import sys

from jaxroll.bench.suite import main

sys.exit(main())
