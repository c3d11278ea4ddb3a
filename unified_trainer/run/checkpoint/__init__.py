"""Checkpoints: RUN/checkpoints/step_N holds a folder per kind of state of each role, and a manifest.

dcp.py        How is a checkpoint written and read? DCP shards in safetensors, atomically.
manifest.py   Is a checkpoint complete, and which one does RUN[@step][:ema] name?
manager.py    When is a checkpoint written, and which ones are kept?
init_from.py  How does another run start from its weights?
run_lock.py   Which process may write into a run directory?
"""
