import pytest
from timm.data import ImageNetInfo

from progresvit.config import preset
from progresvit.evaluation.classes import class_numbers
from progresvit.io.model_folder import BUNDLED, bundled_folder
from progresvit.model.registry import read_config

IMAGENET = preset("progresvit_small_192_240")
OWN = preset("progresvit_tiny_160_224", num_classes=3, class_ids=("ant", "bee", "fly"))


def test_names_are_looked_up_in_the_models_class_ids():
    assert class_numbers(["fly", "ant"], OWN) == [2, 0]


def test_an_imagenet_model_knows_imagenets_folder_names():
    assert class_numbers(["n01440764", "n15075141"], IMAGENET) == [0, 999]
    names = ImageNetInfo().label_names()
    assert class_numbers(sorted(names)[5:900:7], IMAGENET) == [names.index(name) for name in sorted(names)[5:900:7]]


def test_folders_that_are_numbers_are_sorted_as_numbers():
    """As text, 10 comes before 2; ImageNet-V2's folders are numbers."""
    names = sorted(str(number) for number in range(1000))
    assert names[:3] == ["0", "1", "10"]
    assert class_numbers(names, IMAGENET)[:3] == [0, 1, 10]


def test_ten_digits_are_no_classes_of_imagenet():
    named = IMAGENET.replace(class_ids=tuple(f"n{number:08d}" for number in range(1000)))
    assert class_numbers([f"{number:03d}" for number in range(1000)], named)[999] == 999
    with pytest.raises(ValueError, match="the model knows no class of the data"):
        class_numbers([str(digit) for digit in range(10)], named)


def test_numbers_are_not_taken_for_classes_of_a_model_that_has_other_names():
    with pytest.raises(ValueError, match="knows no class of the data"):
        class_numbers(["1", "2"], OWN)


@pytest.mark.parametrize("model", BUNDLED)
def test_data_without_any_class_of_the_model_is_refused_with_examples_of_both(model):
    config = read_config(bundled_folder(model))
    others = config.num_classes - 3
    examples = f"Abyssinian, Bengal, Birman and 1 more, the model n01440764, .* and {others} more"
    with pytest.raises(ValueError, match=f"no class of the data: the data has the classes {examples}"):
        class_numbers(["Abyssinian", "Bengal", "Birman", "Bombay"], config)


def test_foreign_classes_are_refused():
    with pytest.raises(ValueError, match=r"does not know 1 of the 2 .* such as 'bug'; it knows ant, bee, fly"):
        class_numbers(["ant", "bug"], OWN)


def test_a_model_without_class_ids_takes_as_many_folders_in_order():
    plain = preset("progresvit_tiny_160_224", num_classes=2)
    assert class_numbers(["cats", "dogs"], plain) == [0, 1]
    with pytest.raises(ValueError, match=r"3 classes and the model 2, .* add class_ids"):
        class_numbers(["cats", "dogs", "pigs"], plain)


LABELLED = preset(
    "progresvit_tiny_160_224",
    num_classes=5,
    class_ids=("n1", "n2", "n3", "n4", "n5"),
    labels=("golden retriever", "black-and-tan coonhound", "crane", "crane", "Cardigan"),
)


def test_folders_may_be_named_by_label_in_any_spelling_of_its_separators():
    for folders in (["golden retriever", "Cardigan"], ["golden_retriever", "cardigan"], ["Golden-Retriever", "n5"]):
        assert class_numbers(folders, LABELLED) == [0, 4]
    assert class_numbers(["black_and_tan_coonhound"], LABELLED) == [1]
    assert class_numbers(["n3", "n4"], LABELLED) == [2, 3]
    without_ids = preset("progresvit_tiny_160_224", num_classes=2, labels=("dog", "cat"))
    assert class_numbers(["Cat", "dog"], without_ids) == [1, 0]  # and not in order
    assert class_numbers(["1", "0"], without_ids) == [1, 0]


def test_the_labels_of_the_bundled_model_name_folders():
    config = read_config(bundled_folder())
    assert class_numbers(["golden_retriever", "n01440764"], config) == [207, 0]
    with pytest.raises(
        ValueError, match=r"'crane' fits 2 classes of the model: n02012849 \(crane\), n03126707 \(crane\)"
    ):
        class_numbers(["crane"], config)


@pytest.mark.parametrize(
    ("folders", "match"),
    [
        (
            ["crane"],
            r"the class folder 'crane' fits 2 classes of the model: n3 \(crane\), n4 \(crane\); name it by the",
        ),
        (
            ["golden retriver", "n5"],
            r"such as 'golden retriver'; .* 'golden retriver': did you mean 'golden retriever'\?",
        ),
        (["golden retriver"], r"knows no class of the data: .* did you mean 'golden retriever'\?"),
        (["golden_retriever", "n1"], "'golden_retriever' and 'n1' are the same class of the model; merge them"),
    ],
)
def test_a_folder_that_fits_no_class_or_two_is_refused_with_what_to_do(folders, match):
    with pytest.raises(ValueError, match=match):
        class_numbers(folders, LABELLED)


def test_an_exact_label_wins_over_one_that_is_alike():
    languages = preset("progresvit_tiny_160_224", num_classes=2, labels=("c", "c++"))
    assert class_numbers(["c++", "c"], languages) == [1, 0]
    signs = preset("progresvit_tiny_160_224", num_classes=2, labels=("+", "-"))
    assert class_numbers(["-", "+"], signs) == [1, 0]
