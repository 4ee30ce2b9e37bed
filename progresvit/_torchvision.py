"""Makes ``import torchvision`` work beside a CPU build of torch; imported ahead of timm, which needs it.

PyPI's torchvision links CUDA. Beside a CPU build of torch its compiled half does not load, and its Python half
then stops at ``operator torchvision::nms does not exist``. We use only the Python half, so the two missing
schemas are declared and the import is tried again. Where torchvision imports as it is, nothing happens.
"""

import sys

import torch

_MISSING = "operator torchvision::nms does not exist"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library's schemas live as long as the library does


def _declare_missing_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)


try:
    import torchvision
except RuntimeError as error:
    if _MISSING not in str(error):
        raise
    _declare_missing_operators()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    import torchvision  # noqa: F401
