"""A rank of a run, in a working directory of its own: `unlike.py FOLDER FLAGS`, with `{rank}` for its number."""

import os
import sys

from unified_trainer.__main__ import main

rank = os.environ["RANK"]
os.chdir(f"{sys.argv[1]}/{rank}")
sys.exit(main([flag.replace("{rank}", rank) for flag in sys.argv[2:]]))
