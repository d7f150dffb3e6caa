"""Preprocessing workers that die on purpose, in processes of their own."""

from pathlib import Path

from dying_workers import die

from mmserve.vision.image_plan import ImagePlan, ImageProcessor
from mmserve.vision.image_source import ImageSource, PixelLimits
from mmserve.vision.page_types import PageLimits
from mmserve.vision.preprocess_worker import PreprocessWorker, Processed


class MortalPreprocessWorker(PreprocessWorker):
    """Dies once when it has shared a picture, before anybody is told where."""

    flag: Path

    def process(self, source: ImageSource, plan: ImagePlan, limits: PixelLimits, mark: str) -> Processed:
        processed = super().process(source, plan, limits, mark)
        if not self.flag.exists():
            self.flag.write_text(processed.patches[0].segment)
            die()
        return processed


def start_mortal_preprocess_worker(flag: Path, processor: ImageProcessor) -> MortalPreprocessWorker:
    worker = MortalPreprocessWorker(processor, PageLimits(), "worker")
    worker.flag = flag
    return worker
