"""Images: reading, cropping, augmenting and batching.

``dataset.py`` finds an image, ``decode.py`` decodes it, and ``crop.py`` cuts out what a model sees. For the engine,
``prepare.py`` divides this work between the CPU and a GPU. ``evaluation_batches.py`` makes the batches of an
evaluation. ``sources.py`` makes the batches of a training step, and ``augment/`` changes their images. Workers are in
``loading.py`` (torch's, for datasets) and in ``worker_pool.py`` (without torch, for files at the speed of a GPU).
``segmentation/`` does the same for images with masks.

Importing this needs no torch; torch and timm are imported with the names that need them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
