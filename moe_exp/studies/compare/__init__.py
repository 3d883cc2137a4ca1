"""Models trained one after another on the same budget, and a table of which does better."""
