"""Text encoder and VAE take memory, on the device or at all, only where they are used; bf16 stays near fp32.

The device "meta" stands for an accelerator: it refuses tensors of the CPU, and what it computes has no values.
"""

import copy
import json
import os

import pytest
import torch
from helpers import CPU, LATENT_SHAPE, WAN, copy_of, rewrite, tiny_codec
from torch import nn

from unified_trainer.basics.errors import UserError
from unified_trainer.data.prompts import training_captions
from unified_trainer.data.tiny_world import TRAINING, draw_clip, render
from unified_trainer.models import frozen_network
from unified_trainer.models.encoders import EncoderConfig
from unified_trainer.models.frozen_network import FrozenNetwork, channels_last
from unified_trainer.models.wan.codec import WanCodec

META = torch.device("meta")


class Tied(nn.Module):
    """Two layers with one weight, a bias and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("small", torch.full((5,), 0.5, dtype=torch.bfloat16), persistent=False)

    def forward(self, x):
        return self.scale * self.second(torch.tanh(self.first(x)))


def devices(network: nn.Module) -> set[str]:
    return {value.device.type for value in (*network.parameters(), *network.buffers())}


@pytest.mark.parametrize("buffer", [1, 300, frozen_network.BUFFER])
def test_an_offloaded_network_is_on_the_device_only_while_it_is_used(monkeypatch, buffer):
    """However many buffers its weights are packed into."""
    monkeypatch.setattr(frozen_network, "BUFFER", buffer)
    original = Tied()
    whole, read = copy.deepcopy(original.state_dict()), []
    frozen = FrozenNetwork(lambda: read.append(1) or original, META, offload=True)
    assert not read
    for _ in range(2):
        with frozen.in_use() as network:
            assert devices(network) == {"meta"} and network.first.weight.data_ptr() == network.second.weight.data_ptr()
            with frozen.in_use():
                assert devices(network) == {"meta"}
            assert devices(network) == {"meta"}
        assert devices(original) == {"cpu"} and original.first.weight is original.second.weight
        assert all(torch.equal(value, whole[key]) for key, value in original.state_dict().items())
        assert original.small.tolist() == [0.5] * 5 and "small" not in original.state_dict()
    assert read == [1]
    with pytest.raises(RuntimeError, match="in use"), frozen.in_use():
        raise RuntimeError("in use")
    assert devices(original) == {"cpu"}


def test_a_network_that_is_not_offloaded_stays_on_the_device():
    frozen = FrozenNetwork(Tied, META, offload=False)
    with frozen.in_use() as network:
        assert devices(network) == {"meta"}
    assert devices(network) == {"meta"}
    frozen.free()
    with frozen.in_use() as again:
        assert again is not network


def test_a_graph_of_an_offloaded_network_outlives_its_use():
    """The backward pass finds the weights that the forward pass had, on their device."""
    frozen = FrozenNetwork(Tied, META, offload=True)
    x = torch.ones(2, 3, device=META, requires_grad=True)
    with frozen.in_use() as network:
        out = network(x)
    with frozen.in_use():
        pass
    out.sum().backward()
    assert x.grad.shape == x.shape and x.grad.device == META


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_frames_and_latents_of_the_cpu_go_to_the_vae_s_device(offload):
    codec = WanCodec.load(WAN, META, EncoderConfig(offload=offload))
    latents = codec.encode(torch.rand(1, 3, 5, 32, 32))
    assert latents.shape == (1, *LATENT_SHAPE)
    made = {
        "encode": latents,
        "normalise": codec.normalise(torch.zeros(1, *LATENT_SHAPE)),
        "decode": codec.decode(torch.zeros(1, *LATENT_SHAPE)),
        "decoder": codec.decoder()(torch.zeros(1, *LATENT_SHAPE)),
    }
    assert {name: value.device.type for name, value in made.items()} == dict.fromkeys(made, "meta")
    assert devices(codec._vae.load()) == {"cpu" if offload else "meta"}


def test_offloading_on_a_cpu_changes_nothing(codec):
    offloaded = WanCodec.load(WAN, CPU, EncoderConfig(offload=True))
    latents = torch.randn(2, *LATENT_SHAPE)
    assert torch.equal(offloaded.decode(latents), codec.decode(latents))
    assert torch.equal(offloaded.encode_text(["red"])["text"], codec.encode_text(["red"])["text"])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow
def test_bf16_stays_near_fp32():
    """Relative errors are 0.7% of embeddings and 1.3% of latents; pixels differ by 0.0009. bf16 rounds by 0.4%."""
    exact, half = tiny_codec(), WanCodec.load(WAN, CPU, EncoderConfig(text_precision="bf16", vae_precision="bf16"))
    random = torch.Generator().manual_seed(0)
    videos = render([draw_clip(subject, random) for subject in TRAINING[:4]])
    text, latents = (
        [one.encode_text(training_captions()[:8])["text"] for one in (half, exact)],
        [one.encode(videos) for one in (half, exact)],
    )
    decoded = [one.decode(latents[1]) for one in (half, exact)]
    chunks = half.decoder()
    streamed = torch.cat([chunks(part) for part in latents[1].split(2, 2)], 2)
    assert {value.dtype for value in (*text, *latents, *decoded, streamed)} == {torch.float32}
    assert 0 < relative(*text) < 0.02 and 0 < relative(*latents) < 0.03
    assert 0 < (decoded[0] - decoded[1]).square().mean().sqrt() < 0.003
    assert torch.equal(streamed, decoded[0])
    assert half.normalise(videos.double()[:, :1].expand(-1, 16, -1, -1, -1)).dtype == torch.float32


def test_a_bf16_vae_decodes_at_57_decibels_or_more():
    """Peak signal to noise of the two decodes of one clip's latents: -20 lg(rms), with pixels in [0, 1]."""
    latents = tiny_codec().encode(render([draw_clip(TRAINING[0], torch.Generator().manual_seed(0))]))
    half = WanCodec.load(WAN, CPU, EncoderConfig(vae_precision="bf16"))
    error = (half.decode(latents) - tiny_codec().decode(latents)).square().mean()
    assert 57 < -10 * float(error.log10()) < 75


def test_slices_are_decoded_one_by_one_and_change_nothing():
    """Three latent frames, so that the VAE's cache in time is used; gradients pass through slices too."""
    sliced, latents = WanCodec.load(WAN, CPU, EncoderConfig(vae_slicing=True)), torch.randn(2, 16, 3, 2, 2)
    seen = []
    sliced._vae.load().decoder.register_forward_pre_hook(lambda _m, inputs: seen.append(len(inputs[0])))
    leaves = [latents.clone().requires_grad_() for _ in range(2)]
    videos = [one.decode(leaf) for one, leaf in zip((sliced, tiny_codec()), leaves, strict=True)]
    assert seen == [1] * 6
    for video in videos:
        video.sum().backward()
    torch.testing.assert_close(videos[0], videos[1], atol=2e-6, rtol=0)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(sliced.encode(videos[1].detach()), tiny_codec().encode(videos[1].detach()))


def test_each_tile_has_its_own_feature_cache_and_one_tile_is_the_whole_frame():
    """The first tile's corner, which no other tile is blended into, is that of a video of this tile alone."""
    tiled, latents = WanCodec.load(WAN, CPU, EncoderConfig(vae_tile=64)), torch.randn(1, 16, 3, 7, 4)
    small, large = latents[:, :, :, :4], latents
    assert torch.equal(tiled.decode(small), tiny_codec().decode(small))
    video, alone = tiled.decode(large), tiny_codec().decode(small)
    assert video.shape == (1, 3, 9, 112, 64)
    torch.testing.assert_close(video[..., :48, :48], alone[..., :48, :48], atol=2e-6, rtol=0)
    with pytest.raises(UserError, match=r"encoders\.vae_tile must be a multiple of 64, or 0, not 80"):
        EncoderConfig(vae_tile=80).check_tile(64)
    with pytest.raises(UserError, match=r"encoders\.vae_tile must be a multiple of 128, or 0, not 192"):
        EncoderConfig(vae_tile=192).check_tile(128)  # of a family with 32 pixels a latent


def test_channels_last_change_values_by_rounding():
    """Encoding, decoding with its gradient, and decoding chunk by chunk; most convolutions get channels last."""
    last = WanCodec.load(WAN, CPU, EncoderConfig(vae_channels_last=True))
    layouts = []
    for layer in last._vae.load().modules():
        if isinstance(layer, nn.Conv3d):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last_3d)
            layer.register_forward_pre_hook(lambda _layer, inputs: layouts.append(_has_channels_last(inputs[0])))
        elif isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    latents = torch.randn(2, 16, 3, 2, 2)
    leaves = [latents.clone().requires_grad_() for _ in range(2)]
    videos = [one.decode(leaf) for one, leaf in zip((last, tiny_codec()), leaves, strict=True)]
    assert sum(layouts) > 0.75 * len(layouts) > 0
    for video in videos:
        video.sum().backward()
    torch.testing.assert_close(videos[0], videos[1], atol=5e-6, rtol=0)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(last.decoder()(latents), videos[1].detach(), atol=5e-6, rtol=0)
    frames = videos[1].detach()
    torch.testing.assert_close(last.encode(frames), tiny_codec().encode(frames), atol=1e-4, rtol=1e-4)


def _has_channels_last(x: torch.Tensor) -> bool:
    """Whether the channels of a position follow each other, which a tensor without extent in space shows in no way."""
    return x.shape[1] > 1 and x.stride(1) == 1 and x[0, 0].numel() > 1


def test_an_offloaded_network_keeps_its_layout():
    network = channels_last(nn.Sequential(nn.Conv3d(4, 6, 3), nn.Conv2d(4, 6, 3)))
    strides = [layer.weight.stride() for layer in network]
    assert strides == [(108, 1, 36, 12, 4), (36, 1, 12, 4)]
    frozen = FrozenNetwork(lambda: network, META, offload=True)
    with frozen.in_use() as used:
        assert [layer.weight.stride() for layer in used] == strides
    assert [layer.weight.stride() for layer in network] == strides


@pytest.mark.parametrize(
    ("kind", "precision", "last"), [("cpu", "fp32", False), ("cuda", "bf16", True), ("npu", "bf16", False)]
)
def test_the_vae_runs_in_half_precision_on_accelerators_unless_it_is_told(kind, precision, last):
    chosen = EncoderConfig().on(kind)
    assert (chosen.vae_precision, chosen.vae_channels_last) == (precision, last) and chosen.on(kind) == chosen
    told = EncoderConfig(vae_precision="fp32", vae_channels_last=False)
    assert told.on(kind) == told


def test_a_codec_reads_what_auto_means_on_its_device():
    """On the meta device, which is no CPU: weights are in bf16, and convolutions have channels last."""
    vae = WanCodec(WAN, META, EncoderConfig())._vae.load()
    convolutions = [layer for layer in vae.modules() if isinstance(layer, nn.Conv3d)]
    assert {layer.weight.dtype for layer in convolutions} == {torch.bfloat16}
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last_3d) for layer in convolutions)
    whole = WanCodec(WAN, CPU, EncoderConfig())._vae.load()
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}


def test_channels_last_are_refused_on_an_npu():
    EncoderConfig().check("npu")
    with pytest.raises(UserError, match=r"encoders\.vae_channels_last: npu has no memory layout"):
        EncoderConfig(vae_channels_last=True).check("npu")


def fingerprint_of(folder, **settings) -> str:
    return WanCodec.load(folder, CPU, EncoderConfig(**settings)).text_fingerprint


def test_copies_of_a_text_encoder_have_one_fingerprint(tmp_path):
    wan = copy_of(WAN, tmp_path / "copy")
    for file in (wan / "text_encoder").iterdir():
        os.utime(file, (1, 1))
    assert fingerprint_of(wan) == fingerprint_of(WAN)
    rewrite(wan / "vae" / "diffusion_pytorch_model.safetensors", lambda held: [x.mul_(2) for x in held.values()])
    assert fingerprint_of(wan) == fingerprint_of(WAN)


def test_another_text_encoder_has_another_fingerprint(tmp_path):
    """One layer of the weights, the tokenizer, and settings that the embeddings depend on."""
    seen = {fingerprint_of(WAN), fingerprint_of(WAN, text_precision="bf16")}
    wan = copy_of(WAN, tmp_path / "wan")
    rewrite(wan / "text_encoder" / "model.safetensors", lambda held: held[max(held)].mul_(2))
    seen.add(fingerprint_of(wan))
    settings = wan / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 8}))
    seen.add(fingerprint_of(wan))
    assert len(seen) == 4


def test_raw_latents_are_those_before_normalising():
    """In both precisions they are float32, and normalising them gives what `encode` gives, to the last bit."""
    video = torch.rand(2, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    for precision in ("fp32", "bf16"):
        codec = WanCodec.load(WAN, CPU, EncoderConfig(vae_precision=precision))
        raw = codec.encode_raw(video)
        assert raw.dtype == torch.float32 and torch.equal(codec.normalise(raw), codec.encode(video))
        mean, std = (
            torch.tensor(codec._outline.config[f"latents_{name}"]).view(-1, 1, 1, 1) for name in ("mean", "std")
        )
        torch.testing.assert_close(codec.encode(video) * std + mean, raw)


def test_another_vae_has_another_fingerprint(tmp_path):
    wan = copy_of(WAN, tmp_path / "wan")
    found = [WanCodec.load(folder, CPU, EncoderConfig()).video_fingerprint for folder in (WAN, wan)]
    found.append(WanCodec.load(WAN, CPU, EncoderConfig(vae_precision="bf16")).video_fingerprint)
    found.append(WanCodec.load(WAN, CPU, EncoderConfig(vae_tile=64)).video_fingerprint)
    rewrite(wan / "vae" / "diffusion_pytorch_model.safetensors", lambda held: held[max(held)].mul_(2))
    found.append(WanCodec.load(wan, CPU, EncoderConfig()).video_fingerprint)
    assert found[0] == found[1] and len(set(found)) == 4


def test_embeddings_have_no_padding(codec):
    short, long = (prompt["text"] for prompt in codec.prompts(["a", "a red circle moving left"]))
    padded = codec.encode_text(["a", "a red circle moving left"])["text"]
    assert len(short) < len(long) <= codec.text_tokens == padded.shape[1]
    assert torch.equal(padded[1, : len(long)], long) and not padded[1, len(long) :].any()
