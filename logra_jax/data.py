r"""python -m logra_jax.data SOURCE [SOURCE ...] --out FOLDER: published question files, made ready to train on.

SOURCE is a JSONL, Parquet or JSON file, a folder of them, or the name of a data set on the Hugging Face hub
(openai/gsm8k). FOLDER gets train.jsonl (and heldout.jsonl) with the columns prompt, answer, id and a few more, and
report.json: what was read, kept and dropped, and why. The same question, up to case and spacing, is kept once, and is
never on both sides. Layouts are told from their columns:

    gsm8k   question, answer that ends in `#### 18`
    math    problem, solution with a last \boxed{}, or answer (MATH, MATH-500; also a folder of one JSON file each)
    dapo    prompt, reward_model.ground_truth (DAPO-Math-17k); its request for "Answer: ..." is taken off
    plain   prompt, answer; or the columns that you name
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logra_jax import cli
from logra_jax.errors import UserError
from logra_jax.rl.layouts import Columns, Question, Unusable, choose, normal
from logra_jax.rl.prompts import parse, read_rows
from logra_jax.rl.reward import INTEGER, make_reward
from logra_jax.rl.tasks import is_mixture

TRAIN, HELD_OUT, REPORT = "train.jsonl", "heldout.jsonl", "report.json"
SUFFIXES = (".parquet", ".jsonl", ".json")
GOLD_SECONDS = 5.0  # for the grader to read a reference answer
SHOWN = 5  # examples of a reason on the console; the report has all


@dataclass
class Kept:
    """A question that is kept so far: its own places, and other answers that its repetitions gave."""

    question: Question
    file: str
    row: int
    repeated: dict[str, list[int]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.file}: row {self.row}"


@dataclass
class Side:
    """The questions of one side by their normal text, and what was read and dropped on the way."""

    kept: dict[str, Kept] = field(default_factory=dict)
    read: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, reason: str, text: str, **more: Any) -> None:
        """Keep a question no longer, with its repetitions, and write down why."""
        kept = self.kept.pop(text)
        more |= {} if kept.question.id is None else {"id": kept.question.id}
        more |= {"repeated": kept.repeated} if kept.repeated else {}
        self.dropped.append({"reason": reason, "place": kept.place, **more})


def main(argv: Sequence[str] | None = None) -> int:
    """Read, check and write; the report goes to standard output too. Raises UserError before anything is written."""
    found = _parser().parse_args(argv)
    out = Path(found.out)
    if out.exists():
        raise UserError(f"--out {out} exists: nothing is overwritten, choose another folder")
    if found.held_out is not None and found.test is not None:
        raise UserError("--held-out splits the sources and --test brings a file of its own: give one of them")
    if found.held_out is not None and not 0 < found.held_out < 1:
        raise UserError(f"--held-out must be a fraction between 0 and 1, found {found.held_out}")
    columns = Columns(found.prompt_column, found.answer_column, found.id_column, found.extract)
    layout = found.layout if columns == Columns() else "plain"  # naming columns is asking for it
    _refuse_idle(found, layout)
    train = read(found.sources, layout, columns, found.subset, found.split)
    test = read([found.test] if found.test else [], None, columns, found.subset, found.test_split)
    others = read(found.subtract, None, columns, found.subset, None).kept
    for side in (train, test):
        drop_contradictions(side)
        if found.bad_gold != "keep":
            drop_unreadable(side, found.bad_gold)
    subtract(train, test.kept, "in the held-out file")
    subtract(train, others, "in a subtracted file")
    subtract(test, others, "in a subtracted file") if found.test else None
    if found.held_out is not None:
        test = split(train, found.held_out, found.seed or 0)
    report = make_report(train, test)
    if not train.kept:
        alone = any(entry["layout"] == "gsm8k" for entry in train.read)
        hint = "\nanswers that stand alone, without ####: --prompt-column question" if alone else ""
        raise UserError(f"no question is left: {describe(report)}{hint}")
    names = short_names(kept.file for side in (train, test) for kept in side.kept.values())
    sides = {TRAIN: to_rows(train, names)} | ({HELD_OUT: to_rows(test, names)} if found.test or found.held_out else {})
    check_ids(sides)
    if any(not rows for rows in sides.values()):
        advice = ": a larger --held-out takes more" if found.held_out else ""
        raise UserError(f"no question is held out{advice}\n{describe(report)}")
    write(out, sides, report)
    print(describe(report), *(f"wrote {out / name}" for name in (*sides, REPORT)), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m logra_jax.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="file, folder, or name on the Hugging Face hub")
    add("--out", required=True, metavar="FOLDER", help="folder to write, which must not exist")
    add("--layout", choices=["gsm8k", "math", "dapo", "plain"], help="refuse sources of another layout")
    add("--prompt-column", default="prompt", help="plain: column of the question; a.b reaches into column a")
    add("--answer-column", default="answer", help="plain: column of the answer")
    add("--id-column", help="plain: column of the id; without one, ids are made of file and row")
    add("--extract", default="none", choices=["none", "hash", "boxed"], help="plain: the answer within its column")
    add("--subset", help="folder or hub: take the files in folders of this name (main)")
    add("--split", help="folder or hub: take the files whose name, or folder, begins so (train)")
    add("--held-out", type=float, metavar="FRACTION", help="hold out this share, chosen by a hash of the question")
    add("--seed", type=int, help="of that choice (default: 0)")
    add("--test", metavar="SOURCE", help="hold out this file instead; its questions leave the sources")
    add("--test-split", metavar="SPLIT", help="what --split is for the sources, for --test")
    add(
        "--subtract",
        action="append",
        default=[],
        metavar="SOURCE",
        help="questions to take out of everything; may be repeated",
    )
    add(
        "--bad-gold",
        default="drop",
        choices=["drop", "error", "keep"],
        help="answers that reward.kind=math cannot read: drop them (default), refuse the file, or do not look",
    )
    return parser


def _refuse_idle(found: argparse.Namespace, layout: str | None) -> None:
    """Raises UserError for options that would do nothing."""
    if found.layout not in (None, layout):
        raise UserError(f"--layout {found.layout} knows its columns: leave --*-column and --extract out")
    if found.seed is not None and found.held_out is None:
        raise UserError("--seed is of --held-out, which is not given: leave it out")
    test = [found.test] if found.test else []
    everything = [*found.sources, *test, *found.subtract]
    for option, given, sources in (
        ("subset", found.subset, everything),
        ("split", found.split, found.sources),
        ("test-split", found.test_split, test),
    ):
        if given is not None and all(Path(source).expanduser().is_file() for source in sources):
            needs = "--test names none" if option == "test-split" else "none is named"
            raise UserError(f"--{option} chooses among the files of a folder, and {needs}: leave it out")


def find_files(source: str, subset: str | None, split: str | None) -> list[Path]:
    """The files behind a SOURCE. Raises UserError, also where the hub would have to be asked and cannot be."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        path = _fetch(source)
    if not path.is_dir():
        raise UserError(f"{source}: no such file or folder (current directory: {Path.cwd()})")
    inside = {p: p.relative_to(path) for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES and p.is_file()}
    inside = {p: r for p, r in inside.items() if not any(part.startswith(".") for part in r.parts)}
    tables = {p: r for p, r in inside.items() if p.suffix.lower() != ".json"}
    inside = tables or inside  # data sets bring JSON files that say something about them
    if subset is not None:
        inside = {p: r for p, r in inside.items() if subset in r.parts[:-1]}
    if split is not None:
        inside = {p: r for p, r in inside.items() if any(part.startswith(split) for part in r.parts)}
    if not inside:
        kinds = ", ".join(SUFFIXES)
        raise UserError(f"{source}: no {kinds} file in it in subset {subset}, split {split}")
    for option, given, names in (
        ("--subset", subset, {str(r.parent) for r in inside.values() if r.suffix.lower() == ".parquet"}),
        (
            "--split (of --test: --test-split)",
            split,
            {m[0] for r in inside.values() if (m := re.match(r"train|test|validation|dev", r.name))},
        ),
    ):
        if given is None and len(names) > 1:
            held = ", ".join(sorted(names))
            raise UserError(f"{source}: holds {held}: choose one by {option}, or name its files")
    return list(inside)


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in SUFFIXES]))
    except Exception as error:  # whatever the network, the hub or its library come up with
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name}: no such folder here, and it cannot be had from the Hugging Face hub: {reason}. Where there is a "
            f"network, `hf download --repo-type dataset {name} --local-dir FOLDER`, and give FOLDER"
        ) from error


def read(sources: Iterable[str], layout: str | None, columns: Columns, subset: str | None, split: str | None) -> Side:
    """The questions of all sources, each once, in their order. Raises UserError."""
    side = Side()
    for source in sources:
        for file in find_files(source, subset, split):
            _read_file(side, source, file, layout, columns)
    return side


def _read_file(side: Side, source: str, file: Path, layout: str | None, columns: Columns) -> None:
    entry: dict[str, Any] = {"source": source, "layout": "", "files": 0, "rows": 0}
    convert = None
    for place, row in _rows(file):
        if convert is None:
            entry["layout"], convert = choose(str(file), row, layout, columns)
            entry = next((e for e in side.read if (e["source"], e["layout"]) == (source, entry["layout"])), entry)
            entry["files"] += 1
        entry["rows"] += 1
        number = int(re.sub(r".*\D", "", place) or 1)  # of the line, or of the row where there are no lines
        try:
            question = convert(row)
        except Unusable as reason:
            side.dropped.append({"reason": str(reason), "place": place})
            continue
        text = normal(question.prompt)
        known = side.kept.get(text)
        if known is None:
            side.kept[text] = Kept(question, str(file), number)
            continue
        known.repeated.setdefault(str(file), []).append(number)
        if question.answer != known.question.answer:
            known.others.setdefault(question.answer, place)
    if convert is None:
        raise UserError(f"{file} holds no rows")
    if entry not in side.read:
        side.read.append(entry)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row); a .json file is one object or a list of them, or lines after all."""
    if is_mixture(file):
        raise UserError(f"{file}: a mixture of tasks needs no conversion: give it to data.train as it is")
    if file.suffix.lower() == ".json":
        try:
            found = parse(str(file), file.read_text(encoding="utf-8-sig"))
        except (UserError, UnicodeDecodeError):
            found = None
        if found is not None:
            rows = found if isinstance(found, list) else [found]
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, dict):
                    raise UserError(f"{file}: row {number}: expected a JSON object, found a {type(row).__name__}")
                yield f"{file}: row {number}", row
            return
    yield from read_rows(file)


def drop_contradictions(side: Side) -> None:
    """Drop questions whose repetitions give answers that do not mean the same; at most one of them is right."""
    pairs = [(text, kept.question.answer, other) for text, kept in side.kept.items() for other in kept.others]
    if not pairs:
        return
    with make_reward("math", answer_column="answer", timeout_s=GOLD_SECONDS, workers=_cores()) as grader:
        # Beside them a pair that is equal: not one row that can be graded would be an error.
        golds, boxes = zip(*[("1", "1"), *((gold, other) for _, gold, other in pairs)], strict=True)
        same = grader.grade([""] * len(boxes), [f"\\boxed{{{box}}}" for box in boxes], {"answer": list(golds)})[1:]
    for (text, gold, other), equal in zip(pairs, same.tolist(), strict=True):
        if equal != 1.0 and (kept := side.kept.get(text)) is not None:
            reason = "the same question with another answer"
            side.drop(reason, text, answers=[gold, other], other_place=kept.others[other])


def drop_unreadable(side: Side, policy: str) -> None:
    """Drop answers that the maths grader cannot compare with, or refuse them all. Raises UserError."""
    texts = [text for text, kept in side.kept.items() if not INTEGER.fullmatch(kept.question.answer)]
    if not texts:
        return
    with make_reward("math", answer_column="answer", timeout_s=GOLD_SECONDS, workers=_cores()) as grader:
        bad = grader.unusable({"answer": [side.kept[text].question.answer for text in texts]})
    if bad and policy == "error":
        said = "; ".join(f"{side.kept[texts[i]].place}: {reason}" for i, reason in list(bad.items())[:SHOWN])
        raise UserError(f"{len(bad)} answers cannot be used by reward.kind=math: {said}{' ...' * (len(bad) > SHOWN)}")
    for i, reason in bad.items():
        answer = side.kept[texts[i]].question.answer
        side.drop(f"its answer cannot be used: {reason}", texts[i], answer=answer)


def subtract(side: Side, others: dict[str, Kept], reason: str) -> None:
    """Drop the questions that are among the others, whatever their answers."""
    for text in [text for text in side.kept if text in others]:
        side.drop(reason, text, other_place=others[text].place)


def split(side: Side, fraction: float, seed: int) -> Side:
    """Take about that share of the questions out, by a hash of each: more data does not move the others."""
    held_out = Side()
    for text in list(side.kept):
        digest = hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") < fraction * 2**64:
            held_out.kept[text] = side.kept.pop(text)
    return held_out


def short_names(files: Iterable[str]) -> dict[str, str]:
    """The shortest ends of paths that tell files apart: a name, of .json files (MATH) with two folders, or more."""
    parts = {file: Path(file).parts for file in files}

    def cut(more: int) -> dict[str, str]:
        return {file: "/".join(p[-(3 if file.endswith(".json") else 1) - more :]) for file, p in parts.items()}

    return next(names for names in map(cut, itertools.count()) if len(set(names.values())) == len(names))


def to_rows(side: Side, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the trainer reads. A question without an id of its own is named by its file, as in `names`, and row."""
    rows = []
    for kept in side.kept.values():
        question = kept.question
        id_ = question.id if question.id is not None else f"{names[kept.file]}:{kept.row}"
        rows.append({"prompt": question.prompt, "answer": question.answer, "id": id_, **question.more})
    return rows


def check_ids(sides: dict[str, list[dict[str, Any]]]) -> None:
    """Refuse an id that names two questions, on both sides above all. Raises UserError."""
    seen: dict[str, str] = {}
    for name, rows in sides.items():
        for row in rows:
            if row["id"] in seen:
                where = name if seen[row["id"]] == name else f"{seen[row['id']]} and {name}"
                raise UserError(
                    f"the id {row['id']!r} names two different questions, in {where}: mend the sources, or name "
                    "another --id-column"
                )
            seen[row["id"]] = name


def make_report(train: Side, test: Side) -> dict[str, Any]:
    """What became of every row, as plain values."""
    report: dict[str, Any] = {}
    for name, side in (("train", train), ("held_out", test)):
        repeated = [{"kept": k.place, "repeated": k.repeated} for k in side.kept.values() if k.repeated]
        counts = Counter[str]()
        for entry in side.dropped:
            counts[entry["reason"]] += 1 + repetitions(entry.get("repeated", {}))
        if again := sum(repetitions(kept.repeated) for kept in side.kept.values()):
            counts["the same question again"] = again
        report[name] = {
            "read": side.read,
            "kept": len(side.kept),
            "dropped": dict(counts),
            "rows_dropped": side.dropped,
            "rows_repeated": repeated,
        }
    return report


def repetitions(repeated: Mapping[str, Sequence[int]]) -> int:
    """Rows in `Kept.repeated`."""
    return sum(len(rows) for rows in repeated.values())


def describe(report: dict[str, Any]) -> str:
    """The report for people: counts, and the first places of every reason."""
    lines = []
    for name, part in report.items():
        if part["read"] or part["kept"]:
            lines.append(f"{name}: {part['kept']} questions kept")
        lines += ["  read {rows} rows of {source}, layout {layout}".format(**entry) for entry in part["read"]]
        for reason, count in part["dropped"].items():
            places = [entry["place"] for entry in part["rows_dropped"] if entry["reason"] == reason][:SHOWN]
            lines.append(f"  dropped {count}: {reason}{': ' if places else ''}{'; '.join(places)}")
    return "\n".join(lines)


def write(out: Path, sides: dict[str, list[dict[str, Any]]], report: dict[str, Any]) -> None:
    """Write all files of the folder, or none."""
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        for name, rows in sides.items():
            with (partial / name).open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        (partial / REPORT).write_text(json.dumps(report, indent=1, ensure_ascii=False, default=str), encoding="utf-8")
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"--out {out} cannot be written: {error}") from error


def _cores() -> int:
    return min(os.cpu_count() or 1, 16)


if __name__ == "__main__":
    cli.run(main)
