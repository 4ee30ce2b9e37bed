"""A new user's way with the lines of README.md alone: train, classify, evaluate, calibrate, classify, serve."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.training.test_own_images import make_images

ROOT = Path(__file__).parent.parent


def lines_of_the_readme():
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own images")[2]
    return [line.partition("#")[0].split() for line in section.split("```")[1].strip().splitlines()]


@pytest.mark.long
def test_the_lines_of_the_readme_lead_from_a_folder_of_images_to_a_server(tmp_path):
    images = make_images(tmp_path / "images", 6)
    image = (images / "luna" / "0.png").read_bytes()
    (tmp_path / "new.jpg").write_bytes(image)
    lines = lines_of_the_readme()
    assert [words[:2] for words in lines] == [
        ["progresvit", name] for name in ("train", "classify", "evaluate", "calibrate", "classify", "serve")
    ]
    *commands, server = ([sys.executable, "-m", *words] for words in lines)
    here = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "text": True}
    shown = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, check=False, **here)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout + done.stderr)
    assert "use it: progresvit classify IMAGES --model runs/own/model\n" in shown[0]
    assert "near-lossless on 3 validation images, not certified" in shown[0]
    for output in (shown[1], shown[4]):
        assert "1 image: " in output
        assert "note:" not in output
    assert "near-lossless on 3 validation images, not certified" in shown[1]
    assert "wrote runs/own/model/settings/exit-0.5.json\n" in shown[3]
    assert "calibrated by the rule exit-share on 3 images" in shown[4]
    process = subprocess.Popen([*server, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **here)
    try:
        address = re.fullmatch(r"model at (http://\S+)\n", process.stdout.readline())[1]
        answer = httpx.post(f"{address}/classify", files={"image": image}, timeout=60)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "note:" not in errors
