"""The plugin in a process of its own, through SGLang's own loader."""

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
from tests import models

from hashtap.releases import installed_sglang

FOUND, _ = installed_sglang()
HEAVY = {"torch", "triton", "numpy", "hashtap.session", "hashtap.rank", "hashtap.writer", "hashtap_kernels"}
REGISTER = """
import sys
from sglang.srt.plugins.hook_registry import HookRegistry
import hashtap.plugin
before = set(sys.modules)
hashtap.plugin.register()
loaded = set(sys.modules) - before
print(sorted(HookRegistry._hooks))
print(sorted(loaded))
"""


def run(code: str, tmp_path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HASHTAP_")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**clean, **environment}
    )


def test_without_a_directory_only_the_flags_are_hooked(tmp_path: Path) -> None:
    answer = run(REGISTER, tmp_path)
    assert answer.returncode == 0, answer.stderr
    hooked, loaded = map(literal_eval, answer.stdout.splitlines()[-2:])
    assert hooked == [f"sglang.srt.server_args.ServerArgs.{name}_cli_args" for name in ("add", "from")]
    assert not HEAVY & set(loaded)


HELP = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args({arguments})
"""


def test_flags_have_a_group_of_their_own_in_the_help(tmp_path: Path) -> None:
    answer = run(HELP.format(arguments=["--help"]), tmp_path)
    assert answer.returncode == 0, answer.stderr
    group = answer.stdout[answer.stdout.index("hashtap: capture of hidden states") :]
    for flag in ("--capture-dir", "--capture-layers", "--capture-ring-gib", "--capture-wait-s"):
        assert flag in group


def test_a_bad_flag_ends_the_launch_with_one_line(tmp_path: Path) -> None:
    arguments = ["--model-path", "m", "--capture-dir", "c", "--capture-layers", "2", "2"]
    answer = run(HELP.format(arguments=arguments), tmp_path)
    assert answer.returncode == 2
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("hashtap:")]
    assert "--capture-layers 2 2" in line
    assert not (tmp_path / "c").exists()


def capture() -> list[str]:
    """A command line with capture on a real model, into which releases before 0.5.20 look as they read it."""
    return ["--model-path", str(models.llama()), "--device", "cpu", "--capture-dir", "c"]


@pytest.mark.slow
def test_a_release_that_was_never_tested_is_warned_of(tmp_path: Path) -> None:
    pretend = "import hashtap.releases as r; r.TESTED_VERSIONS = ('0.5.99',)\n"
    answer = run(pretend + HELP.format(arguments=capture()), tmp_path)
    assert answer.returncode == 0, answer.stderr
    (line,) = [line for line in answer.stderr.splitlines() if "was never tested" in line]
    assert f"SGLang {FOUND} was never tested with this hashtap, which knows 0.5.99" in line


def test_a_release_that_lacks_a_target_is_refused(tmp_path: Path) -> None:
    pretend = (
        "import hashtap.releases as r; from hashtap.targets import Names\n"
        "r.TARGETS = (*r.TARGETS, Names('sglang.srt.plugins', '', ('SOMETHING',)))\n"
    )
    answer = run(pretend + HELP.format(arguments=capture()), tmp_path)
    assert answer.returncode == 3
    assert f"hashtap: SGLang {FOUND} lacks sglang.srt.plugins.SOMETHING, which hashtap needs" in answer.stderr


BREAK_ONE_HOOK = """
import sglang.srt.plugins.hook_registry as registry
wrap = registry._wrap_fn
def break_one(function, hook, kind):
    if function.__name__ == "_launch_subprocesses":
        raise RuntimeError("broken for a test")
    return wrap(function, hook, kind)
registry._wrap_fn = break_one
"""


def test_a_hook_that_sglang_does_not_apply_ends_the_launch(tmp_path: Path) -> None:
    answer = run(BREAK_ONE_HOOK + HELP.format(arguments=capture()), tmp_path)
    assert answer.returncode == 3, answer.stderr
    assert "hashtap: SGLang did not apply the hooks on sglang.srt.entrypoints.engine.Engine._launch" in answer.stderr
