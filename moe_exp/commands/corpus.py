"""Commands of `moe-exp data`."""

from __future__ import annotations

import argparse


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
