"""Images with masks: their dataset, the labels, the windows of an image, and batches for training. Needs no torch."""

from progresvit.data.segmentation.dataset import SegmentationDataset as SegmentationDataset
from progresvit.data.segmentation.dataset import find_segmentation as find_segmentation
from progresvit.data.segmentation.masks import IGNORE as IGNORE
from progresvit.data.segmentation.masks import MaskError as MaskError
