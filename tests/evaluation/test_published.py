from pathlib import Path

import pytest
import yaml

from progresvit.analysis.routing_figures import frontier_figure
from progresvit.evaluation import frontier_table, read_published
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import make_segmentation_records

FILE = Path(__file__).parents[2] / "repro" / "published.yaml"
SERIES = {
    "method": "ToMe",
    "source": "Bolya et al., 2022, arXiv:2210.09461",
    "comparisons": ["dynamic-tokens"],
    "points": [{"label": "r = 13", "top1": 79.4, "gmacs": 2.7}],
}


def write(folder, *series):
    path = folder / "published.yaml"
    path.write_text(yaml.safe_dump({"series": list(series)}))
    return path


def test_the_repositorys_file_covers_the_papers_four_plots():
    for comparison in ("adaptive-width", "dynamic-tokens", "early-exit", "flexible-resolution"):
        methods = {series.method for series in read_published(FILE, comparison)}
        assert "ProgResViT 192→240" in methods
        assert len(methods) > 2
    everything = {
        (series.method, point.label): (point.top1, point.gmacs)
        for series in read_published(FILE)
        for point in series.points
    }
    assert everything["ProgResViT 192→240", "near-lossless, τ = 0.3505"] == (82.178, 4.467)
    assert everything["ProgResViT 160→384 + KD", "τ = 0"] == (84.902, 16.152)
    assert everything["ThinkingViT 3→6 heads", "τ = 1"] == (80.31, 2.907)
    assert all("arXiv:" in series.source or "github.com" in series.source for series in read_published(FILE))


def test_rows_of_published_results_are_last_and_name_their_source(tmp_path):
    other = {**SERIES, "method": "other", "comparisons": ["early-exit"]}
    published = read_published(write(tmp_path, SERIES, other), "dynamic-tokens")
    records = make_records()
    table = frontier_table({"m": records}, [0.5], published=published)
    *measured, row = table.rows
    assert {"model": "ToMe", "top1": 0.794, "gmacs_published": 2.7, "source": SERIES["source"]}.items() <= row.items()
    assert row["note"] == "published, r = 13"
    assert row["gmacs_paper"] is row["gmacs_executed"] is row["top1_low"] is None  # of another convention, no images
    assert [(one["model"], one["source"]) for one in measured] == [("m", None)] * 2
    plain = frontier_table({"m": records}, [0.5])
    for one, before in zip(measured, plain.rows):
        assert before.items() <= one.items()
    assert "source" not in plain.to_csv()
    assert "2.700" in table.to_markdown()
    assert table.to_csv().splitlines()[-1].endswith(f'"{SERIES["source"]}"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": None}, r"series.0: ToMe has no source; name the paper \(authors, year, arXiv id, table\)"),
        ({"source": ""}, "series.0: ToMe has no source"),
        ({"colour": "red"}, r"series.0.colour: unknown key; .*comparisons"),
        ({"points": []}, "series.0.points: .* at least 1 item"),
        (
            {"points": [{"label": "a", "top1": 0.794, "macs": 2.7}]},
            r"points.0.macs: unknown key; did you mean 'gmacs'\?",
        ),
        ({"points": [{"label": "a", "top1": 794, "gmacs": 2.7}]}, "points.0.top1: .*less than or equal to 100"),
        ({"points": [{"label": "a", "top1": 79.4, "gmacs": "few"}]}, "points.0.gmacs: .*number.*'few'"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path, change, message):
    path = write(tmp_path, {key: value for key, value in {**SERIES, **change}.items() if value is not None})
    with pytest.raises(ValueError, match=message) as error:
        read_published(path)
    assert str(error.value).startswith(str(path))


def test_files_that_are_no_yaml_or_missing_and_unknown_comparisons_are_refused(tmp_path):
    path = tmp_path / "published.yaml"
    with pytest.raises(ValueError, match=r"there are no published results at .*published\.yaml"):
        read_published(path)
    path.write_text("series: [")
    with pytest.raises(ValueError, match=r"is not a file of published results .*it is not YAML"):
        read_published(path)
    path.write_text("- a list")
    with pytest.raises(ValueError, match="it should have sections such as series:"):
        read_published(path)
    with pytest.raises(ValueError, match="no comparison 'early'; did you mean 'early-exit'"):
        read_published(FILE, "early")


def test_published_top1_is_not_shown_beside_miou(tmp_path):
    published, records = read_published(write(tmp_path, SERIES)), make_segmentation_records()
    for show in (frontier_table, frontier_figure):
        with pytest.raises(ValueError, match="published results are top-1 accuracies"):
            show({"m": records}, published=published)
