"""The samples that every checkpoint of an evaluation makes, and their noise."""

from collections.abc import Iterator
from dataclasses import dataclass

from unified_trainer.basics.ranges import MOST
from unified_trainer.basics.requests import Request
from unified_trainer.tools.sample.sample import VIDEOS

NOISE_STEP = MOST  # between the noise of one seed and the next: sample i of seed s has noise number s NOISE_STEP + i


@dataclass(frozen=True)
class Plan:
    """The samples that every checkpoint of an evaluation makes: prompt by prompt, for each seed."""

    prompts: tuple[str, ...]  # with their condition images, where there are some
    samples: int  # of each prompt, for each seed
    seeds: tuple[int, ...]
    batch: int
    videos: int  # samples of each prompt and seed that are written as files
    frechet_stride: int
    i3d: str = ""  # TorchScript file of I3D; empty measures no FVD
    real_clips: str = ""  # folder of videos that the samples are compared with
    prompt_names: bool = False  # whether videos are named PROMPT-INDEX, in a folder of their own, as VBench reads them

    @property
    def size(self) -> int:
        """Samples of one seed."""
        return len(self.prompts) * self.samples

    def parts(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the seed and the numbers of the samples that are generated together."""
        for seed in self.seeds:
            for start in range(0, self.size, self.batch):
                yield seed, list(range(start, min(start + self.batch, self.size)))

    def stem(self, seed: int, prompt: int, sample: int) -> str:
        """Return the name of a sample's video without its suffix; `prompt` is a number."""
        if not self.prompt_names:
            return f"{seed}-{prompt}-{sample}"
        return f"{VIDEOS}/{Request.of(self.prompts)[prompt].text}-{self.seeds.index(seed) * self.samples + sample}"

    def prompts_of(self, numbers: list[int]) -> list[str]:
        """Return the prompt of each of these samples."""
        return [self.prompts[i // self.samples] for i in numbers]


def noise_number(seed: int, sample: int) -> int:
    """Return the seed of a sample's noise, as the commands sample and rollout count them."""
    return seed * NOISE_STEP + sample
