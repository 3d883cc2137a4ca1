"""Merges all shards in a folder, except the validation file, into one JSONL file for preprocess_data.py.

    python moe_exp/scripts/merge_jsonl_files.py --input_dir data/fineweb_edu_10bt_shuffled \
        --valid_file_name fineweb_edu_10bt.val --output_file_name fineweb_edu_10bt_shuffled_merged
    # writes data/fineweb_edu_10bt_shuffled_merged.jsonl and .manifest.json; 1.5 s of CPU time per GB

`--dry-run` prints the estimated resources; `--help` lists all options. Same as `moe-exp data merge`.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("moe_exp") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_exp.commands.data import main

if __name__ == "__main__":
    sys.exit(main("merge", prog="merge_jsonl_files.py"))
