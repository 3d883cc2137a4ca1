"""Subcommands of `moe-exp`. They only declare arguments and call the library, which does the work, and
import it when they run, so that `moe-exp --help` is fast.
"""
