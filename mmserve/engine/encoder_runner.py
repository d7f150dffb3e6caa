"""Images of a step into the encoder cache, and from there into the rows of their placeholders."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from mmserve.cache.encoder_cache import EncoderCache
from mmserve.engine.scheduler import ScheduledSequence
from mmserve.kernels.transfer import Event, record_event
from mmserve.models.registry import VisionLanguageModel
from mmserve.request import ImageSpan
from mmserve.vision.pixel_loader import PixelLoader

# Width and height of A4 at 150 dpi, the resolution at which pages of documents are drawn.
_PAGE = (1240, 1754)
# After so many, lengths that come often have what is made for them alone.
_NUM_WARM_UPS = 5

Seconds = Callable[[], float]


def no_time() -> float:
    return 0.0


class EncoderRunner:
    def __init__(self, model: object, cache: EncoderCache, pixels: PixelLoader, device: torch.device) -> None:
        self.cache = cache
        self._model = model
        self._pixels = pixels
        self._device = device
        self._timed: deque[tuple[int, Event, Event]] = deque()

    @property
    def reads_images(self) -> bool:
        return isinstance(self._model, VisionLanguageModel)

    def encode(self, images: Rows[ImageSpan]) -> Seconds:
        """All images of a step in one packed batch, into the encoder cache; its seconds, to be asked after it."""
        self._count_done()
        if not images:
            return no_time
        num_tokens = sum(image.length for image in images)
        if self._device.type == "cuda":
            start = record_event(self._device, enable_timing=True)
            self._encode(images)
            end = record_event(self._device, enable_timing=True)
            self._timed.append((num_tokens, start, end))
            return lambda: start.elapsed_time(end) / 1000
        started = time.perf_counter()
        self._encode(images)
        seconds = time.perf_counter() - started
        self.cache.work.add(num_tokens, seconds)
        return lambda: seconds

    @torch.inference_mode()
    def warm_up(self, max_encoder_tokens: int) -> None:
        """Encode white pages, one at a time and as many at once as a step may: no picture pays for what is lazy."""
        assert isinstance(self._model, VisionLanguageModel)
        page = self._pixels.blank(*_PAGE)
        for _ in range(_NUM_WARM_UPS):
            encoded = self._model.encode_images(page)
        num_tokens = sum(len(tokens) for tokens in encoded)
        self._model.encode_images(page * max(max_encoder_tokens // num_tokens, 1))

    def place(self, embedded: torch.Tensor, rows: Rows[ScheduledSequence]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Embeddings `[T, hidden]` with images' in the placeholders' rows; and the deepstack features if any."""
        hidden, features, first_row = embedded.shape[1], None, 0
        for scheduled in rows:
            start, stop = scheduled.start, scheduled.end
            for image in scheduled.sequence.images:
                a, b = max(image.offset, start), min(image.end, stop)
                if a < b:
                    values = self.cache.get(image.content_hash)[a - image.offset : b - image.offset]
                    if features is None:
                        features = embedded.new_zeros(len(embedded), values.shape[1] - hidden)
                    target = slice(first_row + a - start, first_row + b - start)
                    embedded[target], features[target] = values[:, :hidden], values[:, hidden:]
            first_row += stop - start
        if features is None or features.shape[1] == 0:
            return embedded, []
        return embedded, list(torch.split(features, hidden, dim=1))

    def _encode(self, images: Rows[ImageSpan]) -> None:
        assert isinstance(self._model, VisionLanguageModel)
        encoded = self._model.encode_images(self._pixels.load(images))
        for image, embeddings in zip(images, encoded, strict=True):
            # A copy: slices of one batch would keep the whole of it alive as long as the last of them.
            self.cache.put(image.content_hash, embeddings.clone() if len(images) > 1 else embeddings)

    def _count_done(self) -> None:
        """The seconds of what a GPU has finished since."""
        while self._timed and self._timed[0][2].query():
            num_tokens, start, end = self._timed.popleft()
            self.cache.work.add(num_tokens, start.elapsed_time(end) / 1000)
