"""The command line; `main` runs it."""

from speccheck.cli.main import cli, main

__all__ = ["cli", "main"]
