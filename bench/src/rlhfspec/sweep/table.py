"""Tables of a sweep's verdicts for docs/models.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import transformers

from rlhfspec.sweep.run import Judged
from rlhfspec.sweep.verdict import Kind

BEGIN, END = "<!-- from here to the end: rlhfspec models check all --table docs/models.md -->\n", "<!-- end -->\n"
_KINDS: tuple[Kind, ...] = ("right", "refused", "wrong", "not made")
_PATHS = {"native": "one call", "layers": "its layers"}
_TITLES = {
    "right": "Right in every bit",
    "refused": "Refused",
    "wrong": "Wrong",
    "not made": "Not made: transformers makes no such model of our configurations",
}


def write_into(text: str, judged: Sequence[Judged]) -> str:
    r"""Return the document with its tables replaced, or only the tables if it has no markers.

    >>> write_into("# Models\n" + BEGIN + "old\n" + END + "More.", [])[-5:]
    'More.'
    """
    before, found, rest = text.partition(BEGIN)
    if not found:
        return markdown(judged)
    return before + BEGIN + "\n" + markdown(judged) + "\n" + END + rest.partition(END)[2]


def markdown(judged: Sequence[Judged]) -> str:
    types: defaultdict[str, list[Judged]] = defaultdict(list)
    for each in sorted(judged, key=lambda each: (each.case.model_type, bool(each.case.variant))):
        types[each.case.model_type].append(each)
    plain = {name: cases[0] for name, cases in types.items()}
    variants = Counter(each.verdict.kind for each in judged if each.case.variant)
    parts = [
        f"transformers {transformers.__version__}, {len(types)} types: "
        f"{_counts(Counter(each.verdict.kind for each in plain.values()))}.\n"
        f"{variants.total()} variants of them: {_counts(variants)}."
    ]
    for kind in _KINDS:
        chosen = {name: cases for name, cases in types.items() if plain[name].verdict.kind == kind}
        if chosen:
            lines = _right_rows(chosen) if kind == "right" else _other_rows(chosen)
            parts.append("\n".join([f"### {_TITLES[kind]}\n", *lines]))
    of_right = [each for each in judged if each.case.variant and plain[each.case.model_type].verdict.kind == "right"]
    if reasons := list(_reasons(each for each in of_right if each.verdict.kind != "right")):
        parts.append("\n".join(["### Why those variants are not right\n", *reasons]))
    return "\n\n".join(parts) + "\n"


def _counts(kinds: Mapping[Kind, int]) -> str:
    return ", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds.get(kind))


def _right_rows(types: dict[str, list[Judged]]) -> Iterator[str]:
    """Yield the types by the way they run, and how far the farthest is from the oracle."""
    verdicts = {name: plain.verdict for name, (plain, *_) in types.items()}
    ratios = [verdict.in_bfloat16.ratio for verdict in verdicts.values() if verdict.in_bfloat16 is not None]
    yield f"Log-probs are at most {max(verdict.difference for verdict in verdicts.values()):.0e} from the oracle's."
    if ratios:
        yield f"In bfloat16 they are at most {max(ratios):.2f} times as far from float32's as Hugging Face's.\n"
    paths = {name: _PATHS[verdict.report.path] for name, verdict in verdicts.items() if verdict.report is not None}
    yield from _grouped("runs as", paths)
    yield from (f"\n{name}: {_cell(limit)}" for name, verdict in verdicts.items() for limit in verdict.limits)


def _other_rows(types: dict[str, list[Judged]]) -> Iterator[str]:
    yield from _grouped("why", {name: _reason(plain.verdict.detail) for name, (plain, *_) in types.items()})
    right = {
        name: [f"`{each.case.variant}`" for each in variants if each.verdict.kind == "right"]
        for name, (_, *variants) in types.items()
    }
    yield from (f"\n{name} is right with {', '.join(found)}." for name, found in right.items() if found)


def _grouped(title: str, types: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of the types that have the same text."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in types.items():
        groups[text].append(name)
    yield f"| {title} | types |\n|---|---|"
    yield from (f"| {_cell(text)} | {', '.join(names)} |" for text, names in sorted(groups.items()))


def _reason(detail: str) -> str:
    """Return the detail of a verdict without the class and the module that it names.

    >>> _reason("XLMEmbeddings: xlm.embeddings mixes tokens outside of AttentionInterface")
    'mixes tokens outside of AttentionInterface'
    """
    return re.sub(r"^\w+: (?:\S+ (?=mixes|takes))?", "", detail)


def _reasons(variants: Iterable[Judged]) -> Iterator[str]:
    """Yield Markdown rows by variant and verdict, with one model type's reason as an example."""
    groups: defaultdict[tuple[str, Kind], list[Judged]] = defaultdict(list)
    for each in variants:
        groups[each.case.variant, each.verdict.kind].append(each)
    yield "| variant | verdict | types | for example |\n|---|---|---:|---|"
    for (variant, kind), cases in sorted(groups.items()):
        yield f"| `{variant}` | {kind} | {len(cases)} | {cases[0].case.model_type}: {_cell(cases[0].verdict.detail)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
