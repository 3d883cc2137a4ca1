"""What was trained, used: logits of given tokens, losses on held-out text, and text.

layout.py    over which ranks a checkpoint's model is spread here, and the settings that follow
loading.py   the weights of a checkpoint in a model without optimizer
stage.py     one pipeline stage of that model: tokens in, logits out, with a cache or without
score.py     `moe-exp score`: token ids to logits
held_out.py  token files as sequences in which every token but the first of a text is predicted once
evaluate.py  `moe-exp eval`: held-out text to loss, perplexity and bits per byte
expert_usage.py  which experts take the tokens of which source
eval_report.py   what `moe-exp eval` found, as tables and as JSON
sampling.py  which token comes next
text.py      prompts to tokens, and tokens to text while they come
generate.py  `moe-exp generate`: prompts to text
"""
