#!/usr/bin/env python3
"""Downloads a dataset from the Hugging Face Hub, converts it to JSONL and shuffles it into shards. Same as
`moe-exp data prepare`.

    python moe_exp/scripts/download_prepare_hf_data.py --list
    python moe_exp/scripts/download_prepare_hf_data.py fineweb_edu_10bt --dry-run
    # 29 GB to download, 130 GB of disk space, 15 core-minutes
    python moe_exp/scripts/download_prepare_hf_data.py fineweb_edu_10bt
    python moe_exp/scripts/download_prepare_hf_data.py dclm_baseline_1.0 \\
        --executor slurm --partition cpu --tasks 1000
    # requires no network; takes seconds
    python moe_exp/scripts/download_prepare_hf_data.py python_stdlib

Creates data/NAME_raw, data/NAME and data/NAME_shuffled. Repeat the command to resume. Next step:
merge_jsonl_files.py.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("moe_exp") is None:  # run from a checkout without installation
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_exp.commands.data import main

if __name__ == "__main__":
    sys.exit(main("prepare", prog=Path(__file__).name))
