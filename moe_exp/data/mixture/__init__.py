"""A mixture of sources, from a file of settings to weighted token files and a datasheet."""
