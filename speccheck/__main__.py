"""`python -m speccheck` is the `speccheck` command."""

from speccheck.cli import main

if __name__ == "__main__":
    main()
