"""A warm process that forks the product, so that a run starts in a second: `python warm.py PIPELINE_FOLDER`.

One JSON line in, one out: {"start": flags, "ranks": n, "port": p, "log": file} gives {"pids": [...]}, and
{"wait": pids} gives {"codes": [...]}, each an exit code or minus a signal.
"""

import functools
import gc
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch

from unified_trainer.__main__ import main
from unified_trainer.models import diffusers_codec
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.wan.codec import WanCodec
from unified_trainer.rewards import hpsv3
from unified_trainer.tools.report import after_training  # noqa: F401  (all that a training imports)


def warm(folder: str) -> None:
    """Load what no run changes, once: the text encoder, the VAE and the scorer. The runs then find it loaded."""
    torch.set_num_threads(1)
    logging.disable(logging.DEBUG)  # as tests/conftest.py does
    diffusers_codec.load_strictly = functools.cache(diffusers_codec.load_strictly)
    hpsv3.HPSv3.load = functools.cache(hpsv3.HPSv3.load)
    one = WanCodec.load(Path(folder), torch.device("cpu"), EncoderConfig())
    one.decode(one.encode(torch.zeros(1, 3, 1, 64, 64)))
    one.encode_text(["warm up"])
    hpsv3.HPSv3.load(hpsv3.EMBEDDED, torch.device("cpu"), torch.float32)
    gc.freeze()  # a run would look at all of this again and again, and copy its pages


def fork(flags: list[str], rank: int, ranks: int, port: int, log: str) -> int:
    """The process id of a rank that runs the product and leaves without cleaning up."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        if ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in place.items()}
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = main(flags)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  (a rank that fails says so in its log)
        traceback.print_exc()
    finally:
        os._exit(code)


def answer(asked: dict) -> dict:
    if "wait" in asked:
        return {"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in asked["wait"]]}
    ranks = range(asked["ranks"])
    return {"pids": [fork(asked["start"], rank, len(ranks), asked["port"], asked["log"]) for rank in ranks]}


if __name__ == "__main__":
    warm(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
