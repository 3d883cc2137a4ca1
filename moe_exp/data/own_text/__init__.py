"""Text that TRAIN_DATA and VALID_DATA name, made into token files."""
