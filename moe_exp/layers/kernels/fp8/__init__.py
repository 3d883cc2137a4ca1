"""Matrix products of the experts in FP8: e4m3 with a scale per block of 128, as in DeepSeek-V3."""
