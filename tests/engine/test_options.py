"""The options of engines."""

import inspect

import pytest

from progresvit.config import ModelConfig, make_rounds
from progresvit.engine import EmbeddingEngine, Engine, EngineOptions, SegmentationEngine
from progresvit.engine.options import COUNTS, EngineKeywords, TorchKeywords
from progresvit.model import ProgResViT


@pytest.fixture(scope="module")
def model():
    return ProgResViT(ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1, patch_size=8, num_classes=5))


def test_keywords_are_the_fields_of_the_options():
    types = {name: field.type for name, field in EngineOptions.__dataclass_fields__.items()}
    keywords = {name: kind.__forward_arg__ for name, kind in EngineKeywords.__annotations__.items()}
    few = {name: kind.__forward_arg__ for name, kind in TorchKeywords.__annotations__.items()}
    assert keywords == types
    assert few == {name: types[name] for name in few}
    assert set(COUNTS) == {name for name, kind in types.items() if "int" in kind}


def test_every_engine_names_its_keywords_in_its_reference():
    assert all(f"``{name}``" in inspect.getdoc(Engine) for name in EngineKeywords.__annotations__)
    for engine in (EmbeddingEngine, SegmentationEngine):
        assert all(f"``{name}``" in inspect.getdoc(engine) for name in TorchKeywords.__annotations__)


def test_options_and_keywords_make_the_same_engine(model):
    options = EngineOptions(device="cpu", batch=8, top_k=2)
    assert Engine(model, 0.5, options=options).options == Engine(model, 0.5, device="cpu", batch=8, top_k=2).options
    assert Engine(model, 0.5, options=options, batch=4).batch == 4  # the keyword wins
    assert EmbeddingEngine(model, options=EngineOptions(batch=3)).batch == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        Engine(model, 0.5, devise="cpu")


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_are_at_least_one(name):
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0\.$"):
        EngineOptions(**{name: 0})


def test_an_option_that_an_engine_does_not_have_is_refused(model):
    with pytest.raises(ValueError, match=r"EmbeddingEngine has no option kernels=; leave it out\. It has device, prec"):
        EmbeddingEngine(model, options=EngineOptions(kernels="plain"))
    with pytest.raises(ValueError, match="SegmentationEngine has no option top_k="):
        SegmentationEngine(model, top_k=2)
