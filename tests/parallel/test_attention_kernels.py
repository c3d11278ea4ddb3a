"""Which kernels of unmasked attention a run tries, and in which order."""

from contextlib import nullcontext

import pytest
import torch
from helpers import run
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from unified_trainer.__main__ import main
from unified_trainer.basics.errors import UserError
from unified_trainer.parallel import device as device_module
from unified_trainer.parallel.device import attention_order, use_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Operations(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _torchs_own_order_again():
    yield
    use_attention("auto", CPU)


@pytest.mark.parametrize(("choice", "flash"), [("math", False), ("flash", True), ("auto", True)])
def test_the_chosen_kernel_runs(choice, flash):
    query = torch.randn(1, 2, 8, 16)
    use_attention("auto" if choice == "math" else "math", CPU)  # an earlier choice is gone
    use_attention(choice, CPU)
    with Operations() as ran:
        found = scaled_dot_product_attention(query, query, query)
    assert (FLASH in ran.names) == flash
    exact = (query @ query.mT / 4).softmax(-1) @ query
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("choice", "order"),
    [
        ("auto", ""),
        ("cudnn", "cudnn flash efficient math"),
        ("flash", "flash cudnn efficient math"),
        ("efficient", "efficient cudnn flash math"),
        ("math", "math"),
        ("flash_3", "flash_3"),
    ],
)
def test_order_on_cuda(monkeypatch, choice, order):
    """The other kernels follow the chosen one, which does not support every call; `math` allows no other."""
    monkeypatch.setattr(device_module, "_check_other", lambda choice: None)
    assert attention_order(choice, CUDA) == order.split()


@pytest.mark.parametrize(
    ("choice", "taken", "capability", "warns"),
    [
        ("auto", "cudnn", 9, False),
        ("auto", "flash", 9, True),
        ("cudnn", "flash", 10, True),
        ("auto", "flash", 8, False),
        ("flash", "flash", 9, False),
    ],
)
def test_the_kernel_that_torch_takes_is_named(monkeypatch, choice, taken, capability, warns):
    """With a cuDNN up to 9.15 torch takes FlashAttention 2 on Hopper and Blackwell, where cuDNN's kernel is faster."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **how: empty(*shape, **how))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *inputs: device_module.ATTENTION[taken].value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    words, warning = device_module.attention_in_words(choice, CUDA)
    assert words.startswith(f"{taken} (order: ") and bool(warning) == warns
    if warns:
        assert "computed by flash" in warning and "newer nvidia-cudnn" in warning


def test_the_kernel_of_a_cpu_is_named():
    use_attention("math", CPU)
    assert device_module.attention_in_words("math", CPU) == ("math (order: math)", "")
    use_attention("auto", CPU)
    assert device_module.attention_in_words("auto", CPU) == ("flash (order: torch's own)", "")


@pytest.mark.parametrize("choice", ["flash", "math"])
def test_torch_does_not_set_its_own_order_later(monkeypatch, choice):
    """It does so when it first chooses a kernel on CUDA, where an H200 then ignored the order that a run had set."""
    made, empty, done = [], torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *shape, device, dtype: made.append(device) or empty(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *inputs: done.append("torch"))
    monkeypatch.setattr(device_module, "sdpa_kernel", lambda order, set_priority: done.append(order) or nullcontext())
    use_attention(choice, CUDA)
    assert made == [CUDA] and done == [
        "torch",
        [device_module.ATTENTION[name] for name in attention_order(choice, CUDA)],
    ]


@pytest.mark.parametrize(
    ("choice", "device"), [("cudnn", "cpu"), ("efficient", "cpu"), ("flash", "mps"), ("sage", "cpu")]
)
def test_a_kernel_that_the_device_lacks(choice, device):
    with pytest.raises(UserError, match=f"^parallel.attention {choice} does not run on {device}: leave it at auto$"):
        attention_order(choice, torch.device(device))


def test_a_run_refuses_it_before_it_writes_anything(run_folder, capsys):
    assert main(["--method", "finetune", "--output", str(run_folder), "--parallel.attention", "cudnn"]) == 2
    assert "parallel.attention cudnn does not run on cpu" in capsys.readouterr().err
    assert not run_folder.exists()


@pytest.mark.slow
def test_a_run_says_its_kernels(run_folder, capsys):
    run("finetune", run_folder, "--parallel.attention", "math")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert " attention math " in said
