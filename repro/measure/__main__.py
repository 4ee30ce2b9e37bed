"""Measures one entry of a study whose commands have run: python repro/measure NAME --runs RUNS --results RESULTS"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from progresvit.io.files import replace_file
from repro.formats import to_json
from repro.measure.entries import measure_entry
from repro.study import STUDY_FILE, Places, entries_of, load_study


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the entry, such as full-42")
    parser.add_argument("--runs", type=Path, required=True, help="folder of models and records")
    parser.add_argument("--results", type=Path, required=True, help=f"results folder; its {STUDY_FILE} is the study")
    options = parser.parse_args()
    try:
        study = load_study(options.results / STUDY_FILE)
        entry = next(entry for entry in entries_of(study) if entry.name == options.name)
        result = measure_entry(study, entry, Places(data="DATA", runs=options.runs), options.results)
        replace_file(options.results / f"{options.name}.json", to_json(result))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
