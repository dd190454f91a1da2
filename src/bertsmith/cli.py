"""The verbs: the only file that knows jsonargparse.

Every verb is a config dataclass and a recipe. A value comes from the dataclass's default, then the
YAML file (`--config`), then the command line (`--dotted.key value`). Torch is imported only once a
verb really runs, so that help and a mistyped key are answered at once.
"""

import dataclasses
import difflib
import importlib
import itertools
import os
import re
import signal
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from bertsmith import __version__
from bertsmith.errors import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    NOTHING_YET,
    UserError,
)
from bertsmith.parallel import last_word
from bertsmith.recipes import config as configs

EXIT_OK = 0

VERBS: dict[str, type] = {
    "doctor": configs.DoctorConfig,
    "prepare": configs.PrepareConfig,
    "pretrain": configs.PretrainConfig,
    "finetune": configs.FinetuneConfig,
    "evaluate": configs.EvaluateConfig,
    "predict": configs.PredictConfig,
    "merge": configs.MergeConfig,
    "fill": configs.FillConfig,
    "score": configs.ScoreConfig,
    "coverage": configs.CoverageConfig,
    "plan": configs.PlanPretrainConfig,
    "demo": configs.DemoConfig,
    "selftest": configs.SelftestConfig,
}

ALIASES = {"--resume.override": "--resume_override"}
"""Options as people write them, and the keys they stand for."""

SHORT_OF_TABLE = ("text_column", "pair_column", "label_column")
"""Keys of the group `table` that `doctor` takes without the group, too."""

GO_ON = ("prepare", "pretrain", "finetune")
"""Verbs that go on where they were interrupted, or begin anew where there was nothing yet."""

PLANS: dict[str, type] = {
    "pretrain": configs.PlanPretrainConfig,
    "finetune": configs.PlanFinetuneConfig,
}
"""What can be planned, and what a plan of it can be told."""

NAMES_ELSEWHERE = {
    "lr": ("optim.learning_rate",),
    "wd": ("optim.weight_decay",),
    "warmup_ratio": ("optim.warmup_share",),
    "lr_scheduler_type": ("optim.schedule",),
    "batch_size": ("examples_per_step", "tokens_per_step", "tokens_per_pack"),
    "per_device_train_batch_size": ("examples_per_step", "tokens_per_step"),
    "gradient_accumulation_steps": ("micro_batch",),
    "gradient_checkpointing": ("checkpointing",),
    "max_length": ("max_sequence_tokens", "packing.max_sequence_tokens"),
    "max_seq_length": ("max_sequence_tokens", "packing.max_sequence_tokens"),
    "mlm_probability": ("masking.share",),
    "num_train_epochs": ("epochs",),
    "max_steps": ("steps",),
    "model_name_or_path": ("model",),
    "train_file": ("data",),
    "validation_file": ("eval",),
    "output_dir": ("output",),
    "bf16": ("precision",),
    "fp16": ("precision",),
    "lora_r": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
}
"""What other trainers call an option, and the keys that are meant here, the likeliest first."""

LISTS = (list[str], list[float], list[int])
"""Types of the keys that take several words."""

SUBJECTS = {"selftest": "what", "doctor": "data"}
"""Verbs whose first word names their subject, and the key it stands for."""

TEXTS = ("fill", "score")
"""Verbs whose first words are texts."""


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code.

    Exit codes: 0 done; 1 a fault of ours (with a traceback); 2 a mistake of the user's (one line on
    standard error); 75 stopped by a signal or a full disk, resumable.
    """
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(_overview())
            return EXIT_OK if argv else EXIT_USER_ERROR
        if argv[0] in ("-V", "--version"):
            print(f"bertsmith {__version__}")
            return EXIT_OK
        if argv[0] not in VERBS:
            raise UserError(f"unknown verb {argv[0]!r}{_nearest(argv[0], VERBS)}; see bertsmith -h")
        config = _parse(argv[0], argv[1:])
        return EXIT_OK if config is None else _run(config, argv, debug=debug)
    except UserError as error:
        if debug:
            raise
        last_word.tell(f"bertsmith: error: {error}", code=EXIT_USER_ERROR)
        return EXIT_USER_ERROR
    except SystemExit as ending:  # of a rank that has met the others, and has said why in a line
        if debug and isinstance(ending.__cause__, UserError):
            traceback.print_exception(ending.__cause__)
        raise
    except KeyboardInterrupt:
        goes_on = argv[0] in GO_ON
        code = EXIT_INTERRUPTED if goes_on else 128 + signal.SIGINT
        last_word.tell(f"bertsmith: {NOTHING_YET if goes_on else 'interrupted'}", code=code)
        return code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; there is nobody to tell
        return EXIT_FAULT


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """Within the block a scheduler's signals end the process as Ctrl-C does.

    While torch is imported, for a start; training takes them over once there is something to save.
    """
    before = {}
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with suppress(ValueError):  # not the main thread
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(config: object, argv: list[str], *, debug: bool) -> int:
    """Run a verb here, or start a process with the same command line for each of its devices."""
    with _signals_end_it() if argv[0] in GO_ON else nullcontext():
        return _run_here_or_in_ranks(config, argv, debug=debug)


def _run_here_or_in_ranks(config: object, argv: list[str], *, debug: bool) -> int:
    trained = (configs.PretrainConfig, configs.FinetuneConfig, configs.SelftestConfig)
    is_several = isinstance(config, configs.FinetuneConfig) and config.is_several
    if isinstance(config, trained) and type(config) not in PLANS.values() and not is_several:
        from bertsmith.parallel.choice import devices_here, processes_to_start  # noqa: PLC0415
        from bertsmith.parallel.launch import launch  # noqa: PLC0415

        here = devices_here(config.device)
        if processes := processes_to_start(config.parallel, here, os.environ):
            return launch([*argv, "--debug"] if debug else argv, processes=processes)
    return _run_verb(config)


def _run_verb(config: object) -> int:
    """Run the recipe that belongs to a config; recipes are imported here, with torch."""
    kinds = [*VERBS.items(), *(("plan", kind) for kind in PLANS.values())]
    verb = next(verb for verb, kind in kinds if type(config) is kind)
    recipe = importlib.import_module(f"bertsmith.recipes.{verb}")
    code: int = recipe.main(config)
    last_word.leave(code)
    return code


def _overview() -> str:
    """The text of `bertsmith --help`."""
    lines = [
        f"bertsmith {__version__}: train BERT-family encoders, from raw text to a model in use",
        "",
        "usage: bertsmith VERB [--config FILE.yaml] [--key value ...]",
        "",
    ]
    for verb, config in VERBS.items():
        lines.append(f"  {verb:<10}{(config.__doc__ or '').splitlines()[0]}")
    lines += [
        "",
        "bertsmith VERB --help lists what a verb can be told, with defaults;",
        "--print_config writes it as YAML; --debug shows the traceback of an error.",
    ]
    return "\n".join(lines)


def _parse(verb: str, argv: list[str]) -> object | None:
    """The verb's config, or None when help or the config was printed instead."""
    config_class = VERBS[verb]
    if verb == "plan":
        planned = _plan_of(argv)
        if planned is None:
            print(_overview_of_plans())
            return None
        config_class, argv = planned
    if verb in SUBJECTS and argv and not argv[0].startswith("-"):
        argv = [f"--{SUBJECTS[verb]}", *argv]
    if verb == "doctor":
        argv = [_with_group(word) for word in argv]
    if verb in TEXTS:
        texts = list(itertools.takewhile(lambda word: not word.startswith("--"), argv))
        if texts:  # as YAML: a text may begin like a list, "[MASK] is ..."
            written = yaml.safe_dump(texts, default_flow_style=True, width=1 << 30)
            argv = [f"--texts={written}", *argv[len(texts) :]]
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"bertsmith {verb}",
        usage=_usage(verb, config_class),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these keys.")
    parser.add_class_arguments(config_class)
    keys = _keys_of(config_class)
    argv = _spell_out([_without_alias(word) for word in argv], keys)
    places = {k: v for path in _config_files(argv) for k, v in _places_in(path, keys).items()}
    places |= {k: f"--{k}" for k in keys if any(w.split("=", 1)[0] == f"--{k}" for w in argv)}
    try:
        namespace = parser.parse_args(argv)
        values = parser.instantiate(namespace).as_dict()
        values.pop("config", None)
        return typing.cast(object, config_class(**values))
    except jsonargparse.ArgumentError as error:
        raise UserError(f"{verb}: {_explain(str(error), places, keys)}") from error
    except ValueError as error:  # a config class refused its own values: "share is 1.5; ..."
        name = str(error).split(" ", 1)[0]
        place = next((p for k, p in places.items() if k.rsplit(".", 1)[-1] == name), verb)
        raise UserError(f"{place}: {error}") from error
    except SystemExit:  # jsonargparse has printed the help or the config
        return None


def _usage(verb: str, config_class: type) -> str:
    """The line over a verb's help: what must be given, and a word for the rest."""
    planned = [name for name, kind in PLANS.items() if kind is config_class]
    first = ["TEXT ..."] if verb in TEXTS else planned
    must = [
        field.name.upper()
        if SUBJECTS.get(verb) == field.name
        else f"--{field.name} {field.name.upper()}"
        for field in dataclasses.fields(config_class)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    rest = "[--config FILE.yaml] [--key value ...]"
    return " ".join(["bertsmith", verb, *first, *must, rest])


def _overview_of_plans() -> str:
    """The text of `bertsmith plan --help`."""
    helps = " or ".join(f"bertsmith plan {name} --help" for name in PLANS)
    return "\n".join(
        [
            *(f"usage: {_usage('plan', kind)}" for kind in PLANS.values()),
            "",
            "Say what memory and time a run will need, before either is spent.",
            f"{helps} has the options.",
        ]
    )


def _plan_of(argv: list[str]) -> tuple[type, list[str]] | None:
    """What is to be planned, by the first word, or by a key of the file that only one has.

    None where neither says, and help is asked for.

    Raises:
        UserError: Neither says.
    """
    known = ", ".join(PLANS)
    if argv and not argv[0].startswith("-"):
        if argv[0] not in PLANS:
            raise UserError(
                f"plan {argv[0]}: there is no such plan{_nearest(argv[0], PLANS)}; say {known}"
            )
        return PLANS[argv[0]], argv[1:]
    keys = {name: _keys_of(kind) for name, kind in PLANS.items()}
    said = {
        key
        for path in _config_files(argv)
        for key in _places_in(path, keys["pretrain"] | keys["finetune"])
    }
    fitting = [name for name in PLANS if said and said <= set(keys[name])]
    if len(fitting) == 1:
        return PLANS[fitting[0]], argv
    if "-h" in argv or "--help" in argv:
        return None
    raise UserError(f"plan: of what? say bertsmith plan {known.replace(', ', ' ... or plan ')} ...")


def _without_alias(word: str) -> str:
    """`--resume.override` is a word of the command line; `resume` itself is no group of keys."""
    option, equals, value = word.partition("=")
    return ALIASES.get(option, option) + equals + value


def _with_group(word: str) -> str:
    option, equals, value = word.partition("=")
    key = option.removeprefix("--")
    return f"--table.{key}{equals}{value}" if key in SHORT_OF_TABLE and key != option else word


def _keys_of(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config with its type, nested configs opened."""
    keys: dict[str, Any] = {}
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        keys[prefix + field.name] = hint
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys |= _keys_of(hint, f"{prefix}{field.name}.")
    return keys


def _spell_out(argv: list[str], keys: dict[str, Any]) -> list[str]:
    """Write out two conveniences: a lone `--flag` is true, and `--list a b c` takes every word."""
    spelled: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        hint = keys.get(word.removeprefix("--"))
        list_hint = next((h for h in LISTS if h == hint or h in typing.get_args(hint)), None)
        if word.startswith("--") and (hint is bool or list_hint is not None):
            end = position
            while end < len(argv) and not argv[end].startswith("--"):
                end += 1
            values, position = argv[position:end], end
            if hint is bool:
                values = values or ["true"]
                spelled += [word, *values]
            elif len(values) == 1 and values[0].startswith("["):  # as the help writes it
                spelled += [word, values[0]]
            elif values == ["null"] and type(None) in typing.get_args(hint):
                spelled += [word, "null"]
            elif list_hint == list[str]:
                spelled += [word, yaml.safe_dump(values, default_flow_style=True, width=1 << 30)]
            else:
                spelled += [word, f"[{', '.join(values)}]"]
        else:
            spelled.append(word)
    return spelled


def _config_files(argv: list[str]) -> list[str]:
    """Paths given as `--config PATH` or `--config=PATH`."""
    paths = [b for a, b in itertools.pairwise(argv) if a == "--config"]
    return paths + [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]


def _places_in(path: str, keys: dict[str, Any]) -> dict[str, str]:
    """Where each key of a config file stands, as ``file:line``.

    Raises:
        UserError: The file cannot be read, is no plain YAML mapping, or says a key nobody knows.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            tag, mark = getattr(event, "tag", None), event.start_mark
            line = mark.line + 1 if mark else 1
            if isinstance(event, yaml.AliasEvent) or (tag and not tag.startswith("tag:yaml.org")):
                what = f"tag {tag}" if tag else "alias"
                raise UserError(f"{path}:{line}: a config holds no {what}")
            if tag and "python/" in tag:
                raise UserError(f"{path}:{line}: a config runs no code: {tag}")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--config {path}: cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: a config file is a mapping of keys to values")
    return _places_of(path, root, keys, "")


def _places_of(
    path: str, node: yaml.MappingNode, keys: dict[str, Any], prefix: str
) -> dict[str, str]:
    """The part of `_places_in` that goes into nested mappings."""
    places: dict[str, str] = {}
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key not in keys:
            raise UserError(f"{place}: unknown key {key!r}{_nearest(key, keys)}")
        if key in places:
            raise UserError(f"{place}: key {key!r} stands twice; keep one")
        places[key] = place
        if isinstance(value_node, yaml.MappingNode) and dataclasses.is_dataclass(keys[key]):
            places |= _places_of(path, value_node, keys, key + ".")
    return places


def _explain(message: str, places: dict[str, str], keys: dict[str, Any]) -> str:
    """Turn jsonargparse's message into one line with the key, the value and what is allowed."""
    if message.startswith("unrecognized arguments:"):
        unknown = [w for w in message.split(":", 1)[1].split() if w.startswith("--")]
        if not unknown:
            stray = message.split(":", 1)[1].strip()
            return f"{stray!r} belongs to no option; options are written --key value"
        name = unknown[0].removeprefix("--").split("=", 1)[0]
        return f"unknown option --{name}{_nearest(name, keys)}"
    if 'Parser key "' in message:
        key = message.split('Parser key "', 1)[1].split('"', 1)[0]
        if key in keys and (inner := re.search(r"NestedArg\(key='([\w.]+)'", message)):
            name = f"{key}.{inner[1]}"
            hint = _nearest(name, keys) or f"; {key} itself is {_describe(keys[key])}"
            return f"unknown option --{name}{hint}"
        if key in keys:
            return f"{places.get(key, key)}: {_given(message)} is not {_describe(keys[key])}"
    return " ".join(message.split())


def _given(message: str) -> str:
    """The value the user gave, quoted."""
    for marker in ("Given value: ", "Got value: "):
        if marker in message:
            return repr(message.split(marker, 1)[1].splitlines()[0].strip())
    return "the value"


def _describe(hint: Any) -> str:
    """A type in a user's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        parts = [_describe(a) for a in arguments if a is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in arguments else parts)
    if origin is list:
        return "a list, such as: a b c" if arguments == (str,) else "a list of numbers: 2 3"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return words.get(hint, "a group of keys")


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` for a mistyped name, or nothing."""
    names = list(known)
    matches = [key for key in NAMES_ELSEWHERE.get(name, ()) if key in names]
    if not matches:
        matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not matches:  # a nested key typed without its group
        matches = [k for k in names if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    matches = matches[:1]
    return f"; did you mean {matches[0]}?" if matches else ""
