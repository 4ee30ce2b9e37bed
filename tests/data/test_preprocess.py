import torch
from PIL import Image

from progresvit.config import preset
from progresvit.data import evaluation_transform


def test_a_picture_becomes_a_normalised_square_of_the_highest_resolution():
    config = preset("progresvit_small_192_240")
    image = evaluation_transform(config)(Image.new("RGB", (400, 300), (255, 0, 0)))
    assert image.shape == (3, 240, 240)
    red = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor(config.mean)) / torch.tensor(config.std)
    assert torch.allclose(image[:, 120, 120], red, atol=1e-6)


def test_the_crop_keeps_the_middle_ninety_percent_of_the_side():
    config = preset("progresvit_small_192_240")
    picture = Image.new("L", (1000, 1000), 0)
    picture.paste(255, (52, 52, 948, 948))  # a white square just inside of the middle 90 %
    wider = Image.new("L", (1000, 1000), 0)
    wider.paste(255, (40, 40, 960, 960))  # and one just outside
    cut = [evaluation_transform(config)(image.convert("RGB"))[0] for image in (picture, wider)]
    black, white = (0 - config.mean[0]) / config.std[0], (1 - config.mean[0]) / config.std[0]
    assert cut[0].min() < (black + white) / 2
    assert torch.allclose(cut[1], torch.tensor(white), atol=0.05)
