"""Models trained one after another under the same budget, and the table that says which is better for it."""
