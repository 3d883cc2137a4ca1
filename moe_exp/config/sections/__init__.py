"""Settings by section, with derived values and rules across settings. Does not import torch."""
