"""Uses a trained model: logits of given tokens, losses on held-out text, generated text."""
