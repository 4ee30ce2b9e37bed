"""Requests that are made from the OpenAPI description, valid and not: no answer is a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from progresvit.serving.service import Limits
from tests.serving.conftest import running


@pytest.fixture(scope="module")
def address(served_model):
    with running(served_model, 1.0, limits=Limits(body=200_000, images=4, receive=1.0)) as server:
        yield server.address


@pytest.fixture(scope="module")
def described(address):
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")
CHECKS = [not_a_server_error]


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_answered_with_a_server_error(case):
    case.call_and_validate(checks=CHECKS)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_model_itself_meets_wrong_bodies(case):
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = "tiny"
    case.call_and_validate(checks=CHECKS)
