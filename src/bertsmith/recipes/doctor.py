"""`bertsmith doctor`: what is wrong with data, before any hardware is spent on it.

Reads on after what stops the strict readers, and keeps hashes and counts, not texts.
"""

import glob
from collections.abc import Iterator
from pathlib import Path

from bertsmith.data.checkup.asked import QuestionCheck, leaked_contexts
from bertsmith.data.checkup.documents import DocumentCheck
from bertsmith.data.checkup.encoding import check_bytes
from bertsmith.data.checkup.findings import Finding, Source
from bertsmith.data.checkup.lengths import Ruler, TokenRuler, WordRuler
from bertsmith.data.checkup.pairs import (
    PairCheck,
    has_pairs,
    pair_columns,
    score_findings,
    taken_for_pairs,
)
from bertsmith.data.checkup.part import Part, nothing_of
from bertsmith.data.checkup.sentences import SentenceCheck, tag_findings
from bertsmith.data.checkup.span_ends import span_ends
from bertsmith.data.checkup.tables import TableCheck, label_findings, unreadable
from bertsmith.data.checkup.tagged import looks_tagged, read_conll, read_tagged_rows, tagged_columns
from bertsmith.data.checkup.whole import Checkup, joined
from bertsmith.data.columns import LABELS, UsualColumns, find_columns
from bertsmith.data.compressed import ending_of, open_bytes
from bertsmith.data.config import TableConfig
from bertsmith.data.corpus import (
    JSON_ENDINGS,
    PARQUET_ENDINGS,
    TEXT_ENDINGS,
    Document,
    ReadOptions,
    Span,
    find_files,
    read_documents,
)
from bertsmith.data.questions.files import form_of
from bertsmith.data.table_files import Records, open_records
from bertsmith.data.tagging.sentences import has_spans, read_spans
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.errors import UserError
from bertsmith.hf.config_json import model_part
from bertsmith.recipes.config import DoctorConfig
from bertsmith.report.checkup_report import print_checkup

EXIT_UNFIT = 1
"""Exit code of `doctor` where a finding is an error."""

CONLL_ENDINGS = (".conll", ".bio", ".iob", ".bioes", ".bmes")
SQUAD_ENDING = ".json"
DELIMITED_ENDINGS = (".csv", ".tsv")
TABLE_ENDINGS = (*DELIMITED_ENDINGS, *JSON_ENDINGS, *PARQUET_ENDINGS)


def main(config: DoctorConfig) -> int:
    """Look, and print a table or one JSON object; 1 where training would be wrong."""
    checkup = doctor(config)
    print_checkup(checkup, is_json=config.json)
    return 0 if checkup.is_fit else EXIT_UNFIT


def doctor(config: DoctorConfig) -> Checkup:
    """Look data over.

    Raises:
        UserError: A mistake in the call: no such file, an ending that is not read, columns that
            cannot be found. What is wrong with the data itself is a finding.
    """
    ruler = _ruler(config.tokenizer)
    kind = _kind(config)
    paths = [Path(config.data)] + ([] if config.eval is None else [Path(config.eval)])
    findings: list[Finding] = []
    parts: list[Part] = []
    asked: list[QuestionCheck] = []
    for path in paths:
        if kind == "text":
            files = _files(path)
        else:
            files = [path]
            open_bytes(path).close()
        of_bytes = [finding for file in files for finding in check_bytes(file)]
        findings += of_bytes
        if any(finding.check == "utf16" for finding in of_bytes):
            part = nothing_of(path, [])
        elif kind == "text":
            part = _texts(str(path), files, config, ruler)
        elif kind == "tagged":
            part = _tagged(path, ruler)
        elif kind == "questions":
            asked.append(QuestionCheck(path, ruler=ruler))
            asked[-1].look()
            part = asked[-1].part()
        else:
            look = _pairs if kind == "pairs" else _table
            part = look(path, config, ruler, usual=parts[0] if parts else None)
        parts.append(part)
    train, dev = parts[0], parts[1] if len(parts) > 1 else None
    if kind == "pairs" and config.kind == "auto":
        findings.append(taken_for_pairs(paths[0]))
    if len(asked) > 1:
        findings += leaked_contexts(*asked)
    return joined(kind, train, dev, findings=findings + _answer_findings(kind, train, dev))


def _answer_findings(kind: str, train: Part, dev: Part | None) -> list[Finding]:
    """What is odd about all that is to be learned, taken together."""
    match kind:
        case "tagged":
            return tag_findings(train)
        case "pairs":
            return score_findings(train, dev)
        case "questions":
            return []
        case _:
            return label_findings(train)


def _files(path: Path) -> list[Path]:
    try:
        return find_files([str(path)])
    except UserError as error:  # find_files speaks of prepare's option
        raise UserError(str(error).removeprefix("--input ")) from None


def _ruler(tokenizer: str | None) -> Ruler:
    if tokenizer is None:
        return WordRuler()
    folder = Path(tokenizer)
    if not folder.exists():
        from bertsmith.hf import resolve  # noqa: PLC0415 - loads torch, for hub names only

        folder = resolve(tokenizer)
    loaded = load_tokenizer(model_part(folder))
    return TokenRuler(loaded.tokenizer, unk_id=loaded.vocab.unk_id)


def _kind(config: DoctorConfig) -> str:
    """table, pairs, tagged, questions or text.

    Raises:
        UserError: The path is none, or of a kind that is not read.
    """
    path = Path(config.data)
    ending = ending_of(path)
    is_many = path.is_dir() or (not path.exists() and bool(glob.glob(config.data)))
    if config.kind != "auto":
        return config.kind
    if ending in CONLL_ENDINGS or (ending in TEXT_ENDINGS and path.exists() and looks_tagged(path)):
        return "tagged"
    if ending == SQUAD_ENDING or (path.is_file() and _has_questions(path)):
        return "questions"
    if is_many or ending in TEXT_ENDINGS:
        return "text"
    if config.table.label_column is not None or config.table.label_columns is not None:
        return "table"
    return _kind_by_columns(path, config.table)


def _has_questions(path: Path) -> bool:
    try:
        return form_of(path, is_asked=False) is not None
    except UserError:  # whoever reads it as something else will say why it cannot be read
        return False


def _kind_by_columns(path: Path, table: TableConfig) -> str:
    """What a file is that may be anything.

    Raises:
        UserError: It cannot be opened, or is of a kind that is not read.
    """
    if (ending := ending_of(path)) not in TABLE_ENDINGS:
        known = ", ".join((*TABLE_ENDINGS, SQUAD_ENDING, *CONLL_ENDINGS, *TEXT_ENDINGS))
        raise UserError(f"{path}: the ending {ending!r} is not read; use {known}, or say --kind")
    open_bytes(path).close()  # no such file is a mistake in the call; a damaged one is not
    records = _opened(path, table)
    if isinstance(records, Part):
        return "table"
    records.close()
    is_delimited = ending in DELIMITED_ENDINGS
    names = records.columns
    if not is_delimited and (tagged_columns(names) is not None or has_spans(names)):
        return "tagged"
    if any(name.lower() in LABELS for name in names):
        return "table"
    if has_pairs(names, table):
        return "pairs"
    return "table" if is_delimited else "text"


def _opened(path: Path, table: TableConfig) -> Records | Part:
    """An open table; or, where it is a damaged one, a part that says so.

    Raises:
        UserError: It is no table.
    """
    names = None if table.columns is None else tuple(table.columns)
    try:
        return open_records(path, quoting=table.quoting, columns=names)
    except UserError as error:
        if ending_of(path) not in TABLE_ENDINGS:
            raise
        return nothing_of(path, [unreadable(path, str(error))])


def _pairs(path: Path, config: DoctorConfig, ruler: Ruler, *, usual: Part | None) -> Part:
    """Pairs of texts to embed."""
    records = _opened(path, config.table)
    if isinstance(records, Part):
        return records
    known = None
    if usual is not None and (roles := usual.columns):
        label = roles.get("score", roles.get("negative", ""))
        known = UsualColumns(text=roles["text"], pair=roles["pair"], label=label)
    try:
        columns = pair_columns(records.columns, path=path, config=config.table, usual=known)
    except UserError:
        records.close()
        raise
    check = PairCheck(path, columns, ruler=ruler, is_sure=config.kind == "pairs")
    check.look(records)
    return check.part()


def _table(path: Path, config: DoctorConfig, ruler: Ruler, *, usual: Part | None) -> Part:
    """A labelled table; one without labels is looked over all the same, and told."""
    table = config.table
    records = _opened(path, table)
    if isinstance(records, Part):
        return records
    known = None
    if usual is not None and {"text", "label"} <= set(usual.columns):
        roles = usual.columns
        known = UsualColumns(text=roles["text"], pair=roles.get("pair"), label=roles["label"])
    is_named = table.label_column is not None or table.label_columns is not None
    is_labelled = is_named or any(
        name.lower() in LABELS or (known is not None and name == known.label)
        for name in records.columns
    )
    try:
        columns = find_columns(
            records.columns, path=path, config=table, is_labelled=is_labelled, usual=known
        )
    except UserError:
        records.close()
        raise
    separator = table.label_separator
    is_several = None if separator is None else True
    if usual is not None and usual.label_kind is not None:  # judged as what is learned is read
        separator, is_several = usual.label_separator, usual.label_kind == "lists"
    check = TableCheck(path, columns, ruler=ruler, is_several=is_several, separator=separator)
    check.look(records)
    return check.part()


def _tagged(path: Path, ruler: Ruler) -> Part:
    if ending_of(path) not in (*JSON_ENDINGS, *PARQUET_ENDINGS):
        check = SentenceCheck(path, form="conll", ruler=ruler)
        check.look(read_conll(path))
        return check.part()
    records = open_records(path)
    try:
        columns = tagged_columns(records.columns)
        if columns is None and has_spans(records.columns):
            check = SentenceCheck(path, form="spans", ruler=ruler)
            check.look(read_spans(path))
            part = check.part()
            part.findings.extend(span_ends(path, ruler.words))
            return part
        if columns is None:
            raise UserError(
                f"{path}: holds neither lists of tokens and tags nor texts with entities; the "
                f"columns are {', '.join(map(repr, records.columns))}"
            )
        check = SentenceCheck(path, form="lists", ruler=ruler)
        check.look(read_tagged_rows(records, tokens=columns[0], tags=columns[1]))
    finally:
        records.close()
    return check.part()


def _texts(name: str, files: list[Path], config: DoctorConfig, ruler: Ruler) -> Part:
    check = DocumentCheck(Source(paths=tuple(files)), ruler=ruler)
    damages: list[Finding] = []
    for number, file in enumerate(files):
        try:
            check.look(_documents(file, config), file=number)
        except UserError as error:
            damages.append(unreadable(file, str(error)))
    part = check.part(name)
    part.findings.extend(damages)
    return part


def _documents(path: Path, config: DoctorConfig) -> Iterator[Document]:
    """Documents of a file; a row that cannot be read is a bad one."""
    if ending_of(path) in TEXT_ENDINGS:
        options = ReadOptions(documents=config.documents, text_field="text", bad_bytes="skip")
        yield from read_documents(Span(path=str(path)), options)
        return
    records = open_records(path)
    try:
        columns = find_columns(
            records.columns, path=path, config=config.table, is_labelled=False, is_pair=False
        )
        for record in records.rows:
            text = None if record.fault is not None else record.values[columns.text]
            yield Document(
                text=text if isinstance(text, str) else "",
                line=record.row if record.line is None else record.line,
                packed_bytes=0,
                is_bad=record.fault is not None or not isinstance(text, str | None),
            )
    finally:
        records.close()
