"""`bigbatch completion`: a script by which a shell completes commands, config keys and names of experiments at TAB.

The script holds all words, from the tables that the commands use: TAB starts no Python.
"""

import argparse
from collections.abc import Callable, Sequence

from bigbatch.cli import COMMANDS
from bigbatch.experiments.engine.plan import packaged_sweeps
from bigbatch.groups import GROUPS
from bigbatch.launch.jobs.spec import JOB_OPTIONS
from bigbatch.launch.start import make_parser as make_launch_parser
from bigbatch.trainer.config.file import packaged_configs
from bigbatch.trainer.config.kinds import OPTION_KEYS
from bigbatch.trainer.config.options import FLAGS, GPUS
from bigbatch.trainer.config.schema import KEYS
from bigbatch.trainer.config.trust import TRUST
from bigbatch.trainer.datasets.subcommands import make_parser as make_data_parser

TAKE_KEYS = ("train", "evaluate", "predict", "export", "config", "tune", "comm", "doctor", "preflight")
"""Commands, and groups of commands, that take config keys as options."""
TAKE_NAMES = ("--config", "--like")
"""Options that take the name of an experiment."""

BASH = """\
_bigbatch() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} start=0 words= i
  # after -- stands a command again
  for ((i = 1; i < COMP_CWORD; i++)); do if [[ ${{COMP_WORDS[i]}} == -- ]]; then start=$i; fi; done
  local place=$((COMP_CWORD - start)) command=${{COMP_WORDS[start+1]}}
  if [[ $place == 1 ]]; then words="{commands}"
  elif [[ $before == {options} ]]; then words="{names}"
  elif [[ $word == -* ]]; then
    case $command in
      launch) words="{launch}" ;;
      {keyed}) words="{keys}" ;;
    esac
  elif [[ $command == config && $place != 2 ]]; then words="{names}"
  elif [[ $place == 2 ]]; then
    case $command in
{second}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _bigbatch bigbatch
"""

ZSH = """\
whence compdef > /dev/null || {{ autoload -U compinit && compinit; }}
autoload -U bashcompinit && bashcompinit
"""

FISH = """\
function __bigbatch_words
  set -l tokens (commandline -opc)
  set -l start 1
  # after -- stands a command again
  for i in (seq (count $tokens)); test $tokens[$i] = --; and set start $i; end
  set -l place (math (count $tokens) - $start + 1)
  set -l command ''
  test $place -gt 1; and set command $tokens[(math $start + 1)]
  if test $place = 1; string split ' ' "{commands}"
  else if contains -- $tokens[-1] {options}; string split ' ' "{names}"
  else if string match -q -- '-*' (commandline -ct)
    switch $command
      case launch; string split ' ' -- "{launch}"
      case {keyed}; string split ' ' -- "{keys}"
    end
  else if test $command = config -a $place != 2; string split ' ' "{names}"
  else if test $place = 2
    switch $command
{second}
    end
  end
end
complete -c bigbatch -a '(__bigbatch_words)'
"""


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell that argv names."""
    parser = argparse.ArgumentParser(
        prog="bigbatch completion",
        description="Print a script by which a shell completes commands, config keys and names of experiments at TAB.",
        epilog='example, for ~/.bashrc: eval "$(bigbatch completion bash)"; in fish: bigbatch completion fish | source',
    )
    parser.add_argument("shell", choices=SHELLS)
    print(SHELLS[parser.parse_args(argv).shell](), end="")
    return 0


def _bash() -> str:
    second = (f'      {name}) words="{" ".join(words)}" ;;' for name, words in _second_words().items())
    return BASH.format(
        **_words(), keyed="|".join(TAKE_KEYS), options=f"@({'|'.join(TAKE_NAMES)})", second="\n".join(second)
    )


def _fish() -> str:
    second = (f"      case {name}; string split ' ' \"{' '.join(words)}\"" for name, words in _second_words().items())
    return FISH.format(**_words(), keyed=" ".join(TAKE_KEYS), options=" ".join(TAKE_NAMES), second="\n".join(second))


SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": lambda: ZSH.format() + _bash(), "fish": _fish}


def _words() -> dict[str, str]:
    launch = ("--dry-run", "--python", *(option.flag for option in JOB_OPTIONS))
    keys = ("--config", *FLAGS, GPUS, TRUST, *(f"--{key}" for key in (*KEYS, *OPTION_KEYS)))
    parts = {"commands": COMMANDS, "names": packaged_configs(), "launch": launch, "keys": keys}
    return {name: " ".join(words) for name, words in parts.items()}


def _second_words() -> dict[str, Sequence[str]]:
    """Return the words that may follow each command."""
    return {
        **{name: tuple(group.commands) for name, group in GROUPS.items()},
        "launch": _subcommands(make_launch_parser()),
        "data": _subcommands(make_data_parser()),
        "sweep": packaged_sweeps(),
        "completion": tuple(SHELLS),
    }


def _subcommands(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    below = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return tuple(name for choices in below for name in choices)
