"""Decoding on a GPU: each image as on the CPU, and what the GPU cannot decode goes the CPU's way by itself."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.data import gpu_decode
from progresvit.data.crop import crop
from progresvit.data.decode import decode
from progresvit.data.gpu_decode import GpuDecoder, plan_for
from progresvit.data.prepare import Form, prepare
from progresvit.data.samples import samples_folder
from tests.data import gpu_stand_ins
from tests.data.files import photo, rotated, saved
from tests.data.test_prepare import CONFIG

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch):
    gpu_stand_ins.install(monkeypatch)


def files():
    """Files of every kind that can be read."""
    grey = photo(mode="L")
    kinds = {
        "JPEG": saved(photo(90, 70), quality=95),
        "grey": saved(grey),
        "PNG": saved(photo(40, 41), "PNG"),
        "progressive": saved(photo(), progressive=True),
        "CMYK": saved(photo(mode="CMYK"), quality=95),
        "small": saved(photo(9, 7)),
        "16 bits": saved(Image.fromarray(np.full((40, 50), 40000, np.uint16)), "PNG"),
        "large": saved(photo(700, 500), "PNG"),
    }
    return {**kinds, **{f"EXIF {number}": rotated(photo(), number) for number in range(1, 9)}}


def compare(device):
    """The largest and the mean difference to the reference crop, by kind of file."""
    plan = plan_for(CONFIG, device, "gpu")
    contents = files()
    prepared = [prepare(content, plan, 300_000) for content in contents.values()]
    assert {image.form for image in prepared} == {Form.JPEG, Form.PIXELS, Form.CROP}
    made = GpuDecoder(plan, device).crop(prepared)
    assert made.errors == {}
    for (name, content), pixels in zip(contents.items(), made.pixels.cpu().numpy()):
        difference = np.abs(pixels.astype(int) - crop(decode(content), CONFIG))
        yield name, difference.max(), difference.mean()


def test_a_group_of_all_kinds_of_files_gets_the_reference_crop(stand_ins):
    for name, largest, _ in compare(CPU):
        assert largest <= 2, name


@pytest.mark.gpu
def test_a_group_of_all_kinds_of_files_gets_nearly_the_reference_crop_on_a_gpu():
    for name, _, mean in compare(torch.device("cuda")):
        assert mean < 3, name  # nvJPEG interpolates colours in another way; these are noise


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
def test_bad_files_have_their_reason_and_harm_no_other(request, device):
    if device == CPU:
        request.getfixturevalue("stand_ins")
    plan = plan_for(CONFIG, device, "gpu")
    good = saved(photo(90, 70))
    middle = len(good) // 2
    cases = [good, good[:middle], good[:middle] + b"\xff\xd9", b"", good, b"\xff\xd8\xff\xd9", b"text"]
    made = GpuDecoder(plan, device).crop([prepare(content, plan) for content in cases])
    assert set(made.errors) == {1, 3, 5, 6}
    assert "truncated" in made.errors[1]
    assert len(made.pixels) == 3
    assert torch.equal(made.pixels[0], made.pixels[2])


@pytest.mark.parametrize("error", [RuntimeError("nvJPEG"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_the_gpu_fails_on_is_decoded_by_the_cpu(stand_ins, monkeypatch, error):
    def fail(contents, device):
        raise error

    monkeypatch.setattr(gpu_decode, "_nvjpeg", fail)
    plan = plan_for(CONFIG, CPU, "gpu")
    damaged = saved(photo())
    damaged = damaged[:200] + b"\0" * 50 + damaged[250:]
    contents = [saved(photo(66, 60)), damaged, rotated(photo(), 6)]
    prepared = [prepare(content, plan) for content in contents]
    made = GpuDecoder(plan, CPU).crop(prepared)
    assert all(image.form == Form.JPEG for image in prepared)
    assert set(made.errors) <= {1}
    kept = [content for place, content in enumerate(contents) if place not in made.errors]
    for pixels, content in zip(made.pixels, kept):
        assert np.abs(pixels.numpy().astype(int) - crop(decode(content), CONFIG)).max() <= 2


def test_without_a_gpu_the_cpu_decodes_or_the_error_says_why():
    assert plan_for(CONFIG, CPU, "auto") == plan_for(CONFIG, CPU, "cpu")
    assert not plan_for(CONFIG, CPU).pixels
    with pytest.raises(ValueError, match="decode=gpu is not possible here: the model runs on cpu; use decode=auto"):
        plan_for(CONFIG, CPU, "gpu")
    with pytest.raises(ValueError, match="decode must be auto, gpu or cpu, got 'tpu'"):
        plan_for(CONFIG, CPU, "tpu")


def test_a_missing_decoder_leaves_cropping_to_the_gpu(monkeypatch):
    monkeypatch.setattr(gpu_decode, "_missing_for_crops", lambda config, device: None)
    monkeypatch.setattr(gpu_decode, "_missing_for_jpegs", lambda: "this build of torchvision has no nvJPEG")
    plan = plan_for(CONFIG, CPU, "auto")
    assert (plan.pixels, plan.jpeg) == (True, False)
    with pytest.raises(ValueError, match="has no nvJPEG; use decode=auto or decode=cpu"):
        plan_for(CONFIG, CPU, "gpu")


@pytest.mark.gpu
def test_photographs_look_the_same_on_a_gpu():
    from progresvit.config import preset

    config, device = preset("progresvit_tiny_160_224"), torch.device("cuda")
    plan = plan_for(config, device, "gpu")
    contents = [path.read_bytes() for path in sorted(samples_folder().glob("*.jpg"))]
    made = GpuDecoder(plan, device).crop([prepare(content, plan) for content in contents])
    for pixels, content in zip(made.pixels.cpu().numpy(), contents):
        image = Image.open(io.BytesIO(content)).convert("RGB")
        assert np.abs(pixels.astype(int) - crop(image, config)).mean() < 1.5
