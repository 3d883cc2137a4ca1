"""Which node an error comes from, and the list of nodes to exclude."""
