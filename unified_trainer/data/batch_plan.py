"""How the samples of a training step divide into updates, ranks and micro-batches."""

from dataclasses import dataclass

from unified_trainer.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of prompts and samples of a training step, of an update and of a micro-batch."""

    prompts: int  # prompts of one training step, over all ranks
    num_samples: int  # samples of each prompt
    prompts_per_update: int  # prompts of one optimizer update
    micro_batch: int  # samples of one backward pass
    keys: tuple[str, str, str, str]  # the settings that these four come from, for messages
    by_failures: bool = False  # prompts are drawn in proportion to failures + 1, instead of epoch by epoch

    @classmethod
    def one_update(cls, batch_size: int, micro_batch: int) -> "BatchPlan":
        """Plan a step of one update in which every sample has its own prompt."""
        keys = ("algorithm.batch_size", "1", "algorithm.batch_size", "algorithm.micro_batch")
        return cls(batch_size, 1, batch_size, micro_batch, keys)

    def table(self, ranks: int) -> dict[str, int]:
        """Return every count of the step; raise UserError, with the numbers, when one does not divide another."""
        counts = (self.prompts, self.num_samples, self.prompts_per_update, self.micro_batch)
        for key, count in zip(self.keys, counts, strict=True):
            if count < 1:
                raise UserError(f"{key} must be at least 1, not {count}")
        prompts, num_samples, prompts_per_update, micro_batch = self.keys
        self._divide(self.prompts, prompts, self.prompts_per_update, prompts_per_update)
        samples = prompts_per_update if num_samples == "1" else f"{prompts_per_update} x {num_samples}"
        per_update = self._divide(self.prompts_per_update * self.num_samples, samples, ranks, "the number of ranks")
        per_rank = samples if ranks == 1 else f"{samples} / ranks"
        accumulation = self._divide(per_update, per_rank, self.micro_batch, micro_batch)
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
        """Return the positions in the step's batch (prompt-major) that this rank holds, update by update."""
        per_update = self.prompts_per_update * self.num_samples
        share = per_update // ranks
        starts = range(rank * share, self.prompts * self.num_samples, per_update)
        return [position for start in starts for position in range(start, start + share)]

    @staticmethod
    def _divide(total: int, total_key: str, by: int, key: str) -> int:
        if total % by:
            raise UserError(f"{total_key} ({total}) must be divisible by {key} ({by})")
        return total // by
