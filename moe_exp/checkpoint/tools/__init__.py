"""The work of `moe-exp ckpt`: info, verify (soundness.py), diff, reshape with layouts.py, prune and shrink;
tables.py prints.
"""
