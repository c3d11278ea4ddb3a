"""Pipelines whose text encoders read the prompt together with the condition image, as those of editing models do."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.requests import Request
from unified_trainer.basics.types import Condition
from unified_trainer.models.base import Prompt, Shape
from unified_trainer.models.pipeline.codec import PipelineCodec, text_shapes
from unified_trainer.models.prompt_tensors import stack
from unified_trainer.parallel.mesh import Mesh


class JointCodec(PipelineCodec):
    """A `PipelineCodec` that encodes each prompt with the image of its sample when both are drawn."""

    def encode_requests(self, requests: Sequence[Request], latent_shape: Shape) -> Condition:
        """Return the conditions of requests; the tensors of the last ones are kept in memory."""
        facts = self._known.of_shape(latent_shape)
        if any(len(request.images) != 1 for request in requests):
            raise UserError(f"{self.folder}: {facts.pipeline} needs a condition image for each prompt")
        rows = [
            self._images.get((request.identity, *latent_shape), partial(self._together, request, latent_shape))
            for request in requests
        ]
        text = self._text_condition(stack(rows, text_shapes(facts)))
        if not facts.arguments.images:
            return text
        return text.updated(self.encode_images([request.images for request in requests], latent_shape))

    def _together(self, request: Request, latent_shape: Shape) -> dict[str, Tensor]:
        facts = self._known.of_shape(latent_shape)
        with self._calling(self._text_parts()) as pipeline:
            return self._row(pipeline, facts, request.text, request.images[0].picture(*facts.size[1:]))

    def prompts(self, prompts: Sequence[str]) -> list[Prompt]:
        raise UserError(
            f"{self.folder}: {self._facts.pipeline} encodes a prompt together with its image, so that prompts alone "
            "cannot be encoded or stored"
        )

    def encode_ahead(self, prompts: Sequence[str], mesh: Mesh) -> str:
        return "text encoder: each prompt is encoded with its image, when it is drawn"
