"""A setting that withholds answers does so wherever the answers are read, and where the best guess stays."""

import json
import re
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from progresvit import Engine
from progresvit.serving.start import make_server
from tests.commands import works
from tests.serving.conftest import Running, in_thread
from tests.serving.test_app import outputs, tensor

CLIENT = Path(__file__).parents[2] / "docs" / "serve.md"


@contextmanager
def served(*models, **options):
    """A server as the command starts it."""
    server = make_server(list(models), port=0, device="cpu", **options)
    with closing(server.service), in_thread(server, server.listening):
        handle = Running(server, server.service)
        with handle.client:
            yield handle
    for service in server.services:
        service.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["careful", "unknown"])
def test_a_withheld_answer_is_no_answer_in_any_response(careful, setting, tmp_path, monkeypatch, capsys):
    folder, withheld, given = careful
    (guess,) = Engine(folder, setting).classify([withheld])
    assert (guess.abstained, guess.out_of_distribution) == (True, setting == "unknown")
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").write_bytes(withheld)

    with served(folder, threshold=setting, names=["nettewoof-tiny"]) as server:
        for query in ({}, {"threshold": 0}, {"threshold": 100}):  # a threshold of its own keeps the limits
            answer = server.classify(withheld, params=query).json()
            assert (answer["label"], answer["index"], answer["probability"], answer["top"]) == (None, None, None, [])
            assert (answer["abstained"], answer["out_of_distribution"]) == (True, setting == "unknown")
        asked = server.classify(withheld, params={"top_k": 1}).json()
        assert (asked["label"], asked["top"][0]["label"]) == (None, guess.label)

        response = server.client.post(
            "/v2/models/nettewoof-tiny/infer", json={"inputs": [tensor(withheld, given, b"%PDF")]}
        )
        answer = outputs(response)
        is_withheld = [True, setting == "unknown", True]
        assert answer["abstained"] == is_withheld
        assert all(value is True or value is False for value in answer["abstained"])
        assert {part["name"]: part["datatype"] for part in response.json()["outputs"]}["abstained"] == "BOOL"
        assert [not label for label in answer["label"]] == is_withheld
        assert [not probability for probability in answer["probs"]] == is_withheld

        (setting_of_page,) = [
            item for item in server.client.get("/page/model").json()["settings"] if item["name"] == setting
        ]
        assert server.client.get("/page/model").json()["withheld"] == setting_of_page["withheld"]
        assert [kind for kind, limit in setting_of_page["withheld"].items() if limit is not None] == [
            "ood" if setting == "unknown" else "entropy"
        ]

        (client,) = re.findall(r"```python\n(import base64.*?)```", CLIENT.read_text(encoding="utf-8"), re.DOTALL)
        exec(client.replace("http://127.0.0.1:8000", server.address), {})
        assert capsys.readouterr().out.strip() == "no answer"

    words = ("classify", "photo.jpg", "--model", folder, "--threshold", setting)
    shown = " ".join(works(*words).split())
    assert ("none of" if setting == "unknown" else "none (class") in shown
    line = json.loads(works(*words, "--json").splitlines()[0])
    works(*words, "--out", "answers.jsonl")
    row = json.loads(Path("answers.jsonl").read_text(encoding="utf-8"))
    assert line["abstained"] is row["abstained"] is True
    assert line["label"] == row["label"] == guess.label  # tables keep the best guess


def test_an_answer_that_is_not_withheld_is_given(careful):
    folder, _, given = careful
    (expected,) = Engine(folder, "careful").classify([given])
    with served(folder, threshold="careful") as server:
        answer = server.classify(given).json()
    assert (answer["label"], answer["index"], answer["abstained"]) == (expected.label, expected.index, False)
    assert (answer["probability"], answer["top"]) == (pytest.approx(expected.probability), [])


@pytest.mark.slow
def test_a_request_may_ask_for_more_or_fewer_classes_than_the_server_reports(careful):
    folder, _, given = careful
    (expected,) = Engine(folder, "careful", top_k=10).classify([given])
    with served(folder, threshold="careful", top_k=3) as server:
        for query, count in (({}, 3), ({"top_k": 1}, 1), ({"top_k": 10}, 10)):
            top = server.classify(given, params=query).json()["top"]
            assert [item["index"] for item in top] == [candidate.index for candidate in expected.top[:count]]
            assert [item["label"] for item in top] == [candidate.label for candidate in expected.top[:count]]
        refused = server.classify(given, params={"top_k": 11})  # of 12 classes
        assert (refused.status_code, refused.json()) == (400, {"error": "top_k must be at most 10."})
    with served(folder, top_k=12, threshold=0.5) as server:
        assert len(server.classify(given, params={"top_k": 12}).json()["top"]) == 12
