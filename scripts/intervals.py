"""Intervals of a mean over training seeds and prompts, both of which are drawn: other seeds and other prompts would do.

A table y[i, j] holds the value of seed i on prompt j, a mean over the samples of both. With y = mu + a_i + b_j + e_ij,
the variance of the mean of n seeds and m prompts is var(a) / n + var(b) / m + var(e) / (n m). Three mean squares have
the expectations

    S = m var(row means) : m var(a) + var(e)      P = n var(column means) : n var(b) + var(e)      E : var(e)

so (S + P - E) / (n m) is that variance without bias; it is the sum over both clusterings less their intersection
(Cameron, Gelbach, Miller, J. Bus. Econ. Stat. 2011). Where neither seeds nor prompts have an effect, it can come out
far too small by chance; P below E is therefore taken as E. The degrees of freedom of Student's law are Satterthwaite's
(Biometrics 1946). A bootstrap of seeds and prompts gives the same variance in the limit, and too short an interval for
four seeds.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from unified_trainer.numerics.bootstrap import student_quantile


@dataclass(frozen=True)
class Estimate:
    """A mean with the ends of its interval, which are NaN where there is one seed."""

    mean: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether zero may be the true value: also where there is no interval."""
        return not (self.low > 0 or self.high < 0)


def of_table(table: Float[Tensor, "seeds prompts"], confidence: float = 0.95) -> Estimate:
    """Return the mean over seeds and prompts with its interval; a single column has an interval over seeds alone."""
    table = table.double()
    n, m = table.shape
    mean = table.mean()
    if n < 2:
        return Estimate(float(mean), float("nan"), float("nan"))
    rows, columns = table.mean(1), table.mean(0)
    parts = [(m * rows.var(), n - 1)]
    if m > 1:
        rest = (table - rows[:, None] - columns + mean).square().sum() / ((n - 1) * (m - 1))
        of_prompts = n * columns.var()
        if of_prompts > rest:
            parts += [(of_prompts, m - 1), (-rest, (n - 1) * (m - 1))]
    square = sum(part for part, _ in parts) / (n * m)
    spread = sum((part / (n * m)) ** 2 / freedom for part, freedom in parts)
    freedom = max(1, int(square**2 / spread)) if spread > 0 else 1
    half = student_quantile(confidence, freedom) * float(square) ** 0.5
    return Estimate(float(mean), float(mean) - half, float(mean) + half)
