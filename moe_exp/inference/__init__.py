"""What was trained, used: logits of given tokens, and text.

layout.py    over which ranks a checkpoint's model is spread here, and the settings that follow
loading.py   the weights of a checkpoint in a model without optimizer
stage.py     one pipeline stage of that model: tokens in, logits out, with a cache or without
score.py     `moe-exp score`: token ids to logits
sampling.py  which token comes next
text.py      prompts to tokens, and tokens to text while they come
generate.py  `moe-exp generate`: prompts to text
"""
