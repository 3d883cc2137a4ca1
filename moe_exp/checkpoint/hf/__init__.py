"""Hugging Face folders <-> checkpoints of this package.

families.py      the architectures, as tables: fields of config.json, tensors, what they can express
fields.py        rules between fields of config.json and settings
tensor_rules.py  rules between tensors of the two sides
choice.py        which architecture a model of ours is
plan.py          the rules, written out for one model: every tensor on both sides
model_folder.py  reads a folder of safetensors files
shard_writer.py  writes one
target.py        a folder that appears whole or not at all
companions.py    what lies beside the weights: tokenizer, generation settings, model card
importing.py     from_hf: Hugging Face -> checkpoint
exporting.py     to_hf: checkpoint -> Hugging Face
"""
