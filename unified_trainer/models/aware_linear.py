"""Linear layers that compute as they will when they are quantised; `quantize.py` puts them into a network."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class AwareLinear(nn.Linear):
    """A linear layer that rounds its weight and inputs in each pass, with straight-through gradients."""

    round_weight: Callable[[Tensor], Tensor]
    round_inputs: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(x, self.weight)

    def rounded(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product with a weight in place of its own, rounded in the precision of the pass."""
        device = x.device.type  # FLOPs are counted on meta, which has no autocast
        if device != "meta" and torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
            x, weight = x.to(half), weight.to(half)
        x = straight_through(x, self.round_inputs(x.detach()))
        return linear(x, straight_through(weight, self.round_weight(weight.detach())), self.bias)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient going to `x` as if nothing was rounded."""
    return rounded + (x - x.detach()) if x.requires_grad else rounded
