"""Qwen-Image's text encoder (Qwen2.5-VL) and VAE as a codec."""

import re
from typing import Any

from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from unified_trainer.models.diffusers_codec import DiffusersCodec
from unified_trainer.models.qwen_image.configs import ImageVAEConfig, latent_shape

# The turns in which the model reads a prompt, as QwenImagePipeline writes them.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class QwenImageCodec(DiffusersCodec):
    """Qwen2.5-VL, of which the last hidden states after the template's first tokens are taken, and the VAE."""

    name = "qwen-image"
    text_classes = (Qwen2_5_VLForConditionalGeneration,)
    vae_class = AutoencoderKLQwenImage
    vae_schema = ImageVAEConfig
    longest_text = 512  # what QwenImagePipeline takes
    template_tokens = 34  # of TEMPLATE, before the prompt
    masked = True

    def text_weight(self, key: str) -> str:
        """Published files have the names of earlier versions of transformers, which reads both."""
        if key.startswith("visual."):
            return f"model.{key}"
        return re.sub(r"^model\.(?!language_model\.|visual\.)", "model.language_model.", key)

    @classmethod
    def text_layers(cls, encoder: Any) -> nn.Module:
        """Return the language model: texts pass by the vision tower and the vocabulary's head."""
        return encoder.model.language_model

    def embed(self, encoder: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
        longest = self.template_tokens + self.text_tokens
        tokens = tokenizer([TEMPLATE.format(prompt)], max_length=longest, truncation=True, return_tensors="pt")
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        return encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state[0, self.template_tokens :]

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return latent_shape(self.folder, frames, height, width)
