"""Uses a trained model: computes logits for given tokens, evaluates held-out text and generates text."""
