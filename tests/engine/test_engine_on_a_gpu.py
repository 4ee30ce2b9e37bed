"""The engine with fused kernels and CUDA graphs."""

import warnings

import pytest
import torch

from progresvit.config import ModelConfig, make_rounds
from progresvit.engine import Engine, MemoryWarning
from progresvit.engine.buffers import power_sizes
from progresvit.model import ProgResViT
from progresvit.routing import top10_entropy
from tests.engine.test_engine import all_rounds, made_router
from tests.factories import setting_of

pytestmark = pytest.mark.gpu

CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([64, 96], [2, 4]), heads=4, depth=3, num_classes=20),
    "three rounds": ModelConfig(rounds=make_rounds([48, 64, 96], [1, 2, 4]), heads=4, depth=3, num_classes=20),
}


@pytest.fixture(params=CONFIGS)
def model(request, randomize):
    torch.manual_seed(1)
    return randomize(ProgResViT(CONFIGS[request.param])).cuda().eval()


@pytest.fixture
def images():
    torch.manual_seed(5)
    return torch.randint(0, 256, (300, 3, 96, 96), dtype=torch.uint8, device="cuda")


def expected_rounds(entropy, threshold):
    """The round, from 1, after which each image exits: (B, S) -> (B,)."""
    exiting = entropy.double() < threshold
    exiting[:, -1] = True
    return exiting.int().argmax(dim=1) + 1


def entropies(model, images):
    logits = all_rounds(model.cpu(), images.cpu())
    model.cuda()
    return logits, torch.stack([top10_entropy(logits[:, s]) for s in range(logits.shape[1])], dim=1)


@pytest.mark.parametrize("quantile", [None, 0.2, 0.5, 0.9, float("inf")])
def test_answers_equal_the_plain_models_for_ragged_batches(model, images, quantile):
    logits, entropy = entropies(model, images)
    threshold = {None: 0.0, float("inf"): float("inf")}.get(quantile)
    threshold = entropy[:, 0].double().quantile(quantile).item() if threshold is None else threshold
    away = ((entropy.double() - threshold).abs() > 1e-4).all(dim=1)
    rounds = expected_rounds(entropy, threshold)
    for batch in (64, 300):
        found = Engine(model, threshold, batch=batch).classify(images)
        assert len(found) == 300
        for row, prediction in enumerate(found):
            if away[row]:
                assert prediction.exit_round == rounds[row]
                assert prediction.probability == pytest.approx(
                    logits[row, rounds[row] - 1].softmax(dim=-1).max().item(), abs=1e-4
                )
        assert away.float().mean() > 0.98


def test_every_bucket_gives_the_same_answers(model, images):
    _, entropy = entropies(model, images)
    threshold = entropy[:, 0].double().median().item()
    engine = Engine(model, threshold, batch=64)
    whole = engine.classify(images[:64])
    for size in (*power_sizes(64), 3, 13, 50):
        for one, other in zip(engine.classify(images[:size]), whole):
            assert (one.index, one.exit_round) == (other.index, other.exit_round)
            assert one.probability == pytest.approx(other.probability, abs=1e-4)


def test_bf16_and_fp16_make_the_same_decisions_away_from_the_threshold(model):
    torch.manual_seed(6)
    images = torch.randint(0, 256, (4000, 3, 96, 96), dtype=torch.uint8, device="cuda")
    exact = Engine(model, float("inf"), batch=512).classify(images)
    entropy = torch.tensor([one.entropy for one in exact])
    threshold = entropy.double().median().item()
    away = (entropy - threshold).abs() >= 0.01
    for precision in ("bf16", "fp16"):
        found = Engine(model, threshold, batch=512, precision=precision).classify(images)
        same = torch.tensor([one.exit_round == 1 for one in found]) == (entropy < threshold)
        assert same[away].float().mean() >= 0.999
        assert away.float().mean() > 0.5


def test_routers_decide_inside_the_graph(images, randomize):
    model = randomize(ProgResViT(CONFIGS["two rounds"])).cuda().eval()
    logits, _ = entropies(model, images)
    router = made_router()
    scores = router.score(0, logits[:, 0]).double()
    threshold = scores.median().item()
    found = Engine(model, threshold, router=router).classify(images)
    away = (scores - threshold).abs() > 1e-4
    same = torch.tensor([one.exit_round == 1 for one in found]) == (scores < threshold)
    assert same[away].all()


def test_two_hundred_batches_do_not_grow_the_allocation(model, images):
    threshold = entropies(model, images)[1][:, 0].double().median().item()
    engine = Engine(model, threshold, batch=128, precision="bf16")
    sizes = [100, 128, 37, 1]

    def batches(count):
        for number in range(count):
            yield images[: sizes[number % 4]]

    engine.warm_up()
    for _ in engine.stream(batches(20)):
        pass
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert sum(1 for _ in engine.stream(batches(200))) == 50 * sum(sizes)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2**20
    assert torch.cuda.memory_reserved() <= reserved + 2**24


def test_streams_from_the_host_and_from_the_device_agree(model, images):
    threshold = entropies(model, images)[1][:, 0].double().median().item()
    engine = Engine(model, threshold, batch=64, precision="bf16")
    on_device = list(engine.stream(images.split(50)))
    from_host = list(engine.stream(images.cpu().split(70)))
    assert [(p.index, p.exit_round) for p in on_device] == [(p.index, p.exit_round) for p in from_host]
    assert len(on_device) == 300


def test_images_of_other_sides_get_buffers_and_graphs_of_their_own(model, images):
    engine = Engine(model, 1.0, batch=64)
    larger = torch.nn.functional.interpolate(images.float(), size=(112, 112)).to(torch.uint8)
    for _ in range(2):
        for some in (images[:70], larger[:70]):
            found, expected = engine.classify(some), Engine(model, 1.0, kernels="plain").classify(some)
            assert [p.probability for p in found] == pytest.approx([p.probability for p in expected], abs=1e-4)


def test_out_of_memory_goes_on_with_smaller_batches(images, randomize):
    config = ModelConfig(rounds=make_rounds([224, 256], [3, 6]), heads=6, depth=2, num_classes=20)
    model = randomize(ProgResViT(config)).cuda().eval()
    many = torch.randint(0, 256, (600, 3, 256, 256), dtype=torch.uint8)
    threshold = 1.0
    expected = Engine(model, threshold, batch=32).classify(many)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.2 * 2**30) / total)
    try:
        engine = Engine(model, threshold, batch=512)
        with pytest.warns(MemoryWarning, match="continues with smaller") as caught:
            found = engine.classify(many)
        assert len([one for one in caught if one.category is MemoryWarning]) == 1
        assert engine.batch < 512
        with warnings.catch_warnings():
            warnings.simplefilter("error", MemoryWarning)
            engine.classify(many)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [(p.index, p.exit_round) for p in found] == [(p.index, p.exit_round) for p in expected]


def test_fp8_runs_where_the_chip_can(images):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    torch.manual_seed(0)
    model = ProgResViT(CONFIGS["two rounds"]).cuda().eval()
    plain, rough = (Engine(model, 0.0, precision=one).classify(images) for one in ("fp32", "fp8"))
    assert sum(a.index == b.index for a, b in zip(plain, rough)) > 200
    narrow = ModelConfig(rounds=make_rounds([64, 96], [1, 3]), heads=3, depth=1, num_classes=20)
    with pytest.raises(ValueError, match=r"fp8 needs 256 channels or more, .* have 64 and 192; use bf16"):
        Engine(ProgResViT(narrow).cuda(), 0.5, precision="fp8")


def test_fp8_takes_any_number_of_images(images):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    engine = Engine(ProgResViT(CONFIGS["two rounds"]).cuda().eval(), 0.0, precision="fp8", batch=64)
    engine.warm_up()
    assert [len(engine.classify(images[:size])) for size in (1, 3, 64)] == [1, 3, 64]


def test_a_cold_engine_takes_batches_of_any_size_from_the_host(model, images):
    host = images.cpu()
    engine = Engine(model, 1.0, batch=128, precision="bf16")
    sizes = [1 + 37 * number % 128 for number in range(200)]
    found = sum(1 for _ in engine.stream((host[:size] for size in sizes), deadline=0.001))
    assert found == sum(sizes)


def test_plain_kernels_can_be_asked_for(model, images):
    plain, fused = (Engine(model, 1.0, kernels=one).classify(images[:50]) for one in ("plain", "fused"))
    assert [p.probability for p in plain] == pytest.approx([p.probability for p in fused], abs=1e-4)


def test_several_classes_are_named_as_by_the_plain_model(model, images):
    logits, entropy = entropies(model, images)
    threshold = entropy[:, 0].double().quantile(0.5).item()
    alone, several = (Engine(model, threshold, batch=64, top_k=k).classify(images) for k in (1, 5))
    for row, (one, five) in enumerate(zip(alone, several)):
        assert (one.index, one.exit_round, one.top) == (five.index, five.exit_round, ())
        expected = logits[row, five.exit_round - 1].softmax(dim=-1).topk(5).values
        assert [candidate.probability for candidate in five.top] == pytest.approx(expected.tolist(), abs=1e-3)
        assert five.top[0].index == five.index


def test_out_of_distribution_images_are_found_inside_the_graph(model, images):
    from progresvit.routing import OODRule, ood_score

    logits, entropy = entropies(model, images)
    limit = entropy[:, 0].double().quantile(0.5).item()
    rounds = torch.as_tensor(expected_rounds(entropy, limit)) - 1
    scores = ood_score("energy", logits[torch.arange(len(rounds)), rounds]).double()
    rule = OODRule(score="energy", limit=scores.quantile(0.3).item(), share=0.3)
    away = ((entropy.double() - limit).abs() > 1e-4).all(dim=1) & ((scores - rule.limit).abs() > 1e-3)
    setting = setting_of(model, threshold=limit, ood=rule, rounds=logits.shape[1])
    found = Engine(model, setting).classify(images)
    for row in away.nonzero().flatten().tolist():
        assert found[row].out_of_distribution == found[row].abstained == (scores[row] < rule.limit)
        assert found[row].ood_score == pytest.approx(scores[row].item(), abs=1e-3)
    assert away.sum() > 200
