"""Subcommands of `moe-exp`: arguments here, work in the library."""
