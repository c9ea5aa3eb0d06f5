"""What the commands over forms share: their options, and from a form's pictures to its record and its table."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.largebatch.ablation_cases import Form
from benchmarks.largebatch.ablation_data import missing_split, write_images
from benchmarks.record import conditions, write_record_and_table
from bigbatch.errors import UserError


def form_parser(text: str | None, forms: Iterable[tuple[str, str]], *, runs: str) -> argparse.ArgumentParser:
    """Make a parser that asks for one of some forms, where its pictures are, and where results go."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    datasets, names = (sorted(set(some)) for some in zip(*forms, strict=True))
    parser.add_argument("--dataset", choices=datasets, required=True)
    parser.add_argument("--form", choices=names, required=True)
    parser.add_argument("--data", type=Path, help="folder with train and val of the data set (default: data/DATASET)")
    parser.add_argument("--runs", type=Path, default=Path(runs), help="folder of everything written")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser


def chosen_form(options: argparse.Namespace, forms: Mapping[tuple[str, str], Form]) -> Form:
    """Return the form of the data set that the options name; exit where there is none."""
    if (options.dataset, options.form) not in forms:
        known = ", ".join(name for dataset, name in forms if dataset == options.dataset)
        sys.exit(f"{options.dataset} has no form {options.form}: choose --form {known}")
    return forms[options.dataset, options.form]


def form_folder(options: argparse.Namespace) -> Path:
    """Name the folder of a form's pictures and runs."""
    folder: Path = options.runs / f"{options.dataset}-{options.form}"
    return folder.resolve()


def record_form(
    options: argparse.Namespace,
    form: Form,
    *,
    benchmark: str,
    measure: Callable[[Form, Path], dict[str, Any]],
    table: Callable[..., str],
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a form's pictures, measure, and write record and table; without its data set say what is skipped.

    facts: conditions beside those of every benchmark.
    """
    source = options.data or Path("data", options.dataset)
    if missing := missing_split(source):
        how = "generate" if options.dataset == "shapes" else "prepare"
        print(f"skipped: {missing} is not there; bigbatch data {how} makes it, --data names another folder")
        return
    stated = {**conditions(options), **(facts or {})}
    folder = form_folder(options)
    try:
        write_images(form.images, source, folder / "data")
        results = measure(form, folder)
    except UserError as error:
        sys.exit(f"{benchmark}.py: {error}")
    text = table(results, title=f"{options.dataset}, form {options.form}")
    print(text)
    write_record_and_table(options.out, {"benchmark": benchmark, "conditions": stated, **results}, text)
