import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from progresvit.routing import top10_entropy

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


@given(LOGITS)
def test_entropy_of_the_renormalised_top_ten(values):
    logits = torch.tensor([values], dtype=torch.float32)
    top = sorted(torch.softmax(logits[0].double(), dim=0).tolist(), reverse=True)[:10]
    shares = [p / sum(top) for p in top]
    expected = -sum(p * math.log(p) for p in shares if p > 0)
    assert abs(top10_entropy(logits).item() - expected) < 1e-4


@given(LOGITS)
def test_entropy_lies_between_zero_and_ln_ten(values):
    entropy = top10_entropy(torch.tensor([values])).item()
    assert 0 <= entropy <= math.log(10) + 1e-6


def test_equal_logits_are_as_unsure_as_can_be():
    assert torch.allclose(top10_entropy(torch.zeros(2, 1000)), torch.tensor(math.log(10)))
    assert torch.allclose(top10_entropy(torch.zeros(2, 4)), torch.tensor(math.log(4)))


def test_entropy_is_float32_whatever_comes_in():
    logits = torch.randn(4, 100)
    assert top10_entropy(logits.bfloat16()).dtype == torch.float32
    assert torch.equal(top10_entropy(logits.bfloat16()), top10_entropy(logits.bfloat16().float()))


def test_a_class_ruled_out_does_not_poison_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert torch.allclose(top10_entropy(logits), torch.tensor([math.log(2)]))
