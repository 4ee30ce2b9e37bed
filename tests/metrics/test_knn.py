import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import progresvit
from progresvit.data.augment.classification import Augmentation, training_transform
from progresvit.data.decode import decode
from progresvit.data.samples import samples_folder
from progresvit.data.transforms import evaluation_transform
from progresvit.metrics.knn import BANK_BLOCK, QUERY_BLOCK, knn_votes


def reference_votes(queries, bank, targets, k):
    from sklearn.neighbors import KNeighborsClassifier

    neighbours = KNeighborsClassifier(
        n_neighbors=k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
    )
    return neighbours.fit(bank.double().numpy(), targets.numpy()).predict_proba(queries.double().numpy())


@pytest.fixture(scope="module")
def digits_features():
    """Pixels of handwritten digits: queries, bank and targets of the bank."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels, targets = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    return pixels[:300], pixels[300:], targets[300:]


@pytest.mark.parametrize("k", [1, 20, 200])
def test_votes_are_those_of_scikit_learn_on_handwritten_digits(digits_features, k):
    queries, bank, targets = digits_features
    votes = knn_votes(queries, bank, targets, classes=10, k=k)
    assert votes.dtype == torch.float32
    assert votes.sum(dim=1).numpy() == pytest.approx(np.ones(len(queries)), abs=1e-5)
    assert votes.numpy() == pytest.approx(reference_votes(queries, bank, targets, k), abs=2e-4)


@pytest.mark.slow
def test_votes_are_those_of_scikit_learn_on_features_of_a_bundled_model():
    model = progresvit.load("nettewoof-tiny").eval()
    paths = sorted(samples_folder().glob("*.jpg"))[:6]
    photos = [decode(path.read_bytes()) for path in paths]
    augment = training_transform(model.config, Augmentation())
    crop = evaluation_transform(model.config)
    crops = torch.stack([augment(photo) for photo in photos for _ in range(8)])
    with torch.no_grad():
        bank = [features.class_token for features in model.features(crops)]
        queries = [features.class_token for features in model.features(torch.stack([crop(photo) for photo in photos]))]
    targets = torch.arange(len(photos)).repeat_interleave(8)
    for of_round, of_bank in zip(queries, bank):
        votes = knn_votes(of_round, of_bank, targets, classes=len(photos), bank_block=7, query_block=4)
        assert votes.numpy() == pytest.approx(reference_votes(of_round, of_bank, targets, 20), abs=2e-4)
    assert (votes.argmax(dim=1) == torch.arange(len(photos))).all()


@pytest.mark.parametrize(("query_block", "bank_block"), [(7, 5), (64, 30), (300, 400), (1, 1497), (1000, 19)])
def test_blocks_of_any_size_give_the_same_votes(digits_features, query_block, bank_block):
    queries, bank, targets = digits_features
    whole = knn_votes(queries, bank, targets, classes=10, query_block=10**6, bank_block=10**6)
    blocked = knn_votes(queries, bank, targets, classes=10, query_block=query_block, bank_block=bank_block)
    assert blocked.numpy() == pytest.approx(whole.numpy(), abs=1e-5)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation makes; views of other tensors do not count."""

    def __init__(self, *known):
        super().__init__()
        self.elements, self.storages = 0, {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        results = function(*arguments, **(options or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.storages:
                self.elements = max(self.elements, result.numel())
        return results


def test_no_tensor_is_larger_than_a_block_of_similarities():
    queries, bank = torch.randn(600, 4), torch.randn(1000, 4)
    targets = torch.randint(0, 3, (1000,))
    with LargestTensor(queries, bank, targets) as largest:
        knn_votes(queries, bank, targets, classes=3, k=2, query_block=100, bank_block=90)
    assert largest.elements == 100 * 90  # and not 600 * 1000


def test_imagenet_fits_into_8_gb():
    """On paper: bank, queries before and after normalisation, five blocks of similarities, votes twice; in float32."""
    bank, queries, block, votes = 1_281_167 * 384, 50_000 * 384, QUERY_BLOCK * BANK_BLOCK, 50_000 * 1000
    assert 4 * (bank + 2 * queries + 5 * block + 2 * votes) < 4.5e9


def test_similar_features_of_any_length_do_not_overflow():
    bank = torch.eye(4)[[0, 0, 1, 2]] * 1e4
    votes = knn_votes(torch.eye(4)[:1] * 1e-3, bank, torch.tensor([2, 2, 0, 1]), classes=3, k=3, temperature=1e-3)
    assert votes.tolist() == [[0, 0, 1]]


def test_of_equal_images_in_different_blocks_the_first_is_nearest():
    bank, targets = torch.ones(6, 2), torch.tensor([1, 0, 0, 0, 0, 0])
    assert knn_votes(torch.ones(1, 2), bank, targets, classes=2, k=1, bank_block=1).tolist() == [[0, 1]]


def test_a_query_that_is_not_finite_gets_no_vote_and_leaves_the_others_alone(digits_features):
    queries, bank, targets = digits_features
    broken = queries[:3].clone()
    broken[1, 5] = torch.nan
    votes = knn_votes(broken, bank, targets, classes=10)
    assert votes[1].isnan().all()
    torch.testing.assert_close(votes[[0, 2]], knn_votes(broken[[0, 2]], bank, targets, classes=10))


def test_bad_input_is_refused_with_a_remedy():
    queries, bank, targets = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(ValueError, match=r"the bank has 5 images, fewer than k = 20; .* a k of at most 5"):
        knn_votes(queries, bank, targets, classes=3)
    for given, match in [
        ({"k": 0}, "k is at least 1"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"temperature": float("nan")}, "temperature above 0"),
        ({"classes": 2}, "the targets of the bank go from 0 to 2, and classes from 0 to 1"),
        ({"targets": torch.tensor([0, 1, -1, 0, 1])}, "leave out images without a label"),
        ({"bank": torch.randn(5, 3)}, "features of one model and one round"),
        ({"bank": torch.full((5, 4), torch.inf)}, "features of the bank are NaN or infinite"),
    ]:
        arguments = {"queries": queries, "bank": bank, "targets": targets, "classes": 3, "k": 2, **given}
        with pytest.raises(ValueError, match=match):
            knn_votes(**arguments)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_votes_with_the_bank_on_the_cpu(digits_features):
    queries, bank, targets = digits_features
    expected = knn_votes(queries, bank, targets, classes=10)
    for of_bank in (bank, bank.cuda()):
        votes = knn_votes(queries.cuda(), of_bank, targets, classes=10, bank_block=100)
        assert votes.cpu().numpy() == pytest.approx(expected.numpy(), abs=1e-4)
        assert torch.equal(votes, knn_votes(queries.cuda(), of_bank, targets, classes=10, bank_block=100))
