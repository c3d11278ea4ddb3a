"""Frechet distances of a validation: between features of its samples and of real clips."""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from unified_trainer.basics.types import Video
from unified_trainer.numerics.frechet import frechet_distance

FEATURES, REAL = "features/", "real features/"  # before the name of a distance, in the columns of a validation
FRECHET, FVD = "frechet", "fvd"

VideoFeatures = Callable[[Video], Float[Tensor, "b k d"]]  # k rows of each video


class Distances:
    """Features of the samples of a validation and of as many real clips, which its distances compare."""

    def __init__(self, features: Mapping[str, VideoFeatures], real: Callable[[range], Video]) -> None:
        """`features` are by the name of the distance; `real` returns the real clips of some samples."""
        self._features, self._real = features, real
        self._of_real: dict[range, dict[str, Tensor]] = {}

    def columns(self, video: Video, samples: range) -> dict[str, Tensor]:
        """Return the features of samples and of their real clips; those of the clips are computed on first use."""
        if samples not in self._of_real:
            clips = self._real(samples)
            self._of_real[samples] = {f"{REAL}{name}": of(clips) for name, of in self._features.items()}
        return {f"{FEATURES}{name}": of(video) for name, of in self._features.items()} | self._of_real[samples]


def distances(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Frechet distances by name, of the columns of all samples."""
    real = with_prefix(columns, REAL)
    return {
        name: frechet_distance(rows.flatten(0, 1), real[name].flatten(0, 1))
        for name, rows in with_prefix(columns, FEATURES).items()
    }


def with_prefix(columns: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the columns whose names begin with a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): rows for name, rows in columns.items() if name.startswith(prefix)}
