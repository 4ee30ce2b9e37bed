"""Make ``import torchvision`` work with a CPU build of torch; imported before timm, which needs it.

PyPI's torchvision links CUDA. With a CPU build of torch its compiled part does not load, and its Python part then
fails with ``operator torchvision::nms does not exist``. We use only the Python part, so the two missing schemas are
declared and the import is repeated. If torchvision imports without this, nothing is changed.
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
