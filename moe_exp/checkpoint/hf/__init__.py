"""Hugging Face folders <-> checkpoints of this package.

families.py      tables of architectures: fields of config.json, tensors, what they can express
fields.py        rules that map fields of config.json to settings and back
config_json.py   a whole config.json <-> Config
tensor_rules.py  rules that map tensors to tensors, expanded for one model
choice.py        chooses the architecture for a Config
model_folder.py  reads and writes a folder of safetensors files
companions.py    files beside the weights: tokenizer, generation settings, model card
importing.py     from_hf: Hugging Face -> checkpoint
exporting.py     to_hf: checkpoint -> Hugging Face
"""
