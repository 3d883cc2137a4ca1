"""Studies of several runs with one result table: sweep, comparison, ladder, muP."""
