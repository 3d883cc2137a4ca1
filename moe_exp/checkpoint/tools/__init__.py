"""Commands of `moe-exp ckpt`: info, diff, reshape, average, prune, shrink."""
