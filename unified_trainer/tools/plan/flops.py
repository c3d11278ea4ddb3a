"""FLOPs and memory traffic: of a pass of a network, and of HPSv3.

They are counted as `unified_trainer.parallel.meter` counts them: a product with a matrix of p weights takes 2 p FLOPs a
row. Elementwise work has no FLOPs; it has traffic, the bytes that it reads and writes, which no product hides.
"""

from dataclasses import dataclass, fields

from unified_trainer.models.pass_flops import PassCount
from unified_trainer.tools.plan.network_size import Matrix, NetworkSize

# Bytes of elementwise work in a block's forward pass in bf16, for each token: a factor of the width and one of the
# feed-forward width; and the traffic of a backward pass over that of its forward pass. Eager: counted operation by
# operation (`tests/tools/plan/test_flops.py`) in a block of Wan. Fused: computed, as every norm, rotary embedding, gate
# and activation reads its inputs and writes its result once; the backward pass as kernels of Inductor move bytes
# (docs/performance.md).
EAGER, FUSED = (353, 4, 2.0), (42, 4, 2.6)
NO_MATRIX = Matrix(weights=1, outputs=0, adapted=0)


@dataclass(frozen=True)
class PassFLOPs:
    """The FLOPs of one pass over one sample."""

    forward: float
    backward: float  # of a pass with gradient; without `recompute`
    recompute: float  # of activations that the backward pass computes again
    attention: float  # part of `forward` in products of two activations
    flash: float  # the attention scores that a fused kernel computes again in its backward pass; no work of the model
    traffic: float = 0.0  # bytes of elementwise work in the forward pass
    traffic_back: float = 0.0  # and in the backward pass, without recomputation

    def times(self, samples: int) -> "PassFLOPs":
        """Return the cost of a pass over several samples."""
        return PassFLOPs(**{f.name: samples * vars(self)[f.name] for f in fields(self)})

    @property
    def trained(self) -> float:
        """FLOPs of the model in a pass with gradient, from which the MFU is computed: without any recomputation."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """FLOPs that the device executes in a pass with gradient."""
        return self.trained + self.recompute + self.flash


def pass_flops(
    size: NetworkSize,
    passed: PassCount,
    *,
    rank: int = 0,
    repeated: float = 0.0,
    to_features: bool = False,
    fused: bool = False,
) -> PassFLOPs:
    """Return the FLOPs of one pass over one sample, of its forward pass `passed` without an adapter.

    With `rank` an adapter of that rank is trained, and the matrices are not: that halves their backward pass.
    `repeated` is the share of the blocks that the backward pass computes again as a whole; selective recomputation
    repeats only the second factors of adapters, which are not counted. A pass to the features runs the blocks up to the
    middle one, and its backward pass begins there. `fused` is for compiled blocks.
    """
    layers = size.layers_to_features if to_features else size.layers
    forward = backward = blocks = attention = ffn = 0.0
    for part in passed.parts:
        if layers <= part.block < size.layers:
            continue
        matrix = size.matrices.get(part.module, NO_MATRIX)
        rows = part.products / (2 * matrix.weights)
        trained = part.attention + 2 * rows * matrix.adapted * rank
        forward += part.products + trained
        attention += part.attention
        if part.block < layers or not to_features:
            backward += (1 if rank else 2) * part.products + 2 * trained
        if 0 <= part.block < layers:
            blocks += part.products + trained
            ffn = max(ffn, matrix.outputs if rows >= passed.tokens else 0)
    gates = 2.0 * layers * size.gates * passed.tokens * size.width**2
    of_width, of_ffn, back = FUSED if fused else EAGER
    traffic = layers * passed.elements * (of_width + of_ffn * ffn / size.width)
    return PassFLOPs(
        forward=forward + gates,
        backward=backward + 2 * gates,
        recompute=repeated * (blocks + gates),
        attention=attention,
        flash=0.5 * attention,
        traffic=traffic,
        traffic_back=back * traffic,
    )


def score_flops() -> float:
    """Return the FLOPs of HPSv3 for one frame, which is resized to 256 tokens of 4 patches each.

    Its text, instruction and prompt, is taken to have 350 tokens. Sizes are those of Qwen2-VL-7B.
    """
    language, vision = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 675e6
    return 2 * (language * (256 + 350) + vision * 4 * 256)
