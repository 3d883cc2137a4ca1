"""The corpus tools against their peers: bench_convert.py, bench_shuffle.py and bench_tokenize.py, one after
the other.

    # 500 MB for the shuffle, 300 and 200 MB for the others: about 20 min on 2 cores
    python bench/data/bench_data.py
    python bench/data/bench_data.py convert shuffle  # some of them

Each can be called by itself, with flags of its own. All take CPU seconds of whole processes, user + system,
and peak memory, with the peers in the same run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FLAGS = {"convert": ["--mb", "300"], "shuffle": [], "tokenize": ["--megabytes", "200"]}


def main() -> int:
    """Exit code 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(FLAGS)} (default: all)")
    parts = parser.parse_args().parts or list(FLAGS)
    if unknown := set(parts) - set(FLAGS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(FLAGS)}")
    codes = []
    for part in parts:
        print(f"\n== {part}", flush=True)
        script = Path(__file__).with_name(f"bench_{part}.py")
        codes.append(subprocess.run([sys.executable, str(script), *FLAGS[part]], check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
