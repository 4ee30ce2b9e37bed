"""Tables hold what the results hold, and what follows from the bits."""

import numpy as np
import pytest

from repro import routing_tables, shift, tables
from repro.compare import Difference
from repro.store import read_results
from repro.tables import interval, percent, signed


@pytest.fixture(scope="module")
def results(made):
    return read_results(made)


def table(markdown):
    """Rows by head, and the heads; of two equal heads the last counts."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    heads, _, *cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(heads, row)) for row in cells], heads


def narrowed(result, reach):
    """With intervals so wide of the first two routers; the third stays as it is."""

    def narrow(one):
        gains = np.subtract(one.router_top1, one.entropy_top1)
        return one.model_copy(update={"lowest": tuple(gains - reach), "highest": tuple(gains + reach)})

    first, second, third = result.matched
    return result.model_copy(update={"matched": (narrow(first), narrow(second), third)})


def test_routers_help_only_where_corrected_intervals_say_so(results):
    result = results.routing["routing"]
    assert routing_tables.router_verdict(result) == "whether it helps is inconclusive"
    # the gain is 0.003 at most; intervals of 33 gains are 1.62 times as wide
    assert routing_tables.router_verdict(narrowed(result, 0.003 / 1.55)) == "where it helps is inconclusive"
    assert routing_tables.router_verdict(narrowed(result, 0.003 / 1.65)) == (
        "benefit, fitted on half of the held-out images: helps at 50 %"
    )
    assert routing_tables.router_verdict(narrowed(result, 0.0006)).startswith(
        "benefit, fitted on training images: harms at 50 %; benefit, fitted on half of the held-out images: helps at"
    )


def test_a_setting_that_not_every_corruption_has_is_left_out(results):
    full = results.shift["shift_both-full"]
    assert shift.mean_at(full, 3, "drop-1").setting == "drop-1"
    assert shift.mean_at(full, 3, "drop-2") is None
    sets = [one for one in full.sets if one.severity == 3]
    ats = [next(at for at in one.at if at.setting == "drop-1") for one in sets]
    repaired = sum(at.top1 - one.top1[0] for one, at in zip(sets, ats))
    continuing = sum(at.exit_shares[1] for at in ats)
    assert shift.refined_gain(full, 3, "drop-1") == pytest.approx(repaired / continuing)
    with pytest.raises(ValueError, match="has no setting drop-2 at severity 3"):
        shift.refined_gain(full, 3, "drop-2")
    assert shift.mean_at(results.shift["shift_both-plain"], 3, "drop-1") is None


def test_words_go_left_numbers_right_and_empty_columns_are_left_out():
    made = tables.table("t", ["<name", "n", "never"], [["x|y", "1", None], ["z", None, None]])
    assert made == "t\n\n| name | n |\n| --- | ---: |\n| x\\|y | 1 |\n| z | – |\n"
    assert tables.folded(made).startswith("<details><summary>t</summary>\n\n| name | n |\n")
    assert tables.folded(made).endswith("| z | – |\n\n</details>")


def test_how_numbers_are_written():
    assert percent(-0.00001) == "0.0"
    assert signed(-0.0001) == "0.0"
    assert signed(-0.012) == "−1.2"
    assert interval(Difference(mean=0.004, lowest=-0.003, highest=0.011)) == "+0.4 (−0.3 to +1.1)"
    small = Difference(mean=-0.01234, lowest=-0.02, highest=0.00001)
    assert interval(small, 4, scale=1) == "−0.0123 (−0.0200 to 0.0000)"
    assert tables.gmacs(0.00123) == "0.00123"
    assert tables.each([0.5, 0.25], " / ") == "50.0 / 25.0"
