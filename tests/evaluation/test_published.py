from pathlib import Path

import pytest
import yaml

from progresvit.analysis.routing_figures import frontier_figure
from progresvit.evaluation import frontier_table, read_published
from tests.evaluation.made import make_records, of_imagenet
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
    records = of_imagenet(make_records())
    table = frontier_table({"m": records}, [0.5], published=published)
    *measured, row = table.rows
    assert {"model": "ToMe", "top1": 0.794, "gmacs_published": 2.7, "source": SERIES["source"]}.items() <= row.items()
    assert row["note"] == "published, r = 13"
    assert row["gmacs_paper"] is row["gmacs_executed"] is row["top1_low"] is None  # of another convention, no images
    assert [(row["model"], row["source"]) for row in measured] == [("m", None)] * 2
    plain = frontier_table({"m": records}, [0.5])
    for with_source, before in zip(measured, plain.rows):
        assert before.items() <= with_source.items()
    assert "source" not in plain.to_csv()
    assert "2.700" in table.to_markdown()
    assert table.to_csv().splitlines()[-1].endswith(f'"{SERIES["source"]}"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": None}, r"series.0: ToMe has no source; name the paper \(authors, year, arXiv id, table\)"),
        ({"source": ""}, "series.0: ToMe has no source"),
        ({"colour": "red"}, "series.0.colour: unknown key; did you mean 'source'"),
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
    assert "{'" not in str(error.value)  # no second problem of the list, with its content


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


@pytest.mark.parametrize(
    ("fields", "classes"),
    [
        ({"config": make_records().header.config}, "12 classes"),
        ({"classes": tuple(range(200))}, "200 classes"),
        ({"probe": {"task": "knn", "classes": list("0123456789")}}, "10 classes"),
        ({"probe": {"task": "knn", "classes": [f"n{number:08}" for number in range(1000)]}}, "such as n00000000"),
    ],
)
def test_published_results_are_not_shown_beside_other_classes(tmp_path, fields, classes):
    published, records = read_published(write(tmp_path, SERIES)), of_imagenet(make_records(), **fields)
    for show in (frontier_table, frontier_figure):
        with pytest.raises(ValueError, match=f"1000 classes, and m was evaluated on .*{classes}; leave"):
            show({"m": records}, published=published)
        show({"m": records})


def test_images_that_are_not_the_whole_validation_set_are_noted(tmp_path):
    published = read_published(write(tmp_path, SERIES))
    models = {"all": of_imagenet(make_records()), "foggy": of_imagenet(make_records(), corruption="fog/3")}
    models["some"] = of_imagenet(make_records(), images=10_000)
    note = "measured on 50,000 images (fog/3), 10,000 images, published on 50,000"
    assert note in frontier_table(models, [0.5], published=published).title
    assert note in frontier_figure(models, published=published).axes[0].get_xlabel()
    del models["foggy"], models["some"]
    assert "measured on" not in frontier_table(models, [0.5], published=published).title
    assert "measured on" not in frontier_figure(models, published=published).axes[0].get_xlabel()
