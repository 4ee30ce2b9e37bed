import json
from contextlib import suppress

import attacks
import pytest


def test_an_unknown_attack_and_a_wrong_time_are_refused(capsys):
    for words, message in ((["flood"], "unknown attacks: flood; there are pixels, scans,"), (["--seconds", "0"], "0")):
        with pytest.raises(SystemExit):
            attacks.main(words)
        assert message in capsys.readouterr().err


def test_every_request_of_every_attack_can_be_sent():
    for name, (_, make) in attacks.ATTACKS.items():
        requests = make() if make else []
        assert all(body and len(body) <= 16_000_000 and headers for _, body, headers in requests), name


@pytest.mark.slow
def test_a_row_has_what_the_neighbour_and_the_attackers_got(tmp_path):
    out = tmp_path / "attacks.json"
    with suppress(SystemExit):  # a busy machine may take longer than is required
        attacks.main(["formats", "--seconds", "1", "--out", str(out), "--", "--threads", "1"])
    (row,) = json.loads(out.read_text())["rows"]
    assert "415" in row["answers"]
    assert set(row["answers"]) <= {"415", "422", "429", "503"}  # 503: the server stops while it is still attacked
    assert row["neighbour_answers"] >= 1
    assert row["most_mb"] > 100
