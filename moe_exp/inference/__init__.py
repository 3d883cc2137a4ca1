"""Uses a trained model: logits of given tokens, losses on held-out text, generated text.

layout.py        spreads a checkpoint's model over ranks: sizes and settings
loading.py       loads weights into a model without optimizer
stage.py         one pipeline stage: tokens in, logits out, with or without a cache
jobs.py          starts ranks: this process, or those of torchrun
score.py         `moe-exp score`: token ids to logits
held_out.py      token files as sequences that predict every token but a text's first once
evaluate.py      `moe-exp eval`: held-out text to loss, perplexity and bits per byte
expert_usage.py  which experts take the tokens of which source
eval_report.py   results of `moe-exp eval` as tables and JSON
sampling.py      chooses the next token
text.py          prompts to tokens, and a stream of tokens to text
generate.py      `moe-exp generate`: prompts to text
model.py         `moe_exp.load_model`: a model in this process
"""
