"""Hugging Face folders <-> checkpoints of this package.

families.py      tables of architectures: fields of config.json, tensors, what they can express
fields.py        rules that map fields of config.json to settings and back
config_json.py   a whole config.json <-> Config
rope.py          the rotary embedding in config.json
tensor_rules.py  rules that map tensors to tensors
choice.py        chooses the architecture for a Config
plan.py          the rules expanded for one model: every tensor on both sides
model_folder.py  reads a folder of safetensors files
shard_writer.py  writes one
companions.py    files beside the weights: tokenizer, generation settings, model card
importing.py     from_hf: Hugging Face -> checkpoint
exporting.py     to_hf: checkpoint -> Hugging Face
"""
