"""Uses a trained model: logits of given tokens, losses on held-out text, generated text.

jobs.py          the ranks: this process, or those of torchrun; sizes and settings of the model on them
stage.py         one pipeline stage: loads weights; tokens in, logits out, with or without a cache
score.py         `moe-exp score`: token ids to logits
held_out.py      token files as sequences that predict every token but a text's first once
evaluate.py      `moe-exp eval`: held-out text to loss, perplexity and bits per byte
eval_report.py   its results: losses, and which experts take the tokens of which source
text.py          prompts to tokens, and a stream of tokens to text
generate.py      `moe-exp generate`: prompts to text
model.py         `moe_exp.load_model`: a model in this process
"""
