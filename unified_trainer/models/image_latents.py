"""The latents of an image, a video of one frame, and of a video whose first latent is of one frame."""

from unified_trainer.basics.errors import UserError
from unified_trainer.basics.suggestions import multiples_near


def image_latent_shape(
    channels: int, space: int, patch: int, frames: int, height: int, width: int
) -> tuple[int, int, int, int]:
    """Return channels, 1, latent height and width of an image of these pixels.

    A latent is `space` pixels a side and a token `patch` latents. UserError, with the nearest good sizes, for another
    number of frames than 1 and unless VAE and patches divide the sides.
    """
    if frames != 1:
        raise UserError(f"video.frames must be 1, not {frames}: this model makes images")
    unit = space * patch
    for name, size in (("height", height), ("width", width)):
        if size < unit or size % unit:
            good = multiples_near(size, unit)
            raise UserError(
                f"video.{name} must be a multiple of {unit} for this VAE ({space}) and the transformer's patches "
                f"({patch}), not {size}: set {good}"
            )
    return channels, 1, height // space, width // space


def video_latent_shape(
    channels: int, time: int, space: int, patch: int, frames: int, height: int, width: int
) -> tuple[int, int, int, int]:
    """Return channels, latent frames, height and width of a video of these pixels.

    The first latent is of one frame and later ones of `time`; sides are as those of an image. UserError, with the
    nearest good sizes, unless VAE and patches divide it.
    """
    if frames < 1 or (frames - 1) % time:
        below = max(frames - 1, 0) // time * time + 1
        raise UserError(f"video.frames must be {time}k + 1 for this VAE, not {frames}: set {below} or {below + time}")
    *_, high, wide = image_latent_shape(channels, space, patch, 1, height, width)
    return channels, (frames - 1) // time + 1, high, wide
