"""Subcommands of `moe-exp`. They only declare arguments and call the library, which does the work."""
