"""Sources of documents, such as Hub datasets, and their download."""
