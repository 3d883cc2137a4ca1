"""Short runs of many layouts, measured: `moe-exp sweep`."""
