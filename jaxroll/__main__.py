"""`python -m jaxroll` is the command line."""

from jaxroll.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
