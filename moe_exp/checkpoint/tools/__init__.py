"""`moe-exp ckpt`: info, verify (soundness), diff, reshape, average, prune, shrink."""
