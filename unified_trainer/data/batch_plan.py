"""The arithmetic of a training step's batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """How a training step's samples divide into optimizer updates, ranks and micro-batches."""

    prompts: int  # prompts of one training step, over all ranks
    num_samples: int  # samples of each prompt
    prompts_per_update: int  # prompts of one optimizer update
    micro_batch: int  # samples of one backward pass
    keys: tuple[str, str, str, str]  # the flags these four come from, for messages
    by_failures: bool = False  # prompts are drawn in proportion to failures + 1, instead of epoch by epoch

    @classmethod
    def one_update(cls, batch_size: int, micro_batch: int) -> "BatchPlan":
        """A step of one update, each sample of a prompt of its own."""
        keys = ("algorithm.batch_size", "1", "algorithm.batch_size", "algorithm.micro_batch")
        return cls(batch_size, 1, batch_size, micro_batch, keys)

    def table(self, ranks: int) -> dict[str, int]:
        """Every count of the step; ValueError with the arithmetic when something does not divide."""
        self._divide(self.prompts, self.prompts_per_update, f"{self.keys[0]} % {self.keys[2]}")
        per_update = self._divide(
            self.prompts_per_update * self.num_samples, ranks, f"{self.keys[2]} x {self.keys[1]} % ranks"
        )
        accumulation = self._divide(
            per_update, self.micro_batch, f"({self.keys[2]} x {self.keys[1]} / ranks) % {self.keys[3]}"
        )
        updates = self.prompts // self.prompts_per_update
        return {
            "prompts": self.prompts,
            "samples per prompt": self.num_samples,
            "samples": self.prompts * self.num_samples,
            "ranks": ranks,
            "samples per rank": per_update * updates,
            "optimizer updates": updates,
            "samples per update and rank": per_update,
            "micro-batch": self.micro_batch,
            "accumulation": accumulation,
        }

    def rank_samples(self, rank: int, ranks: int) -> list[int]:
        """Positions in the step's batch (prompt-major) that this rank holds, update by update."""
        per_update = self.prompts_per_update * self.num_samples
        share = per_update // ranks
        starts = range(rank * share, self.prompts * self.num_samples, per_update)
        return [position for start in starts for position in range(start, start + share)]

    @staticmethod
    def _divide(total: int, by: int, what: str) -> int:
        if by < 1 or total < 1 or total % by:
            raise ValueError(f"{what} must be 0: {total} % {by} does not divide")
        return total // by
