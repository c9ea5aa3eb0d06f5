"""The command line of an experiment: --config, and one option per key."""

import argparse
from collections.abc import Collection, Sequence
from typing import NoReturn

from bigbatch.errors import ConfigError, Refusals, print_lines
from bigbatch.paths import expand_path
from bigbatch.trainer.config.kinds import is_option
from bigbatch.trainer.config.schema import KEYS, require_known
from bigbatch.trainer.config.trust import TRUST, TRUST_HELP

ALIASES = {"--virtual-ranks": "batch.virtual_ranks"}
"""Short options, and the keys that they state."""
FLAGS = {
    "--dry-run": "describe this run, its steps and its fusion buffers; train, stage and write nothing",
    "--quiet": "print errors only; the run folder keeps the full log",
}
"""Options of `bigbatch train` only: not part of the experiment."""
GPUS = "--gpus"
"""Option of a dry run of `bigbatch train`."""
TRAIN = "bigbatch train"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_options(
    argv: Sequence[str], *, prog: str, takes_config: bool, refusals: Refusals
) -> tuple[list[str], dict[str, str]]:
    """Return the values of --config, and the word of each key that argv states.

    takes_config: whether an error may advise --config.
    Raises: ConfigError, except for unknown options, which refusals collects; SystemExit after --help.
    """
    if nothing := [word for word in argv if word.startswith("--") and word.endswith("=--")]:
        # argparse before Python 3.13 makes an empty list of it
        raise ConfigError(f"{nothing[0]}: give a value after =")
    parser = _make_parser(prog)
    parsed, others = parse_beside_keys(parser, argv)
    if "help" in parsed:
        _print_help(parser, parsed.help, others)
    if "gpus" in parsed:
        _check_gpus(parsed)
    # a command without --config already has its experiment
    known = (*KEYS, *(() if "config" in parsed else ("config",)))
    words: dict[str, str] = {}
    for word in others:
        if not word.startswith("--"):
            is_experiment = takes_config and "config" not in parsed
            how = f"name an experiment with --config {word}" if is_experiment else "state a key as --run.epochs 3"
            raise ConfigError(f"{word} is not an option: {how}")
        flag, is_stated, value = word.partition("=")
        name = ALIASES.get(flag, flag.removeprefix("--"))
        if not (name in KEYS or is_option(name)):
            require_known(name, known=known, where="command line", refusals=refusals)
        elif not is_stated:
            raise ConfigError(f"argument {flag}: give it a value")
        else:
            words[name] = value
    return getattr(parsed, "config", []), words


def _print_help(parser: argparse.ArgumentParser, topic: str, others: Sequence[str]) -> NoReturn:
    from bigbatch.trainer.config.help_pages import page  # only here: it reads the texts of keys from the sources

    flags = (word for word in others if word.startswith("--") and "=" not in word)
    topic = topic or next(flags, "")  # also: --help --data.root
    print_lines("\n".join([*([] if topic else [parser.format_help()]), page(topic.removeprefix("--"))]))
    raise SystemExit(0)


def _check_gpus(parsed: argparse.Namespace) -> None:
    number = parsed.gpus
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{GPUS} {number}: give a number of GPUs, at least 1")
    if not getattr(parsed, "dry_run", False):
        raise ConfigError(f"{GPUS} {number} needs --dry-run: bigbatch launch local --ranks N says how many train")


def parse_beside_keys(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command's own options and arguments; return them, and the other words: keys as --section.key=VALUE.

    argparse would take a key's value for an argument, such as the run folder: it gets a stand-in for each key.
    """
    flags = {flag for action in parser._actions for flag in action.option_strings}
    end = [*argv, "--"].index("--")
    keys: dict[str, str] = {}
    words = []
    for word in _join_values(argv[:end], flags={*flags, TRUST}):
        if word.startswith("--") and word.partition("=")[0] not in flags:
            stand_in = f"--key{len(keys)}"
            keys[stand_in] = word
            word = stand_in
        words.append(word)
    arguments, others = parser.parse_known_args([*words, *argv[end:]])
    return arguments, [keys.get(word, word) for word in others if word != "--"]


def _join_values(argv: Sequence[str], *, flags: Collection[str]) -> list[str]:
    """Join --section.key VALUE to one word, for all options but flags; VALUE may begin with one dash."""
    joined: list[str] = []
    for word in argv:
        last = joined[-1] if joined else ""
        if last.startswith("--") and "=" not in last and last not in flags and not word.startswith("--"):
            joined[-1] = f"{last}={word}"
        else:
            joined.append(word)
    return joined


def _make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of all options but keys."""
    parser = _Parser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{prog} --config NAME_OR_FILE [--section.key VALUE ...]",
        description=f"""Train an experiment: a YAML file of keys that differ from their defaults.
Options override keys. Ctrl-C saves a checkpoint; the same command resumes.

examples:
  {prog} --config quickstart --run.epochs 24
  bigbatch init data/flowers; {prog} --config flowers.yaml""",
        epilog=" ".join(f"{alias} is short for --{key}." for alias, key in ALIASES.items()),
    )
    parser.add_argument("-h", "--help", metavar="TOPIC", nargs="?", const="", help="show a section, a key, or all")
    named = "file, run folder, or a name of bigbatch config list"
    parser.add_argument("--config", type=expand_path, action="append", nargs="?", const="", help=named)
    for flag, text in FLAGS.items() if prog == TRAIN else ():
        parser.add_argument(flag, action="store_true", help=text)
    if prog == TRAIN:
        parser.add_argument(GPUS, metavar="N", help="with --dry-run: print only the compute mode that N GPUs choose")
    parser.add_argument(TRUST, action="store_true", help=TRUST_HELP)
    return parser
