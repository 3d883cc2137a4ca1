"""What each node of a job can do, found out in under a minute before training: see node.py for the order of
things.
"""
