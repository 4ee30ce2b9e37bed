"""DINO: the loss against loops, the teacher, its centre and schedules, resuming, and what is refused."""

import math

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.distributed import Processes
from progresvit.training import loop
from progresvit.training.build import build_model, start_model
from progresvit.training.logger import read_log
from progresvit.training.recipe import load_recipe, make_recipe
from progresvit.training.state import checkpoints
from progresvit.training.tasks.dino_loss import (
    DINOHead,
    dino_loss,
    local_resolutions,
    momentum_at,
    spread,
    teacher_probabilities,
)
from tests.training.runs import (
    assert_close_losses,
    assert_resumes_to_the_bit,
    evaluations,
    ready,
    recipe,
    run,
    take_steps,
)
from tests.training.test_optim import values_over_time

SMALL = {"prototypes": 24, "hidden": 16, "bottleneck": 8, "local_side": 16, "local_crops": 3, "k": 5}


def dino(**sections):
    options = {**SMALL, **sections.pop("task_options", {})}
    values = {"augment": None, "mixing": None, "ema": 0.0, **sections}
    wanted = recipe(task="dino", task_options=options, **{k: v for k, v in values.items() if v is not None})
    cleared = {key: type(getattr(wanted, key))() for key in ("augment", "mixing") if values[key] is None}
    return wanted.model_copy(update=cleared)


# The loss


def literal_loss(student, teacher_logits, centre, student_temperature, teacher_temperature):
    """DINO as its paper writes it, in loops."""
    views, images, prototypes = student.shape
    total, pairs = 0.0, 0
    for i in range(len(teacher_logits)):
        for j in range(views):
            if i == j:
                continue
            pairs += 1
            for b in range(images):
                shifted = ((teacher_logits[i, b] - centre) / teacher_temperature).tolist()
                high = max(shifted)
                p = [math.exp(value - high) for value in shifted]
                p = [value / sum(p) for value in p]
                z = [student[j, b, k].item() / student_temperature for k in range(prototypes)]
                highest = max(z)
                normaliser = highest + math.log(sum(math.exp(value - highest) for value in z))
                total -= sum(p[k] * (z[k] - normaliser) for k in range(prototypes))
    return total / pairs / images


@pytest.mark.parametrize("views", [2, 5])
def test_loss_equals_a_literal_one_in_float64(views):
    student = torch.randn(views, 3, 7, dtype=torch.float64)
    teacher, centre = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    ours = dino_loss(student, teacher_probabilities(teacher, centre, 0.04), 0.1)
    assert ours.item() == pytest.approx(literal_loss(student, teacher, centre, 0.1, 0.04), rel=1e-12)


def test_loss_of_a_step_is_that_of_every_round_by_itself(digits):
    started = ready(dino(model={"drop_path": 0.0}), digits)  # views would drop different blocks
    ((batch,),) = started.data.train.steps(0, 1)
    with torch.no_grad():
        started.task.centre.normal_()
        prepared = started.task.prepare(batch)
        measured = started.step.trained(prepared)
        for s in range(2):
            student = []
            for crops, resolutions in ((batch.global_crops, (16, 32)), (batch.local_crops, (8, 16))):
                for view in crops:
                    tokens = started.model.run_at(view, resolutions)[s].tokens[:, 0]
                    student.append(started.task.head(tokens))
            teacher = [started.task.teacher.head(started.task.teacher.backbone(v)[s].tokens[:, 0]) for v in batch[0]]
            expected = literal_loss(torch.stack(student), torch.stack(teacher), started.task.centre[s], 0.1, 0.04)
            assert measured[s].item() == pytest.approx(expected, rel=1e-4)


def test_head_is_a_cosine_to_prototypes_and_takes_a_prefix_of_the_channels():
    head = DINOHead(width=12, hidden=6, bottleneck=4, prototypes=5)
    tokens = torch.randn(3, 12)
    assert head(tokens).abs().max() <= 1
    narrow = DINOHead(width=8, hidden=6, bottleneck=4, prototypes=5)
    narrow.load_state_dict({**head.state_dict(), "fc1.weight": head.fc1.weight[:, :8]})
    assert torch.equal(head(tokens[:, :8]), narrow(tokens[:, :8]))
    before = head(tokens)
    with torch.no_grad():
        head.last.weight.mul_(torch.rand(5, 1) + 0.5)  # only the direction of a prototype counts
    torch.testing.assert_close(head(tokens), before)


# Centre, momentum and schedules


def test_centre_removes_what_all_images_share_and_sharpening_follows():
    logits = torch.randn(2, 3, 6)
    shared = torch.randn(6)
    torch.testing.assert_close(
        teacher_probabilities(logits + shared, shared, 0.04), teacher_probabilities(logits, torch.zeros(6), 0.04)
    )
    torch.testing.assert_close(teacher_probabilities(logits, torch.zeros(6), 0.5), (logits / 0.5).softmax(dim=-1))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_centre_of_each_round_moves_towards_the_mean_of_the_step(digits, momentum):
    started = ready(dino(task_options={"centre_momentum": momentum}, optimizer={"accumulate": 2}), digits)
    (batches,) = started.data.train.steps(0, 1)
    with torch.no_grad():
        means = torch.stack(
            [torch.stack([r.mean(dim=0) for r in started.task.teacher(b.global_crops.flatten(0, 1))]) for b in batches]
        ).mean(dim=0)
    started.step(0, batches)
    torch.testing.assert_close(started.task.centre, (1 - momentum) * means)
    assert means[0].sub(means[1]).abs().max() > 1e-3  # the rounds do not share it


def test_momentum_at_start_middle_and_end():
    assert momentum_at(0, 100, 0.996) == pytest.approx(0.996)
    assert momentum_at(50, 100, 0.996) == pytest.approx(0.998)
    assert momentum_at(100, 100, 0.996) == 1.0
    assert momentum_at(0, 100, 1.0) == momentum_at(37, 100, 1.0) == 1.0


def test_schedules_of_the_paper_at_their_corner_points():
    wanted = load_recipe("dino_192_240")
    steps = [0, 5 * 10, 10 * 10, 55 * 10, 100 * 10]  # of ten per epoch; the middle of the decay is epoch 55
    rates = values_over_time(wanted, steps, 10)  # from a rate of 1e-3, as 5e-4 * 512 / 256
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, (1e-3 + 1e-6) / 2, 1e-6])
    decays = values_over_time(wanted, [0, 500, 1000], 10, "weight_decay")
    assert decays == pytest.approx([0.04, 0.22, 0.4])


def test_the_last_layer_is_frozen_in_the_first_epoch(digits):
    started = ready(dino(optimizer={"freeze_epochs": {"task.head.last.*": 1}}), digits)
    before = started.task.head.last.weight.detach().clone()
    per_epoch = started.data.train.sampler.steps_per_epoch
    take_steps(started, per_epoch)
    assert torch.equal(started.task.head.last.weight, before)
    take_steps(started, 1, first=per_epoch)
    assert not torch.equal(started.task.head.last.weight, before)


def test_clipping_each_parameter_bounds_every_norm(digits):
    wanted = dino(optimizer={"name": "sgd", "lr": 1.0, "lr_batch": 16, "momentum": 0.0, "weight_decay": 0.0})
    for clip, each in ((None, False), (1e-3, True)):
        optimizer = wanted.optimizer.model_copy(update={"clip": clip, "clip_each": each})
        started = ready(wanted.model_copy(update={"optimizer": optimizer}), digits)
        before = {name: value.detach().clone() for name, value in started.step.trained.named_parameters()}
        take_steps(started, 1)
        moved = [(value - before[name]).norm().item() for name, value in started.step.trained.named_parameters()]
        assert max(moved) > 0.01 if clip is None else max(moved) <= 1.001e-3
    assert sum(norm > 0.9e-3 for norm in moved) > 1  # with one common factor a single one could be that long


# The teacher


def test_teacher_gets_no_gradient_and_begins_as_the_student(digits):
    started = ready(dino(), digits)
    teacher = started.task.teacher
    for ours, theirs in ((teacher.backbone, started.model), (teacher.head, started.task.head)):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    ((batch,),) = started.data.train.steps(0, 1)
    with torch.no_grad():
        prepared = started.task.prepare(batch)
    assert not any(target.requires_grad for target in prepared.teacher)
    started.step.trained(prepared).mean().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in started.task.head.parameters())
    assert all(parameter.grad is not None for parameter in started.model.parameters())


def test_teacher_is_the_average_of_the_student(digits):
    started = ready(dino(task_options={"momentum": 0.75}), digits)
    before = {key: value.clone() for key, value in started.task.teacher.backbone.state_dict().items()}
    take_steps(started, 1)
    for key, value in started.task.teacher.backbone.state_dict().items():
        torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * started.model.state_dict()[key])


def test_with_momentum_one_the_teacher_never_moves(digits):
    started = ready(dino(task_options={"momentum": 1.0}), digits)
    before = {key: value.clone() for key, value in started.task.teacher.state_dict().items()}
    student = started.model.blocks[0].mlp.fc1.weight.detach().clone()
    take_steps(started, 3)
    assert all(torch.equal(value, before[key]) for key, value in started.task.teacher.state_dict().items())
    assert not torch.equal(started.model.blocks[0].mlp.fc1.weight, student)


# Runs


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """A whole run of two rounds."""
    out = tmp_path_factory.mktemp("dino") / "run"
    run(dino(run={"keep": 9}), digits, out)
    return out


def test_a_run_saves_the_teachers_backbone_without_a_classifier(finished):
    model = progresvit.load(finished / "model")
    assert model.config.num_classes == 0
    last = load_file(checkpoints(finished / "checkpoints")[-1] / "task.safetensors")
    assert all(torch.equal(value, last[f"teacher.backbone.{key}"]) for key, value in model.state_dict().items())
    evaluation = evaluations(finished)[-1]
    assert len(evaluation["knn"]) == 2
    assert evaluation["images"] == 24


def test_the_log_has_entropies_of_teacher_and_centre_in_every_round(finished):
    lines = [line for line in read_log(finished) if line["event"] == "train"]
    for line in lines:
        for each, mean, centre in zip(line["teacher_entropy"], line["mean_entropy"], line["centre_entropy"]):
            assert 0 <= each <= mean + 1e-6  # entropy is concave
            assert 0 <= centre <= math.log(SMALL["prototypes"]) + 1e-6
    assert len(lines[0]["teacher_entropy"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_memory", "loader"])
def test_resumes_to_the_bit_with_head_teacher_and_centre(digits, tmp_path, mode):
    wanted = dino(data={"mode": mode}, run={"keep": 9})
    whole = assert_resumes_to_the_bit(wanted, digits, tmp_path, "model", "task", "optimizer")
    names = load_file(whole / "task.safetensors").keys()
    assert {"centre", "head.last.weight", "teacher.head.last.weight", "teacher.backbone.cls_token"} <= names


def test_a_plain_vit_is_trained_by_the_same_task(digits, tmp_path):
    wanted = dino(model={"resolutions": [32], "heads": [2], "psg": False}, schedule={"epochs": 1, "cooldown": 0})
    run(wanted, digits, tmp_path / "out")
    assert len(read_log(tmp_path / "out")[0]["losses"]) == 1


def test_unlabelled_images_are_trained_on_and_do_not_vote(digits, tmp_path):
    for number in range(8):
        folder = tmp_path / "more" / "anywhere"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number * 30, 0, 0)).save(folder / f"{number}.png")
    wanted = dino(task_options={"unlabelled": str(tmp_path / "more")})
    started = ready(wanted, digits)
    assert started.data.train.sampler.count == 48 + 8
    assert sum(len(batch.targets) for batch in started.data.bank()) == 48


def test_images_without_any_labels_need_no_validation(tmp_path):
    for number in range(20):
        Image.new("RGB", (40, 30), (number * 10, 0, 0)).save(tmp_path / f"{number}.png")
    wanted = dino(task_options={"knn": False}, schedule={"epochs": 1, "cooldown": 0})
    run(wanted, tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "model" / "config.json").is_file()


@pytest.mark.parametrize("task", ["supervised", "segmentation"])
def test_a_dino_model_starts_other_trainings(finished, digits, task, tmp_path):
    values = {"model": {"resolutions": [16, 32], "heads": [1, 2], "depth": 2, "patch_size": 8}}
    values["model"]["start"] = str(finished / "model")
    wanted = make_recipe({"task": task, **values}, origin="test")
    model_task = "segmentation" if task == "segmentation" else "classification"
    model = build_model(wanted, ("a", "b"), task=model_task)
    line = start_model(model, wanted)
    assert line.endswith("not copied: head")
    source = progresvit.load(finished / "model").state_dict()
    assert all(torch.equal(value, source[key]) for key, value in model.state_dict().items() if "head" not in key)


# Collapse


def test_spread_tells_both_kinds_of_collapse():
    prototypes = 16
    uniform = torch.full((2, 8, prototypes), 1 / prototypes)
    same = torch.zeros(2, 8, prototypes)
    same[..., 3] = 1
    different = torch.eye(prototypes)[:8].expand(2, -1, -1)
    assert spread(uniform).tolist() == pytest.approx([math.log(prototypes)] * 2)
    assert spread(same).tolist() == [0, 0]
    assert spread(different).tolist() == pytest.approx([0, math.log(8)])


@pytest.mark.parametrize(("entropy", "kind"), [(math.log(24), "almost uniform"), (0.0, "the same")])
def test_a_collapse_is_reported_once_and_after_the_warm_up(digits, entropy, kind):
    task = ready(dino(), digits).task  # one epoch of warm-up
    values = {"teacher_entropy": [1.0, entropy], "mean_entropy": [2.0, entropy]}
    assert task.warning(values, step=6, steps_per_epoch=3) is None
    warning = task.warning(values, step=7, steps_per_epoch=3)
    assert "round 2 has collapsed" in warning
    assert kind in warning
    assert task.warning(values, step=8, steps_per_epoch=3) is None
    healthy = ready(dino(), digits).task
    assert healthy.warning({"teacher_entropy": [1.0], "mean_entropy": [2.0]}, step=90, steps_per_epoch=3) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ways", [{"compile": "blocks"}, {"cuda_graphs": True}, {"compile": "blocks", "cuda_graphs": True}]
)
def test_recorded_and_compiled_steps_learn_the_same_on_a_gpu(digits, tmp_path, ways):
    torch.compiler.reset()
    gpu = Processes(rank=0, count=1, device=torch.device("cuda", 0))
    short = {"model": {"drop_path": 0.0}, "schedule": {"epochs": 2, "cooldown": 0}}
    for name, options in (("plain", {}), ("other", ways)):
        loop.train(dino(**short, run=options), data=str(digits), out=tmp_path / name, processes=gpu)
    assert_close_losses(tmp_path / "other", tmp_path / "plain", 0.02)


# Local crops and bad input


@pytest.mark.parametrize(
    ("resolutions", "patch", "side", "expected"),
    [
        ([192, 240], 16, 96, [80, 96]),
        ([112, 160], 16, 64, [48, 64]),
        ([224], 16, 96, [96]),
        ([128, 192, 240], 16, 96, [48, 80, 96]),
        ([16, 32], 8, 16, [8, 16]),  # one patch is the smallest
    ],
)
def test_local_crops_are_scaled_with_the_round_to_whole_patches(resolutions, patch, side, expected):
    heads = list(range(1, len(resolutions) + 1))
    config = ModelConfig(rounds=make_rounds(resolutions, heads), heads=heads[-1], patch_size=patch, depth=1)
    assert local_resolutions(config, side) == expected


def test_validation_images_among_the_unlabelled_are_refused(digits):
    with pytest.raises(ValueError, match=r"holds validation images, such as 0/12.png; name a folder without them"):
        ready(dino(task_options={"unlabelled": str(digits / "val")}), digits)


def test_few_images_of_a_micro_batch_tell_nothing_of_a_collapse(digits):
    task = ready(dino(optimizer={"batch": 8}), digits).task
    assert task.warning({"teacher_entropy": [0.0], "mean_entropy": [0.0]}, step=90, steps_per_epoch=3) is None


def test_a_class_with_one_image_is_refused_by_name_if_there_are_no_splits(tmp_path):
    for name, count in (("many", 30), ("single", 1)):
        for number in range(count):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    with pytest.raises(ValueError, match="single"):
        ready(dino(), tmp_path)


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"ema": 0.9}, "set ema=0"),
        ({"augment": {"flip": 0.1}}, "under task_options"),
        ({"mixing": {"smoothing": 0.1}}, "does not read this section"),
        ({"model": {"num_classes": 7}}, "trains no classifier"),
        ({"model": {"merge": [0, 1]}}, "merged after training"),
        ({"task_options": {"global_scale": [0.5, 0.2]}}, "from small to large"),
        ({"task_options": {"colour": [0.1, 0.1, 0.1, 0.7]}}, "at most 0.5"),
        ({"task_options": {"blur": [1.0, 0.1, 1.5]}}, "from 0 to 1"),
        ({"task_options": {"protoypes": 5}}, "prototypes"),
        ({"task_options": {"local_side": 6}}, "are 3 pixels in round 1, smaller than a patch of 8; use at least 16"),
        (
            {"task_options": {"local_side": 15}},
            r"are 7\.5 pixels in round 1, smaller than a patch of 8; use at least 16",
        ),
        ({"task_options": {"k": 50}}, "48 labelled training images, too few for a vote of 50 .*lower task_options.k"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_remedy(digits, sections, remedy):
    with pytest.raises(ValueError, match=remedy):
        ready(dino(**sections), digits)


def test_a_model_that_cannot_run_crops_is_refused(digits):
    fields = {"heads": 2, "depth": 2, "patch_size": 8, "rounds": [{"resolution": 32, "heads": h} for h in (1, 2)]}
    values = dino().model_dump(mode="json")
    values["model"] = {"kind": "thinkingvit", "fields": fields}
    with pytest.raises(ValueError, match=r"needs a model with 'run_at', which ThinkingViT lacks"):
        ready(make_recipe(values, origin="test"), digits)
