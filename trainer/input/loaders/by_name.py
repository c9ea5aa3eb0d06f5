"""Loaders of encoded images by name; also for scripts that use only the loaders of bigbatch."""

from bigbatch.errors import ConfigError
from bigbatch.trainer.input.base import Crop, ImageSize, ImageSource
from bigbatch.trainer.input.formats import MAX_PIXELS
from bigbatch.trainer.input.loaders.dali import DaliDecoder
from bigbatch.trainer.input.loaders.encoded import Decoder, ImageLoader
from bigbatch.trainer.input.loaders.pillow import PillowDecoder
from bigbatch.trainer.input.reading import EncodedReader

IMAGE_LOADERS = ("dali", "torchvision")


def make_image_loader(
    name: str,
    source: ImageSource,
    *,
    crop: Crop,
    image_size: int | ImageSize,
    microbatch_size: int,
    num_threads: int,
    prefetch_batches: int,
    device_id: int | None = None,
    hardware_share: float = 0.65,
    pin_memory: bool = False,
    patience_seconds: float = 20.0,
    max_skipped: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> ImageLoader:
    """Make a loader that reads and decodes prefetch_batches ahead, with num_threads decoding threads.

    name: dali (on GPU device_id, or on the CPU if that is None), or torchvision (Pillow and torch; pin_memory for
    copies to a GPU). patience_seconds, max_skipped and max_pixels: see EncodedReader; hardware_share: see
    DaliDecoder.
    Raises: ConfigError for another name, or for dali if it is not installed.
    """
    if name not in IMAGE_LOADERS:
        raise ConfigError(f"{name!r} is not a loader of images: name one of {', '.join(IMAGE_LOADERS)}")
    decoder: Decoder
    if name == "dali":
        decoder = DaliDecoder(
            microbatch_size=microbatch_size,
            device_id=device_id,
            num_threads=num_threads,
            prefetch_batches=prefetch_batches,
            hardware_share=hardware_share,
        )
    else:
        decoder = PillowDecoder(num_threads=num_threads, prefetch_batches=prefetch_batches, pin_memory=pin_memory)
    reader = EncodedReader(
        source=source,
        crop=crop,
        image_size=image_size if callable(image_size) else lambda epoch: image_size,
        microbatch_size=microbatch_size,
        # two reading threads can feed many decoders, and leave them the cores; slow storage makes the reader start more
        num_threads=min(2, num_threads),
        prefetch_batches=prefetch_batches,
        patience_seconds=patience_seconds,
        max_skipped=max_skipped,
        max_pixels=max_pixels,
    )
    return ImageLoader(reader, decoder)
