"""Tokenizes JSONL files into Megatron's .bin and .idx files. The flags are those of Megatron's
tools/preprocess_data.py. This command

    python moe_exp/scripts/preprocess_data.py --input X.jsonl \
        --output-prefix data/processed/llama3_fineweb_train \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH --append-eod --workers 128

writes data/processed/llama3_fineweb_train_text_document.bin and .idx, and prints the setting TRAIN_DATA=...
that trains on these files. One core processes about 50 MB of text per second with gigatoken (pip install
gigatoken), and 2 MB/s without it. --dry-run estimates tokens, disk space and time from a sample. Repeat
the command to resume. `moe-exp data tokenize` does the same.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("moe_exp") is None:  # run from a checkout without installation
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_exp.commands.data import main

if __name__ == "__main__":
    sys.exit(main("tokenize", prog="preprocess_data.py"))
