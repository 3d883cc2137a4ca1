"""Document sources, such as Hub datasets, and the code that downloads from them."""
