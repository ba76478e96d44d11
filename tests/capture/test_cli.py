"""The command line: answers, exit codes, and one clear line for every kind of bad input."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest
import torch
from tests.capture.peer import Answer, Peer, states
from tests.capture.test_extract import ROOT, free_port, prompts, write
from tests.capture.test_recover import die

from hashtap.__main__ import main
from hashtap.directory import CaptureDirectory
from hashtap.identity import prompt_key

Hashtap = Callable[..., tuple[int, str, str]]
Captured = tuple[Path, Path, list[list[int]]]


@pytest.fixture
def hashtap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hashtap:
    """Runs a command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr("hashtap.extract.POLL_S", 0.05)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hashtap", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        code = ending.value.code or 0
        assert isinstance(code, int), "a text as exit code would be printed by Python"
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """A capture directory with 12 samples of 11 prompts, its sample file and the prompts."""
    home = tmp_path_factory.mktemp("captured")
    wanted = prompts(11)
    samples = write(home / "s.jsonl", [*wanted, wanted[4]])
    with Peer(home / "captures") as peer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["hashtap", "extract", str(samples), "--server", peer.url, "--out", str(peer.directory)]
        )
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 0
    return home / "captures", samples, wanted


def only_line(text: str) -> str:
    """The one line that an error is allowed."""
    (line,) = text.splitlines()
    assert "Traceback" not in line
    return line


def test_extract_prints_what_was_captured(tmp_path: Path, hashtap: Hashtap) -> None:
    samples = write(tmp_path / "s.jsonl", [*prompts(7), [], [5000]])
    with Peer(tmp_path / "captures") as peer:
        code, out, err = hashtap("extract", samples, "--server", peer.url, "--out", peer.directory)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == f"7/9 samples captured in {peer.directory}"
    assert lines[1:4] == [
        "  left out: 1 x empty prompt",
        "  left out: 1 x out of vocabulary",
        f"  named in {peer.directory}/quarantine.jsonl",
    ]
    assert re.fullmatch(r"  [\d,]+ tokens, 0\.\d MB of states, ratio 0\.\d{3}, 7 requests, .* tokens/s", lines[4])
    *left_out, estimate = err.splitlines()
    assert left_out == [f"left out before sending: 1 of 9 lines, {r}" for r in ("empty prompt", "out of vocabulary")]
    room = rf"free in {peer.directory}: [\d.]+ [GT]B, enough"
    assert re.fullmatch(rf"to capture: [\d,]+ tokens, about [\d,]+ bytes on disk at a ratio of 1\.48; {room}", estimate)


@pytest.mark.parametrize(("fraction", "code"), [("0.5", 0), ("0.3", 0), ("0.29", 1)])
def test_a_share_of_bad_samples_can_be_allowed(tmp_path: Path, hashtap: Hashtap, fraction: str, code: int) -> None:
    samples = write(tmp_path / "s.jsonl", [*prompts(7), *[[]] * 3])
    with Peer(tmp_path / "captures") as peer:
        command = ["extract", samples, "--server", peer.url, "--out", peer.directory, "--max-bad-fraction", fraction]
        assert hashtap(*command, "--json")[0] == code


def test_extract_answers_in_json(tmp_path: Path, hashtap: Hashtap) -> None:
    samples = write(tmp_path / "s.jsonl", wanted := prompts(5))
    with Peer(tmp_path / "captures") as peer:
        command = ["extract", samples, "--server", peer.url, "--out", peer.directory, "--layers", "2,4,5", "--json"]
        first, again = json.loads(hashtap(*command)[1]), json.loads(hashtap(*command)[1])
    assert (first["captured"], first["sent"], first["exit_code"]) == (5, 5, 0)
    assert first["tokens"] == sum(map(len, wanted))
    assert first["ratio"] > 0
    assert (again["captured"], again["already_captured"], again["sent"]) == (5, 5, 0)


def test_a_lost_server_ends_with_3_and_says_how_to_go_on(tmp_path: Path, hashtap: Hashtap) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(40))

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        if len(peer.received) == 10:
            peer.close_soon(0.0)
        return 30.0 if len(peer.received) >= 10 else None

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        command = ["extract", samples, "--server", peer.url, "--out", peer.directory, "--attempts", 1, "--timeout-s", 3]
        code, out, err = hashtap(*command, "--concurrency", 1, "--api-key", "secret")
    assert code == 3
    assert "9/40 samples captured" in out
    assert "  left out: 20 x not captured" in out
    assert "  not captured yet: 11" in out
    resume, error = err.splitlines()[-2:]
    assert resume == "to capture the rest: hashtap " + " ".join(
        map(str, [*command, "--concurrency", 1, "--api-key", "KEY"])
    )
    assert error.startswith("hashtap: stopped: 20 samples failed in a row, the last with: ")


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(60))
    options: dict[str, Any] = {"capture_seal_after_s": 0.05}
    with Peer(tmp_path / "captures", trouble=lambda attempt, body: 0.4, options=options) as peer:
        command = [sys.executable, "-m", "hashtap", "extract", str(samples), "--server", peer.url]
        command += ["--out", str(peer.directory), "--concurrency", "4"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # Whatever started the tests may ignore Ctrl-C, and its children with it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while len(peer.received) < 20:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    done = re.search(r"^(\d+)/60 samples captured", out, re.MULTILINE)
    assert done is not None
    assert 1 <= int(done[1]) < 60
    estimate, again = err.splitlines()
    assert estimate.startswith("to capture: ")
    assert again.startswith("to capture the rest: hashtap extract ")


def test_verify_counts_and_names(captured: Captured, tmp_path: Path, hashtap: Hashtap) -> None:
    captures, samples, wanted = captured
    code, out, _ = hashtap("verify", captures)
    assert (code, "11/11 verified" in out) == (0, True)
    code, out, _ = hashtap("verify", captures, "--samples", samples)
    assert (code, "12/12 verified" in out) == (0, True)
    code, out, _ = hashtap("verify", captures, "--samples", samples, "--quick", "--json")
    assert (code, json.loads(out)["verified"]) == (0, 12)

    more = write(tmp_path / "more.jsonl", [*wanted, [999, 998], []])
    code, out, _ = hashtap("verify", captures, "--samples", more)
    assert code == 1
    missing, unusable, summary = out.splitlines()
    assert missing.startswith("missing: ")
    assert "s-12" in missing
    assert unusable == f"unusable: line 13 of {more}: empty prompt: input_ids has no token"
    assert "11/12 verified" in summary


def test_verify_names_a_flipped_bit(captured: Captured, tmp_path: Path, hashtap: Hashtap) -> None:
    source, samples, _ = captured
    captures = tmp_path / "copy"
    captures.mkdir()
    for path in source.iterdir():
        (captures / path.name).write_bytes(path.read_bytes())
    shard = next(captures.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, _ = hashtap("verify", captures, "--samples", samples)
    assert code == 1
    assert shard.name in out
    assert "12/12" not in out


def test_verify_names_a_sample_whose_values_are_no_numbers(
    tmp_path: Path, hashtap: Hashtap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 7 of one prompt is NaN, that of another infinite: the run goes on, and both are named."""
    bad = {700: float("nan"), 701: float("inf")}

    def spoilt(token_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        layers = states(token_ids, positions)
        for token, value in bad.items():
            layers[2][(token_ids == token) & (positions == 7), 5] = value
        return layers

    monkeypatch.setattr("tests.capture.peer.states", spoilt)
    wanted = [[n] * 20 for n in range(4)]
    wanted[1][7], wanted[2][7], wanted[3][8] = 700, 701, 700
    samples = write(tmp_path / "s.jsonl", wanted)
    with Peer(tmp_path / "captures") as peer:
        code, out, _ = hashtap("extract", samples, "--server", peer.url, "--out", peer.directory)
    assert code == 0
    code, out, _ = hashtap("verify", tmp_path / "captures", "--samples", samples)
    assert code == 1
    *problems, summary = out.splitlines()
    inf, nan = sorted(problems)
    assert nan.startswith("nan: sample s-2, ")
    assert inf.startswith("inf: sample s-3, ")
    assert all("rows 7, boundary 5" in line for line in (nan, inf))
    assert "2/4 verified" in summary


def test_show_describes_a_directory(captured: Captured, hashtap: Hashtap) -> None:
    captures, _, wanted = captured
    code, out, _ = hashtap("show", captures)
    facts = dict(re.split(r"\s{3,}", line, maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert (facts["records"], facts["samples named"], facts["model"]) == ("11", "12", "peer")
    assert facts["rows"] == f"{sum(map(len, wanted)):,}"
    assert out.count("boundary") == 3
    as_json = json.loads(hashtap("show", captures, "--json")[1])
    assert (as_json["duplicates"], as_json["damaged shards"], as_json["incomplete"]) == (0, [], [])


@pytest.mark.parametrize("by_key", [True, False], ids=["key", "sample id"])
def test_show_describes_a_record(captured: Captured, hashtap: Hashtap, by_key: bool) -> None:
    captures, _, wanted = captured
    key = prompt_key(wanted[4]).hex()
    code, out, _ = hashtap("show", captures, key if by_key else "s-12", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["key"], facts["samples"], facts["tokens"]) == (key, ["s-5", "s-12"], len(wanted[4]))
    assert facts["token ids"].startswith(" ".join(map(str, wanted[4][:12])))
    assert re.fullmatch(r"mean norm \d+\.\d+, first values( -?[\d.e-]+){4} …", facts["boundary 2"])


def test_show_of_an_empty_directory(tmp_path: Path, hashtap: Hashtap) -> None:
    CaptureDirectory.create(tmp_path)
    code, out, _ = hashtap("show", tmp_path)
    assert code == 0
    assert re.search(r"^records +0$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "{tmp}/none"], 2, "none is not a directory"),
        (["verify", "{tmp}"], 2, "holds no hashtap.json"),
        (["show", "{captures}", "no-such-sample"], 1, "names no sample 'no-such-sample'"),
        (["show", "{captures}", "0" * 32], 1, "was not captured"),
        (["verify", "{captures}", "--samples", "{tmp}/none.jsonl"], 2, "No such file"),
        (["extract", "{tmp}/s.jsonl", "--server", "{dead}", "--out", "{captures}"], 3, "is it up?"),
        (["extract", "{tmp}/s.jsonl", "--server", "nowhere", "--out", "{captures}"], 2, "is no URL"),
        (["extract", "{tmp}/s.jsonl", "--server", "{peer}", "--out", "{tmp}/none"], 2, "none is not a directory"),
        (["extract", "{tmp}/none.jsonl", "--server", "{peer}", "--out", "{peer_dir}"], 2, "No such file"),
        (["extract", "{tmp}/empty.jsonl", "--server", "{peer}", "--out", "{peer_dir}"], 2, "is empty"),
        (["extract", "{tmp}/s.jsonl", "--server", "{peer}", "--out", "{captures}"], 2, "but the server writes to"),
        (
            ["extract", "{tmp}/s.jsonl", "--server", "{peer}", "--out", "{peer_dir}", "--layers", "a"],
            2,
            "no boundaries",
        ),
        (["extract", "{tmp}/s.jsonl", "--server", "{peer}", "--out", "{peer_dir}", "--layers", "1"], 2, "captures the"),
        (["extract", "{tmp}/s.jsonl", "--server", "{bare}", "--out", "{peer_dir}"], 2, "runs without hashtap"),
        (
            ["extract", "{tmp}/s.jsonl", "--server", "{peer}", "--out", "{tmp}/o", "--remote", "--ahead-samples", "3"],
            2,
            "not --remote",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    captured: Captured,
    peers: tuple[Peer, Peer],
    tmp_path: Path,
    hashtap: Hashtap,
    arguments: Sequence[str],
    code: int,
    message: str,
) -> None:
    write(tmp_path / "s.jsonl", [[1, 2, 3]])
    (tmp_path / "empty.jsonl").touch()
    peer, bare = peers
    names = {"captures": captured[0], "peer": peer.url, "peer_dir": peer.directory, "bare": bare.url}
    names |= {"tmp": tmp_path, "dead": f"http://127.0.0.1:{free_port()}"}
    got, out, err = hashtap(*(argument.format(**names) for argument in arguments))
    assert got == code
    assert only_line(err).startswith("hashtap: ")
    assert message in err
    assert out == ""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with hashtap and one without."""
    home = tmp_path_factory.mktemp("peers")
    with Peer(home / "captures") as peer, Peer(home / "unused", captures=False) as bare:
        yield peer, bare


@pytest.mark.parametrize(
    "arguments", [["extract"], ["extract", "s.jsonl"], ["verify"], ["nonsense"], ["show", "a", "b", "c"]]
)
def test_a_wrong_command_line_is_bad_usage(hashtap: Hashtap, arguments: Sequence[str]) -> None:
    code, out, err = hashtap(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err
    assert "Traceback" not in err


def test_version(hashtap: Hashtap) -> None:
    code, out, _ = hashtap("--version")
    assert code == 0
    assert re.fullmatch(r"hashtap \d+\.\d+\.\d+\n", out)


def test_without_its_libraries_the_command_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from hashtap.__main__ import main; main()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert only_line(answer.stderr) == "hashtap: the command line needs typer: pip install 'hashtap[cli]'"


def test_recover(tmp_path: Path, hashtap: Hashtap) -> None:
    partial = die(tmp_path, [[1, 2, 3], [4, 5]])
    code, out, err = hashtap("recover", tmp_path)
    assert (code, err) == (0, "")
    assert f"{partial.name}: its writer died; 2 records, 5 rows of it are sealed now" in out
    assert "1 unfinished files, 2 records recovered" in out
    assert hashtap("recover", tmp_path, "--json") == (0, "[]\n", "")
    assert hashtap("verify", tmp_path)[0] == 0
    code, _, err = hashtap("recover", tmp_path / "missing")
    assert code == 2
    assert "is not a directory" in only_line(err)


def test_plan(tmp_path: Path, hashtap: Hashtap) -> None:
    kimi = ("plan", "--layers", 4, "--hidden", 7168)
    code, out, err = hashtap(*kimi, "--tokens", 130_000_000)
    assert (code, err) == (0, "")
    assert "a token: 4 x 7168 x 2 = 57,344 bytes" in out
    assert "130,000,000 tokens: 7.45 TB of states\non disk: 5.04 TB at a ratio of 1.48" in out
    small = ("plan", "--layers", 4, "--hidden", 576, "--tokens", 1000, "--dir", tmp_path / "not" / "there")
    code, out, _ = hashtap(*small)
    assert code == 0
    assert "enough" in out


def test_plan_refuses_a_disk_that_is_too_small(
    tmp_path: Path, hashtap: Hashtap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth more than the estimate must be free: 1,000 tokens take 4,608,000 bytes at a ratio of 1."""
    asked = ("plan", "--layers", 4, "--hidden", 576, "--tokens", 1000, "--ratio", 1, "--dir", tmp_path)
    usage = disk_usage(tmp_path)
    for free_bytes, code in ((5_068_799, 1), (5_068_800, 0)):
        monkeypatch.setattr("hashtap.estimate.disk_usage", lambda _, free=free_bytes: usage._replace(free=free))
        assert hashtap(*asked)[0] == code
        assert json.loads(hashtap(*asked, "--json")[1])["fits"] is (code == 0)
        assert hashtap(*asked, "--anyway")[0] == 0


def test_plan_reckons_with_time_and_what_is_busy(tmp_path: Path, hashtap: Hashtap) -> None:
    config = tmp_path / "config.json"
    shape = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}
    config.write_text(json.dumps({"text_config": shape}))
    asked = ("plan", "--model-config", config, "--tokens", "87.8e6", "--gpus", 8, "--writers", 4)
    code, out, _ = hashtap(*asked)
    assert code == 0
    for text in ("87,800,000 tokens: 5.03 TB of states", "time: 37 min at 40,000 tokens/s", "bottleneck: prefill"):
        assert text in out
    assert out.splitlines()[-1].startswith("assumed: 8 GPUs of 5,000 prompt tokens/s each; ")
    slow = json.loads(hashtap(*asked, "--disk-gb-per-s", 0.5, "--json")[1])["forecast"]
    assert (slow["bottleneck"], slow["tokens_per_s"]) == ("disk", pytest.approx(0.5e9 * 1.48 / 57_344))
    code, _, err = hashtap("plan", "--tokens", 5)
    assert (code, "either --hidden or --model-config" in only_line(err)) == (2, True)


def test_bench_refuses_what_it_cannot_measure(tmp_path: Path, hashtap: Hashtap) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8, "hidden_size": 8, "vocab_size": 99}')
    asked = ("bench", "server", tmp_path)
    samples = write(tmp_path / "s.jsonl", prompts(9))
    for more, text in (
        (("--samples", samples, "--prompts", 5), "9 distinct prompts make 1 rounds of 5, and 6 are needed"),
        (("--random-ids", "--tokens", "9-3"), "prompts of 9 to 3 tokens cannot be made"),
        (("--random-ids", "--tokens", "many"), "--tokens 'many' is no range"),
        (("--random-ids", "--against", "vllm"), "--against vllm: choose from http, dump, transformers"),
        (("--decode-tokens", 1), "--decode-tokens 1"),
        (("--layers", "a"), "--layers 'a' are no boundaries"),
        (("--json", tmp_path / "none" / "f.json"), "there is no folder"),
        ((), "give --samples FILE or --random-ids"),
    ):
        code, _, err = hashtap(*asked, *more)
        assert (code, text in only_line(err)) == (2, True), err


@pytest.mark.parametrize("option", ["--tokens", "--layers", "--hidden", "--ratio"])
def test_plan_wants_numbers_above_zero(hashtap: Hashtap, option: str) -> None:
    given = {"--tokens": 1, "--layers": 4, "--hidden": 8, option: 0}
    code, _, err = hashtap("plan", *(part for pair in given.items() for part in pair))
    assert code == 2
    assert f"{option[2:]} is 0" in only_line(err)
    code, _, err = hashtap("plan", "--hidden", 8, "--tokens", "nan")
    assert (code, "--tokens nan: give a number" in only_line(err)) == (2, True)
