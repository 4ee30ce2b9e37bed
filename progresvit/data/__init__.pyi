from .augment.classification import Augmentation as Augmentation
from .augment.corruption import CustomCorruption as CustomCorruption
from .segmentation.windows import WindowOptions as WindowOptions
from .transforms import evaluation_transform as evaluation_transform
