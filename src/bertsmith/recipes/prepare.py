"""`bertsmith prepare`: text in, tokenizer and token shards out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith import __version__
from bertsmith.data.assembly import CUT_AT_TOKENS, Assembled, assemble
from bertsmith.data.checkup.brief import text_warnings
from bertsmith.data.corpus import ReadOptions, find_files
from bertsmith.data.part_workers import make_parts, usable_cpus
from bertsmith.data.parts import bytes_needed, part_folder, token_dtype
from bertsmith.data.plan import Plan, TokenizerOptions, Unit, make_plan
from bertsmith.data.sample import sample_texts
from bertsmith.data.shards import SCHEMA, WORDS_KEY, read_manifest
from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer
from bertsmith.data.wordpiece import train_wordpiece
from bertsmith.data.words import CHARACTERS, chinese_words, has_chinese
from bertsmith.data.writing import WritingError
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepared_folder import PreparedFolder, cannot_write
from bertsmith.report.progress import BytesDisplay, Speaker
from bertsmith.say import Say

LONG_LOOK_BYTES = 1 << 29
CHINESE_SAMPLE_CHARACTERS = 100_000
CHECKUP_SAMPLE_CHARACTERS = 1_000_000
"""What is looked over of the text before it is tokenized: a part of a second."""

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What was prepared."""

    status: str
    """completed; up to date (nothing was done); or shard done (to be joined)."""

    output: str
    counts: dict[str, Any] | None
    """As in the manifest; None after a shard."""


def main(config: PrepareConfig) -> int:
    """Prepare, and print where the result is and what it holds."""
    speaker = Speaker()
    try:
        summary = prepare(config, speaker=speaker)
    except KeyboardInterrupt:
        speaker.say("interrupted; what is finished is kept: the same command goes on")
        return EXIT_INTERRUPTED
    print(summary.output)
    return 0


def prepare(config: PrepareConfig, *, speaker: Speaker | None = None) -> PrepareSummary:
    """Train or take a tokenizer, and write token shards.

    Raises:
        UserError: The input cannot be read, the output cannot be written, or it holds text that was
            prepared in another way.
    """
    speaker = speaker or Speaker()
    folder = PreparedFolder(config.output)
    folder.check_is_ours()
    if bool(config.input) == bool(config.join):
        raise UserError("give text with --input, or folders of shards with --join")
    if config.join and config.shard:
        raise UserError("--shard and --join: do the shards first, then join their folders")
    try:
        if config.join:
            return _join(config, folder, speaker)
        return _prepare(config, folder, speaker)
    except (OSError, WritingError) as error:
        raise cannot_write(folder.path, error) from error


def _prepare(config: PrepareConfig, folder: PreparedFolder, speaker: Speaker) -> PrepareSummary:
    files = find_files(config.input)
    given = None if config.tokenizer is None else load_tokenizer(_resolved(config.tokenizer))
    finished, started = folder.finished_plan(), folder.started_plan()
    plan = make_plan(
        files,
        read=ReadOptions(
            documents=config.documents,
            text_field=config.text_field,
            bad_bytes=config.bad_bytes,
            chinese_words=_chinese_words(config, finished or started),
        ),
        valid_share=config.valid_share,
        tokenizer=TokenizerOptions(
            fingerprint=None if given is None else given.vocab.fingerprint,
            vocab_size=config.vocab_size,
            lowercase=config.lowercase,
            min_frequency=config.min_frequency,
            sample_mb=config.tokenizer_sample_mb,
        ),
        known=finished or started,
        advance=_Looking(speaker).advance,
    )
    if _is_done(folder, plan, speaker, overwrite=config.overwrite):
        return _up_to_date(folder)
    with folder.locked(speaker.say, shard=config.shard):
        folder.begin(plan)
        units = plan.units()
        sample = sample_texts(units, plan.read, characters=CHECKUP_SAMPLE_CHARACTERS)
        for line in text_warnings(sample):
            speaker.say(line)
        tokenizer = folder.tokenizer_there()
        if tokenizer is None:
            tokenizer = given or _train(plan, units, speaker)
            folder.keep_tokenizer(tokenizer)
        if config.chinese_words == "auto" and plan.read.chinese_words == CHARACTERS:
            sample = sample_texts(units, plan.read, characters=CHINESE_SAMPLE_CHARACTERS)
            if any(has_chinese(text) for text in sample):
                speaker.say(
                    "Chinese words: each character is one, as jieba is not installed; for whole "
                    "words in masking, pip install 'bertsmith[zh]' and prepare anew"
                )
        mine = _shard_of(units, config.shard)
        try:
            make_parts(
                mine,
                work=folder.work,
                tokenizer_folder=folder.tokenizer_folder,
                read=plan.read,
                workers=config.workers or usable_cpus(),
                advance=BytesDisplay(speaker, "tokenizing").advance,
            )
        except WritingError as error:
            needed = bytes_needed(
                mine, folder.work, tokenizer.vocab.fingerprint, with_result=config.shard is None
            )
            raise cannot_write(folder.path, error, needed_bytes=needed) from error
        plan.check_inputs_stayed()
        if config.shard is not None:
            speaker.say(
                f"shard {config.shard} is done; when all are, join them with: bertsmith prepare "
                f"--join {folder.path} ... --output FOLDER"
            )
            return PrepareSummary(status="shard done", output=config.output, counts=None)
        fingerprint = tokenizer.vocab.fingerprint
        parts = [part_folder(folder.work, unit, fingerprint) for unit in units]
        return _assemble(folder, plan, parts, tokenizer, folder.tokenizer_folder, speaker)


def _join(config: PrepareConfig, folder: PreparedFolder, speaker: Speaker) -> PrepareSummary:
    """Make the output of parts that lie in several folders."""
    sources = [PreparedFolder(name) for name in config.join]
    plans = [source.started_plan() for source in sources]
    finished = folder.finished_plan()
    if finished is not None and all(plan is None for plan in plans):
        return _up_to_date(folder)  # joined before, in place: the parts are gone
    for source, plan in zip(sources, plans, strict=True):
        if plan is None:
            raise UserError(f"--join {source.path}: holds no shard of a preparation")
    first = plans[0]
    assert first is not None
    tokenizers = []
    for source, plan in zip(sources, plans, strict=True):
        assert plan is not None
        differences = first.differences(plan)
        if differences:
            raise UserError(
                f"--join {source.path}: is of other text or options than {sources[0].path}: "
                f"{_listed(differences)}"
            )
        tokenizer = source.tokenizer_there()
        if tokenizer is None:
            raise UserError(f"--join {source.path}: its shard has only begun; finish it first")
        tokenizers.append(tokenizer)
    fingerprint = tokenizers[0].vocab.fingerprint
    if any(t.vocab.fingerprint != fingerprint for t in tokenizers):
        raise UserError(
            "--join: the shards have different tokenizers; were they made by different versions of "
            "the tokenizers library? Make them with the same one, or give each --tokenizer"
        )
    units = first.units()
    parts = [_part_among(sources, unit, fingerprint) for unit in units]
    missing = [unit.number for unit, part in zip(units, parts, strict=True) if part is None]
    if missing:
        raise UserError(
            f"--join: {len(missing):,} of {len(units):,} parts are missing, the first is number "
            f"{missing[0] + 1} (of --shard i/n, the one where i is {missing[0] + 1} modulo n); "
            "finish the shards and name all their folders"
        )
    found = [part for part in parts if part is not None]
    if _is_done(folder, first, speaker, overwrite=config.overwrite, clean=False):
        return _up_to_date(folder)
    with folder.locked(speaker.say, shard=None):
        return _assemble(folder, first, found, tokenizers[0], sources[0].tokenizer_folder, speaker)


def _part_among(sources: list[PreparedFolder], unit: Unit, fingerprint: str) -> Path | None:
    places = (part_folder(source.work, unit, fingerprint) for source in sources)
    return next((place for place in places if place.is_dir()), None)


def _assemble(
    folder: PreparedFolder,
    plan: Plan,
    parts: list[Path],
    tokenizer: TextTokenizer,
    tokenizer_folder: Path,
    speaker: Speaker,
) -> PrepareSummary:
    vocab = tokenizer.vocab
    build = folder.fresh_build()
    dtype = token_dtype(vocab.size)
    done = assemble(
        parts,
        build,
        dtype=dtype,
        unk_id=vocab.unk_id,
        valid_share=plan.valid_share,
        advance=BytesDisplay(speaker, "writing").advance,
    )
    if len(done.lengths) == 0:
        raise UserError(
            "--input: the files hold no document with a token in it "
            f"({done.bad:,} not UTF-8, {done.empty:,} empty)"
        )
    counts = _counts(done)
    manifest = {
        "schema": SCHEMA,
        "bertsmith": __version__,
        "counts": counts,
        "tokenizer": {"fingerprint": vocab.fingerprint, "vocab_size": vocab.size},
        "token_dtype": dtype.name,
        WORDS_KEY: {"version": 1, "chinese": plan.read.chinese_words},
        "shards": {"train": done.train.shards, "valid": done.valid.shards},
        "files": done.train.files | done.valid.files,
        "inputs": [{"path": i.path, "bytes": i.bytes, "sha256": i.sha256} for i in plan.inputs],
        "plan": plan.to_json(),
    }
    folder.finish(build, tokenizer_folder, manifest)
    _tell(counts, plan, vocab.size, speaker.say)
    return PrepareSummary(status="completed", output=str(folder.path), counts=counts)


def _counts(done: Assembled) -> dict[str, Any]:
    tokens = done.train.tokens + done.valid.tokens
    unknown = done.train.unknown + done.valid.unknown
    values = np.percentile(done.lengths, PERCENTILES, method="lower").tolist()
    return {
        "documents": len(done.lengths),
        "train_documents": done.train.documents,
        "valid_documents": done.valid.documents,
        "tokens": tokens,
        "train_tokens": done.train.tokens,
        "valid_tokens": done.valid.tokens,
        "duplicates": done.duplicates,
        "undecodable_documents": done.bad,
        "empty_documents": done.empty,
        "unknown_tokens": unknown,
        "unknown_share": unknown / tokens,
        "length_percentiles": {str(p): v for p, v in zip(PERCENTILES, values, strict=True)},
        "documents_cut_at_512": int(np.count_nonzero(done.lengths + 2 > CUT_AT_TOKENS)),
    }


def _tell(counts: dict[str, Any], plan: Plan, vocab_size: int, say: Say) -> None:
    say(
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens of a vocabulary of "
        f"{vocab_size:,} ({counts['unknown_share']:.3%} unknown); "
        f"{counts['duplicates']:,} duplicates left out"
    )
    lengths = counts["length_percentiles"]
    say(
        f"tokens in a document: median {lengths['50']:,}, 95 % up to {lengths['95']:,}, longest "
        f"{lengths['100']:,}; {counts['documents_cut_at_512']:,} will be cut at {CUT_AT_TOKENS}"
    )
    say(
        f"validation: {counts['valid_documents']:,} documents, {counts['valid_tokens']:,} tokens"
        + ("" if counts["valid_documents"] else " (too little text to hold any out)")
    )
    if counts["undecodable_documents"]:
        say(f"documents skipped, as they were not UTF-8: {counts['undecodable_documents']:,}")
    if plan.tokenizer.fingerprint is None and vocab_size < plan.tokenizer.vocab_size:
        say(f"the text gave {vocab_size:,} tokens, not the {plan.tokenizer.vocab_size:,} asked for")


def _is_done(
    folder: PreparedFolder, plan: Plan, speaker: Speaker, *, overwrite: bool, clean: bool = True
) -> bool:
    """Whether the output is what the plan asks for.

    Raises:
        UserError: It is something else, and `overwrite` is not given.
    """
    finished, started = folder.finished_plan(), folder.started_plan()
    if finished is not None and not finished.differences(plan):
        if clean and folder.work.is_dir():
            with folder.locked(speaker.say, shard=None):  # another may be at work on something new
                folder.clean()
        speaker.say(f"{folder.path}: up to date, nothing to do")
        return True
    if finished is not None and not overwrite:
        raise UserError(
            f"--output {folder.path}: was prepared in another way "
            f"({_listed(finished.differences(plan))}); name a new folder, or give --overwrite to "
            "replace it"
        )
    if started is not None and (changes := started.differences(plan)):
        speaker.say(
            f"{folder.path}: since this was begun, {_listed(changes)}; going on with what is now"
        )
    return False


def _listed(differences: list[str]) -> str:
    more = len(differences) - 3
    return "; ".join(differences[:3]) + (f"; and {more:,} more" if more > 0 else "")


def _chinese_words(config: PrepareConfig, known: Plan | None) -> str:
    if config.chinese_words == "auto" and known is not None and not config.overwrite:
        return known.read.chinese_words
    return chinese_words(config.chinese_words)


class _Looking:
    """Progress of looking at the input, if that takes long enough to wonder."""

    def __init__(self, speaker: Speaker) -> None:
        self._display = BytesDisplay(speaker, "looking at the input")

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        if total_bytes >= LONG_LOOK_BYTES:
            self._display.advance(done_bytes, total_bytes)


def _up_to_date(folder: PreparedFolder) -> PrepareSummary:
    counts = read_manifest(folder.path)["counts"]
    return PrepareSummary(status="up to date", output=str(folder.path), counts=counts)


def _shard_of(units: list[Unit], shard: str | None) -> list[Unit]:
    if shard is None:
        return units
    number, count = (int(word) for word in shard.split("/"))
    return units[number - 1 :: count]


def _train(plan: Plan, units: list[Unit], speaker: Speaker) -> TextTokenizer:
    options = plan.tokenizer
    speaker.say(
        f"training a tokenizer of {options.vocab_size:,} tokens on up to {options.sample_mb:,} "
        "million characters"
    )
    return train_wordpiece(
        sample_texts(units, plan.read, characters=options.sample_mb * 10**6),
        vocab_size=options.vocab_size,
        lowercase=options.lowercase,
        min_frequency=options.min_frequency,
    )


def _resolved(where: str) -> Path:
    if Path(where).exists():
        return Path(where)
    from bertsmith.hf import resolve  # noqa: PLC0415 - loads torch, which nothing else here needs

    return resolve(where)
