"""``progresvit report``: the page with its figures and tables, with and without images, and what is refused."""

import base64
import csv
import errno
import hashlib
import io
import re
import shutil
import tarfile
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from progresvit.analysis.records_report import FILES
from progresvit.data.crop import crop
from progresvit.evaluation import read_records, write_records, write_segmentation_records
from progresvit.evaluation.answers import route
from progresvit.metrics.interval import share_interval
from tests.commands import refused, works
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import make_segmentation_records


@pytest.fixture
def evaluated(model, digits, tmp_path):
    """Records of a model of random weights on 24 digits: most answers are wrong."""
    table = tmp_path / "val.parquet"
    works("evaluate", model, "--data", digits, "--out", table, "--workers", 0, "--device", "cpu")
    return table


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def thumbnails(page):
    """Images of the gallery in a page."""
    images = re.findall(r'<li class="card"[^>]*><img alt="" src="data:image/jpeg;base64,([^"]+)">', page)
    return [Image.open(io.BytesIO(base64.b64decode(image))) for image in images]


def test_a_page_with_figures_tables_and_a_gallery_of_errors(evaluated, digits, tmp_path):
    out = tmp_path / "report"
    output = works("report", evaluated, "--data", digits, "--out", out, "--errors", 5, "--threshold", 1.3)
    records = read_records(evaluated)
    answers = route(records, 1.3)
    assert len(answers.errors) > 5
    routed = share_interval(int(answers.correct.sum()), 24)
    assert f"routed {routed.as_percent()} (95% intervals)" in output
    assert {path.name for path in out.iterdir()} == set(FILES)
    page = (out / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<h2 id="(\w+)">', page) == ["accuracy", "classes", "confusion", "exits", "errors"]
    assert "Routed at the threshold 1.3 (given)." in page
    assert f"24 images of 4 classes from {digits}, split val." in page
    for name in ("classes", "confusion", "exits", "errors"):
        assert Image.open(out / f"{name}.png").format == "PNG"
    (accuracy,) = [row for row in read(out / "accuracy.csv") if row["answers"] == "routed"]
    assert float(accuracy["top1_low"]) == routed.lowest
    assert [row["images"] for row in read(out / "classes.csv")] == ["6"] * 4
    assert sum(int(row["count"]) for row in read(out / "confusion.csv")) == len(answers.errors)
    errors = read(out / "errors.csv")
    assert [row["image"] for row in errors] == records.ids[answers.errors[:5]].tolist()
    shown = thumbnails(page)
    assert [image.size for image in shown] == [(32, 32)] * 5
    for image, row in zip(shown, errors):
        expected = crop(Image.open(digits / row["image"]).convert("RGB"), records.config)
        differences = np.asarray(image.convert("RGB"), np.int16) - expected.transpose(1, 2, 0)
        assert np.abs(differences).mean() < 6  # what the model saw, as a JPEG
        assert row["image"] in page


def test_without_data_the_errors_have_no_thumbnails_and_the_page_names_the_option(evaluated, digits, tmp_path):
    out = tmp_path / "report"
    works("report", evaluated, "--out", out, "--errors", 7)
    page = (out / "index.html").read_text(encoding="utf-8")
    assert f"For thumbnails, pass the evaluated images: {digits}." in page
    assert thumbnails(page) == []
    assert "near-lossless, chosen on these images" in page
    answers = route(read_records(evaluated))
    assert len(answers.errors) > 7
    assert f"The 7 most confident of {len(answers.errors)} wrong answers." in page
    assert page.count('<li class="card"') == len(read(out / "errors.csv")) == 7
    assert not (out / "errors.png").exists()


def test_images_that_are_missing_or_unreadable_are_reported_and_the_others_shown(evaluated, digits, tmp_path):
    copy = shutil.copytree(digits, tmp_path / "copy")
    records = read_records(evaluated)
    errors = records.ids[route(records).errors[:4]].tolist()
    (copy / errors[0]).unlink()
    (copy / errors[2]).write_text("no image")
    out = tmp_path / "report"
    output = works("report", evaluated, "--data", copy, "--out", out, "--errors", 4)
    assert f"no image: {errors[0]}: not in the data" in output
    assert f"no image: {errors[2]}: not an image" in output
    page = (out / "index.html").read_text(encoding="utf-8")
    assert len(thumbnails(page)) == 2
    assert page.count('<li class="card"') == 4
    assert f"Without an image: {errors[0]}: not in the data; {errors[2]}: not an image" in page


def test_other_data_is_refused_with_the_data_that_was_evaluated(evaluated, digits, tmp_path):
    other = tmp_path / "other"
    (other / "val" / "0").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(other / "val" / "0" / "mine.png")
    out = tmp_path / "report"
    refused(f"--data {digits} --split val", "report", evaluated, "--data", other, "--out", out)
    refused("no images under none/", "report", evaluated, "--data", digits, "--split", "none", "--out", out)
    refused("nowhere", "report", evaluated, "--data", tmp_path / "nowhere", "--out", out)
    refused("--split is for the images of --data", "report", evaluated, "--split", "val", "--out", out)
    assert not out.exists()


def test_images_in_a_tar_are_found(evaluated, digits, tmp_path):
    with tarfile.open(tmp_path / "digits.tar", "w") as tar:
        tar.add(digits, arcname=".")
    works("report", evaluated, "--data", tmp_path / "digits.tar", "--out", tmp_path / "report", "--errors", 3)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert len(thumbnails(page)) == 3


@pytest.mark.long
def test_an_earlier_report_is_kept_unless_overwriting_is_asked_for_and_other_files_always(
    evaluated, digits, tmp_path, monkeypatch
):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "report"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    works("report", evaluated, "--data", digits, "--out", out)
    before = (out / "index.html").read_bytes()
    refused("index.html already exists; use --overwrite", "report", evaluated, "--out", out, "--errors", 2)
    assert (out / "index.html").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", no_space)
        refused("No space left", "report", evaluated, "--out", out, "--overwrite")
    assert (out / "index.html").read_bytes() == before
    assert (out / "errors.png").exists()
    works("report", evaluated, "--out", out, "--overwrite")
    assert not (out / "errors.png").exists()  # of the earlier report
    assert (out / "notes.txt").read_text() == "mine"


def test_wrong_files_and_folders_are_refused_in_a_line(evaluated, tmp_path):
    (tmp_path / "text.parquet").write_text("no records")
    (tmp_path / "file").write_text("mine")
    out = ("--out", tmp_path / "report")
    refused("text.parquet", "report", tmp_path / "text.parquet", *out)
    refused("none.parquet", "report", tmp_path / "none.parquet", *out)
    refused("file is a file; name a folder", "report", evaluated, "--out", tmp_path / "file")
    refused("name a folder. The page in it is index.html", "report", evaluated, "--out", tmp_path / "page.html")
    write_records(make_records(20, labelled=False), tmp_path / "unlabelled.parquet")
    refused("20 of 20 images in these records have no label", "report", tmp_path / "unlabelled.parquet", *out)
    write_segmentation_records(make_segmentation_records(20), tmp_path / "maps.parquet")
    refused("evaluate prints the IoU of each class", "report", tmp_path / "maps.parquet", *out)
    assert not (tmp_path / "report").exists()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_setting_of_the_model_is_found_by_its_name(model, evaluated, tmp_path):
    (model / "settings").mkdir()
    works("calibrate", evaluated, "--exit-share", 0.5, "--out", model / "settings" / "half.json")
    works("report", evaluated, "--out", tmp_path / "report", "--threshold", "half")
    share = [float(row["exit_1"]) for row in read(tmp_path / "report" / "exits.csv")]
    assert np.mean(share) == pytest.approx(0.5)  # classes of equal size
    works("trust", evaluated, "--threshold", "half")
    words = ("report", "--out", tmp_path / "r", "--threshold")
    refused("has no setting 'careful' (it has half)", *words, "careful", evaluated)
    write_records(make_records(50), tmp_path / "made.parquet")
    refused("--threshold takes a number", *words, "half", tmp_path / "made.parquet")


def test_a_class_with_one_image_and_classes_with_none(tmp_path):
    records = make_records(60)
    first = int(records.labels[0])
    kept = np.flatnonzero((records.labels > 3) & (records.labels != first))
    few = records.take(np.concatenate([[0], kept]))
    write_records(few, tmp_path / "r.parquet")
    works("report", tmp_path / "r.parquet", "--out", tmp_path / "report")
    rows = {row["class"]: row for row in read(tmp_path / "report" / "classes.csv")}
    single = rows[f"class {first}"]
    assert single["images"] == "1"
    width = float(single["top1_routed_high"]) - float(single["top1_routed_low"])
    assert width == pytest.approx(0.793, abs=1e-3)
    absent = [n for n in range(4) if n != first]
    assert all((rows[f"class {n}"]["images"], rows[f"class {n}"]["top1_routed"]) == ("0", "") for n in absent)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    named = ", ".join(f"class {n}" for n in absent)
    assert f"{len(absent)} of the model&#x27;s classes have no image here and no accuracy: {named}." in page


@pytest.mark.slow
def test_rounds_that_are_alternatives_have_no_exits_and_a_single_image_is_enough(tmp_path):
    records = make_records(30)
    write_records(replace(records, header=replace(records.header, routable=False)), tmp_path / "r.parquet")
    output = works("report", tmp_path / "r.parquet", "--out", tmp_path / "report")
    assert "skipped: exits: its rounds are alternatives" in output
    assert "routed" not in output
    assert not (tmp_path / "report" / "exits.csv").exists()
    write_records(records.take(np.arange(1)), tmp_path / "one.parquet")
    assert "(95% intervals)" in works("report", tmp_path / "one.parquet", "--out", tmp_path / "one")


HOSTILE = (
    "</script><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "<img src=x onerror=alert(1)>",
    "a\u202eb\x1b[31m\x00",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A report whose model, classes and images have names that attack a page."""
    folder, records = tmp_path_factory.mktemp("hostile"), make_records(80)
    labels = [f"{HOSTILE[number % 4]} {number}" for number in range(12)]
    header = replace(
        records.header, config={**records.header.config, "labels": labels}, model=HOSTILE[0], data=HOSTILE[1]
    )
    ids = np.array([f"{HOSTILE[number % 4]}/{number}.jpg" for number in range(80)])
    write_records(replace(records, header=header, ids=ids), folder / "r.parquet")
    works("report", folder / "r.parquet", "--out", folder / "report")
    return folder / "report" / "index.html"


@pytest.mark.slow
def test_names_are_text_and_not_html(hostile):
    page = hostile.read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert not re.search(r"<img (?!class|alt)", page)
    assert not re.search(r'" onmouseover', page)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", page)
    assert "&lt;img src=x onerror=alert(1)&gt; 2" in page
    assert r"a\u202eb\x1b[31m\x00 3" in page


@pytest.mark.slow
def test_a_report_needs_no_other_file_and_runs_no_other_script(evaluated, digits, tmp_path):
    works("report", evaluated, "--data", digits, "--out", tmp_path / "report", "--errors", 3)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in page
    assert "default-src 'none'; img-src data:;" in page
    assert {link.partition(",")[0] for link in re.findall(r'(?:src|href)="(data:[^"]*)"', page)} <= {
        *("data:image/svg+xml", "data:image/png;base64", "data:image/jpeg;base64")
    }
    others = [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith(("data:", "#"))]
    assert set(others) <= set(FILES)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@contextmanager
def opened(browser, path):
    """The page; it must load no other file and report no error."""
    page, loaded, problems = browser.new_page(), set(), []
    page.on("request", lambda request: loaded.add(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))  # what the policy of the page refuses
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert {url for url in loaded if not url.startswith("data:")} == {path.as_uri()}
    assert problems == []


@pytest.mark.slow
def test_errors_are_filtered_and_ordered_and_arrow_keys_move_between_them(browser, evaluated, digits, tmp_path):
    works("report", evaluated, "--data", digits, "--out", tmp_path / "report", "--threshold", 1.3)
    answers = route(read_records(evaluated), 1.3)
    ids, labels = (column[answers.errors].tolist() for column in (answers.records.ids, answers.records.labels))
    of_class = [name for name, label in zip(ids, labels) if label == labels[0]]
    with opened(browser, tmp_path / "report" / "index.html") as page:

        def shown():
            return [card.split("\n")[-1] for card in page.locator(".card:visible").all_inner_texts()]

        assert shown() == ids
        page.select_option("select[data-order]", "reverse")
        assert shown() == ids[::-1]
        page.get_by_label("class").select_option(label=f"{answers.class_names[labels[0]]} ({len(of_class)})")
        assert shown() == of_class[::-1]
        assert page.locator(".count").inner_text().startswith(f"{len(of_class)} of {len(ids)} shown")
        page.get_by_text("show all", exact=True).click()
        assert shown() == ids
        page.keyboard.press("Tab")  # from the button to the first error
        for key, at in (("ArrowRight", 1), ("ArrowLeft", 0), ("End", -1), ("ArrowRight", -1), ("Home", 0)):
            page.keyboard.press(key)
            assert page.locator(".card:focus").inner_text().split("\n")[-1] == ids[at]


@pytest.mark.slow
def test_a_browser_runs_nothing_of_hostile_names(browser, hostile):
    with opened(browser, hostile) as page:
        assert page.locator(".card").count() > 10
        page.get_by_label("class").select_option(index=1)
        assert 0 < page.locator(".card:visible").count() < page.locator(".card").count()
        assert page.title() == f"Report of {HOSTILE[0]}"
        assert page.locator("script").count() == 1
