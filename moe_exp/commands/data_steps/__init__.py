"""The steps of `moe-exp data`."""
