"""`python -m moe_exp` is `moe-exp`."""

import sys

from moe_exp.cli import main

if __name__ == "__main__":
    sys.exit(main())
