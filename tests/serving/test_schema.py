"""Requests that are made from the OpenAPI description, valid and not: no answer is a 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from progresvit.serving.service import Limits
from tests.serving.conftest import running


@pytest.fixture(scope="module")
def server(served_model):
    with running(served_model, 1.0, limits=Limits(body=200_000, images=4, receive=1.0)) as handle:
        yield handle


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "tiny"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_answered_with_a_server_error(server, mode, model):
    statuses = {}
    for result in schemathesis.openapi.from_url(f"{server.address}/openapi.json").get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # every string is a valid name of a model

        @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            if model is not None and "model" in (case.path_parameters or {}):
                case.path_parameters["model"] = model
            status = case.call().status_code
            assert status < 500 or status == 504  # the request has a short timeout
            statuses.setdefault(case.operation.label, set()).add(status)

        check()
    assert len(statuses) >= 3
    reached = set().union(*(statuses[label] for label in statuses if "infer" in label))
    assert reached <= {200, 400, 404, 413, 415, 422, 504}
    if model is not None:
        assert reached - {404}, "no request has reached the model"
