"""`moe-exp ckpt`: info, verify (soundness), diff, reshape (with layouts), prune, shrink; tables prints."""
