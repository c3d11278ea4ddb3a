"""Where torchao is installed, diffusers and transformers import it with any network, which takes them seconds.

They leave it out in a process that imports this package before it. `models/quantize.py` gives it back to diffusers.
"""

import sys

ASKED = {"diffusers.quantizers": "diffusers.utils", "transformers.quantizers": "transformers.utils"}  # by what, of whom


class _WithoutTorchao:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name in ASKED and "torchao" not in sys.modules:
            vars(sys.modules[ASKED[name]])["is_torchao_available"] = lambda *_: False


def leave_out_torchao() -> None:
    """Act before each import of a module that asks for it, in this process."""
    sys.meta_path.insert(0, _WithoutTorchao)
