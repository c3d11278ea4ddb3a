"""The ledger of a loss's terms: how strong the gradient of each is, and weights that hold reward against matching."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_trainer.errors import UserError
from unified_trainer.numerics.term_gradients import balanced_factor, gradient_cosines, gradient_norm
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.ranges import NonNegative, PeriodOrZero, Positive, PositiveFraction
from unified_trainer.roles.gradient_products import Pass, gradient_products
from unified_trainer.roles.role import Trainable

MATCHING, REWARD = "matching", ("surrogate", "reward_gradient")  # terms whose gradients the balance compares


@dataclass(frozen=True)
class LedgerConfig:
    """Settings of the ledger, and of the balance that it keeps."""

    every: PeriodOrZero = 0
    """Updates of the student from one measurement of the terms' gradients to the next; each runs every pass of the
    update once more. 0 measures nothing (experimental)."""
    ratio: NonNegative = 0.0
    """Gradient norm of the reward terms (surrogate and reward gradient) over that of matching that a factor on the
    weights of the reward terms holds; 0 leaves the weights as they are (experimental)."""
    rate: PositiveFraction = 0.5
    """Exponent with which a measurement moves the factor: 1 follows the last one, less averages over several."""
    factor_range: tuple[Positive, Positive] = (1e-3, 1e3)
    """Range of the factor."""

    def check(self, key: str, weights: Mapping[str, float]) -> None:
        """Raise UserError for settings that cannot work; `weights` are those of the terms, and `key` is where they
        stand."""
        low, high = self.factor_range
        if low >= high:
            raise UserError(f"{key}.factor_range must rise, not {self.factor_range}")
        if not self.ratio:
            return
        if not self.every:
            raise UserError(f"{key}.ratio needs {key}.every above 0: the factor follows what the ledger measures")
        if not (weights[MATCHING] and any(weights[name] for name in REWARD)):
            raise UserError(
                f"{key}.ratio needs algorithm.matching.weight and a weight of algorithm.surrogate or "
                "algorithm.reward_gradient above 0: it balances the two"
            )


class TermLedger:
    """Measures the gradient of each term on a role, and scales the reward terms to a ratio to matching."""

    def __init__(self, config: LedgerConfig, weights: Mapping[str, float], role: Trainable) -> None:
        """`weights` are those that the terms have once they have begun and risen."""
        self.config, self.nominal, self.role = config, weights, role
        self.factor = 1.0  # of the weights of the reward terms

    def scaled(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the weights of the terms with the factor of the reward terms."""
        return {name: weight * (self.factor if name in REWARD else 1.0) for name, weight in weights.items()}

    def measure(
        self, update: int, weights: Mapping[str, float], passes: Callable[[str], Sequence[Pass]], mesh: Mesh
    ) -> dict[str, float]:
        """Measure the terms with a weight if this update of the student is to be measured; return metrics.

        `passes` returns the passes of one term at weight 1, none for a term without samples in this update. The factor
        is adapted to the weights without their ramps, and only where reward and matching have samples; the metrics are
        of the weights of this update.
        """
        if not self.config.every or update % self.config.every:
            return {}
        found = {name: passes(name) for name, weight in weights.items() if weight}
        found = {name: own for name, own in found.items() if own}
        if not found:
            return {}
        names, products = list(found), gradient_products(self.role, list(found.values()), mesh)
        reward = [name for name in REWARD if weights[name]]
        if self.config.ratio and reward and {MATCHING, *reward} <= found.keys():
            ratio = _ratio(names, products, self.scaled(self.nominal))
            bounds = self.config.factor_range
            self.factor = balanced_factor(self.factor, ratio, self.config.ratio, self.config.rate, bounds)
        scaled = self.scaled(weights)
        metrics = {f"term_norm/{name}": gradient_norm(products, _only(names, (name,), scaled)) for name in names}
        cosines = gradient_cosines(products).tolist()
        for i, one in enumerate(names):
            metrics |= {f"term_cosine/{one}-{names[j]}": cosines[i][j] for j in range(i + 1, len(names))}
        if MATCHING in names and any(name in names for name in REWARD):
            metrics["reward_to_matching_norm"] = _ratio(names, products, scaled)
        return metrics | ({"reward_factor": self.factor} if self.config.ratio else {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the factor, if it is adapted."""
        return {"reward_factor": torch.tensor(self.factor, dtype=torch.float64)} if self.config.ratio else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if self.config.ratio:
            self.factor = float(state["reward_factor"])


def _only(names: Sequence[str], chosen: Sequence[str], weights: Mapping[str, float]) -> Tensor:
    """Return the weights of the chosen terms, 0 for the others, in the order of `names`."""
    return torch.tensor([weights[name] if name in chosen else 0.0 for name in names], dtype=torch.float64)


def _ratio(names: Sequence[str], products: Tensor, weights: Mapping[str, float]) -> float:
    """Return the gradient norm of the reward terms over that of matching; infinity where that is 0."""
    reward, matching = (gradient_norm(products, _only(names, part, weights)) for part in (REWARD, (MATCHING,)))
    return reward / matching if matching else float("inf")
