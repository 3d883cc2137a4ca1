"""Subcommands of `moe-exp`. They only declare arguments and call the library. The library is imported only
when a command runs, so that `moe-exp --help` is fast.
"""
