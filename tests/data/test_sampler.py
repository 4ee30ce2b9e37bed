import pytest

from progresvit.data.sampler import Draw, EpochSampler, mix_seed


def test_an_epoch_shows_every_image_at_most_once_and_the_next_in_another_order():
    order = EpochSampler(count=50, batch=8, seed=1)
    epochs = [
        [index for step in range(epoch * 6, epoch * 6 + 6) for _, part in order.micro_batches(step) for index in part]
        for epoch in range(2)
    ]
    assert order.steps_per_epoch == 6
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_order_follows_from_seed_and_step_alone():
    first, again, other = (list(EpochSampler(count=50, batch=8, seed=seed).micro_batches(4)) for seed in (3, 3, 4))
    assert first == again != other
    assert len({mix_seed(draw, a, b) for draw in Draw for a in range(20) for b in range(20)}) == 400 * len(Draw)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"count": 5, "batch": 8}, "larger than the dataset of 5 images"),
        ({"count": 50, "batch": 8, "processes": 3}, "use a multiple of 3"),
        ({"count": 50, "batch": 9, "accumulate": 2}, "use a multiple of 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(fields, remedy):
    with pytest.raises(ValueError, match=remedy):
        EpochSampler(**fields)
