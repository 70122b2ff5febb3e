"""Wrong inputs, as a user makes them: one clear line, the right exit code, no traceback."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

from speccheck.config import package_dir

SMALL_TABLE = Path(__file__).parent / "small_table.json"
ROLLOUT = f"""\
name: test
speculation: {{method: draft_model, model: packaged, num_speculative_tokens: 4}}
corpus: {{paths: [corpus.jsonl]}}
fixture: {{seeds: 2000, table: '{SMALL_TABLE}'}}
replay:
  control_concurrency: 4
  slices: [stop, min_p]
  slice_prompts: 2
  probe: {{prompts: 2, samples: 3, max_tokens: 8}}
shadow: {{requests_per_route: 8, blocks: 4, rate_per_s: 8}}
canary:
  {{shares: [0.5], requests_per_step: 12, min_speculative: 4, watch_requests: 4, rate_per_s: 8}}
warm_up: 1
routes:
  - name: support
    tasks: [support]
"""


def speccheck(
    *arguments: str | Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "speccheck", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process: what it says and its exit code, where the process is not the point.

    All but the interpreter's start is the same: `main` parses, runs, and turns errors into lines.
    """
    from speccheck.cli import main

    argv = [str(argument) for argument in arguments]
    said, told = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.chdir(cwd)
        try:
            with redirect_stdout(told), redirect_stderr(said), pytest.raises(SystemExit) as ended:
                main(argv)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, ended.value.code, told.getvalue(), said.getvalue())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small rollout and six prompts."""
    (tmp_path / "rollout.yaml").write_text(ROLLOUT, encoding="utf-8")
    lines = (package_dir("corpora") / "support.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[:6]) + "\n", encoding="utf-8")
    return tmp_path


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line with these words, this exit code, no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_missing_rollout(tmp_path: Path) -> None:
    """A rollout that is not there: exit code 2, and what writes one."""
    refused(command("run", cwd=tmp_path), 2, "rollout.yaml", "speccheck init")


def test_a_missing_corpus(folder: Path) -> None:
    """A corpus that is not there is named."""
    edit(folder / "rollout.yaml", "corpus.jsonl", "gone.jsonl")
    refused(command("stage", "replay", cwd=folder), 2, "gone.jsonl")


def test_broken_yaml(folder: Path) -> None:
    """YAML that does not parse is an error with its line."""
    edit(folder / "rollout.yaml", "routes:", "routes: [")
    refused(command("run", cwd=folder), 2, "rollout.yaml:", "not valid YAML")


def test_a_rule_with_a_typo(folder: Path) -> None:
    """A misspelt rule is an error with its line and a suggestion."""
    shutil.copy(package_dir("rules") / "guardrails.yaml", folder / "guardrails.yaml")
    edit(folder / "guardrails.yaml", "  max_error_rate:", "  max_eror_rate:")
    edit(folder / "rollout.yaml", "warm_up: 1", "warm_up: 1\nguardrails: guardrails.yaml")
    refused(command("run", cwd=folder), 2, "guardrails.yaml:", "did you mean 'max_error_rate'")


def test_a_table_that_does_not_sum_to_one(folder: Path) -> None:
    """A fixture table whose row sums to 0.99 is named with its row."""
    table = (package_dir("corpora") / "fixture_t4.json").read_text(encoding="utf-8")
    broken = re.sub(r"60,\s*10,\s*10,\s*5,\s*15", "60, 10, 10, 5, 14", table, count=1)
    assert broken != table
    (folder / "table.json").write_text(broken, encoding="utf-8")
    edit(folder / "rollout.yaml", str(SMALL_TABLE), "table.json")
    refused(command("stage", "fixture", cwd=folder), 2, "table.json", "99")
    refused(command("trace", "--table", "table.json", cwd=folder), 2, "table.json", "99")


def test_a_server_that_is_not_there(folder: Path) -> None:
    """Attached URLs that nobody answers at: exit code 4, with the URL."""
    urls = "{target_only: 'http://127.0.0.1:9', speculative: 'http://127.0.0.1:19'}"
    edit(folder / "rollout.yaml", "warm_up: 1", f"warm_up: 1\nengine: attached\nattached: {urls}")
    refused(
        command("stage", "replay", cwd=folder), 4, "http://127.0.0.1:9", "is the server running?"
    )


def test_one_server_for_both_arms(folder: Path) -> None:
    """The same URL on both arms would compare a server with itself."""
    urls = "{target_only: 'http://127.0.0.1:9/', speculative: 'http://127.0.0.1:9'}"
    edit(folder / "rollout.yaml", "warm_up: 1", f"warm_up: 1\nengine: attached\nattached: {urls}")
    refused(command("run", "--dry-run", cwd=folder), 2, "rollout.yaml:", "both arms")


@pytest.mark.parametrize(
    ("speculates", "word"),
    [((True, False), "swapped"), ((False, False), "without a speculative config")],
    ids=["swapped", "none"],
)
def test_attached_servers_that_are_no_pair(
    monkeypatch: pytest.MonkeyPatch, speculates: tuple[bool, bool], word: str
) -> None:
    """Arms that say they run what they should not are refused before anything is sent."""
    from speccheck import launch
    from speccheck.config import Rollout
    from speccheck.errors import UsageError

    def reply(url: str, path: str, *_: object, **__: object) -> dict[str, object]:
        if path == "/v1/models":
            return {"data": [{"id": "target"}]}
        config = {"method": "ngram"} if speculates[url.endswith("2")] else None
        return {"vllm_config": {"speculative_config": config}}

    monkeypatch.setattr(launch, "_get_json", reply)
    rollout = Rollout.model_validate(
        {
            "name": "test",
            "engine": "attached",
            "attached": {"target_only": "http://arm/1", "speculative": "http://arm/2"},
            "speculation": {"method": "ngram"},
            "routes": [{"name": "support"}],
        }
    )
    with pytest.raises(UsageError, match=word), launch.arms(rollout, Path("unused"), say=print):
        pass


def test_an_api_key_that_is_not_set(folder: Path) -> None:
    """A key is asked for by the name of its variable."""
    urls = "target_only: 'http://127.0.0.1:9', speculative: 'http://127.0.0.1:19'"
    edit(
        folder / "rollout.yaml",
        "warm_up: 1",
        f"warm_up: 1\nengine: attached\nattached: {{{urls}, api_key_env: NO_SUCH_KEY}}",
    )
    refused(command("stage", "replay", cwd=folder), 2, "NO_SUCH_KEY")


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    """An output folder that cannot be made: exit code 4, with its name."""
    (folder / "file").write_text("", encoding="utf-8")
    refused(command("stage", "fixture", "--out", "file/run", cwd=folder), 4, "file/run")


def test_a_report_that_could_not_be_written(folder: Path) -> None:
    """A report's missing folder is found before anything is measured."""
    done = command("stage", "fixture", "--junit", "gone/junit.xml", cwd=folder)
    refused(done, 2, "--junit", "gone")
    assert not (folder / "speccheck-run").exists()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_exit_code_stands_when_nobody_reads(folder: Path, form: tuple[str, ...]) -> None:
    """`speccheck ... 2>&1 | head -1` runs to its end and exits with its verdict."""
    process = subprocess.Popen(
        [sys.executable, "-m", "speccheck", "stage", "fixture", *form],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert command("decide", cwd=folder).returncode == 4


def test_standard_output_on_a_full_disk(folder: Path) -> None:
    """An outcome that cannot be printed is one line and exit code 4; here of the packaged table."""
    edit(folder / "rollout.yaml", f", table: '{SMALL_TABLE}'", "")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "speccheck", "stage", "fixture"],
            cwd=folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    refused(done, 4, "standard output")
    assert "fixture: pass" in done.stderr


def test_a_store_that_is_held(folder: Path) -> None:
    """A second process on the same store gets one clear line and exit code 4."""
    from speccheck.store import Store

    (folder / "run").mkdir()
    with Store.open(folder / "run" / "receipts.duckdb"):
        done = speccheck("stage", "fixture", "--out", "run", cwd=folder)
    refused(done, 4, "receipts.duckdb", str(os.getpid()))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ("rejection_sample_method: synthetic", "synthetic"),
        ("rejection_sample_method: fly", "fly"),
        ("rejection_sample_method: typical", "typical"),
        ("lenience: 0.8", "lenience"),
    ],
)
def test_the_fixture_refuses_lossy_algorithms(folder: Path, config: str, word: str) -> None:
    """A lossy or unknown algorithm fails the fixture stage with exit code 1 and its name."""
    edit(
        folder / "rollout.yaml",
        "num_speculative_tokens: 4}",
        f"num_speculative_tokens: 4, {config}}}",
    )
    done = command("stage", "fixture", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert word in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tokens: 4", "tokens: 0", "rollout.yaml:2: speculation: num_speculative_tokens is 0"),
        ("tokens: 4", "tokens: 1000000", "num_speculative_tokens is 1000000"),
        ("tokens: 4", "tokens: four", "num_speculative_tokens is 'four'"),
        ("tokens: 4", "tokens: 16", "the embedded engine takes 1 to 15"),
        (", num_speculative_tokens: 4", "", "the embedded engine takes 1 to 15"),
        ("model: packaged", "model: no/draft", "no/draft; give the folder of a model"),
        ("warm_up: 1", "warm_up: 1\nembedded: {model: gone}", "embedded.model: there is no folder"),
        ("warm_up: 1", "warm_up: 1\nprotected_tasks: [suport]", "protected_tasks: the corpus has"),
        (
            "tasks: [support]",
            "tasks: [support, jsn]",
            "route support: the corpus has no task 'jsn'",
        ),
        (
            "tasks: [support]",
            "tasks: [support]\n    canary: {tasks: [prse]}",
            "route support, canary: the corpus has no task 'prse'",
        ),
    ],
)
def test_names_and_numbers_that_could_not_run(folder: Path, old: str, new: str, words: str) -> None:
    """What no engine or corpus could serve is an error before anything is started."""
    from speccheck import stages
    from speccheck.errors import UsageError

    edit(folder / "rollout.yaml", old, new)
    with pytest.raises(UsageError, match=re.escape(words)):
        stages.describe(folder / "rollout.yaml")


def test_a_dry_run_counts_all_that_is_sent(folder: Path) -> None:
    """Warm-up and protected traffic are in the plan, as are rules that hold without being set."""
    from speccheck import stages

    planned = stages.describe(folder / "rollout.yaml")
    assert planned["warm_up"] == 2
    (shadow,) = [stage for stage in planned["stages"] if stage["stage"] == "shadow"]
    assert shadow["requests"] == 8 * 2.5
    edit(folder / "rollout.yaml", "warm_up: 1", "warm_up: 1\nprotected_tasks: [support]")
    planned = stages.describe(folder / "rollout.yaml")
    (shadow,) = [stage for stage in planned["stages"] if stage["stage"] == "shadow"]
    # 8 requests at 8/s are one second with the mirror and half a second without, at 2/s protected.
    assert shadow["requests"] == 8 * 2.5 + 2 * 2.5
    assert planned["routes"][0]["rules"]["min_speedup"] == 1


def n_sockets(pid: int) -> int:
    """Open sockets of a process that runs."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += fd.readlink().name.startswith("socket:")
    return found


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_sigterm_is_ctrl_c(folder: Path, background: bool) -> None:  # noqa: FBT001
    """Ended by an orchestrator: servers stopped, what was measured kept, exit code 130.

    Also where it runs in the background of a script, which makes it ignore Ctrl-C itself.
    """
    corpus = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "corpus.jsonl").write_text("\n".join(corpus[:2]) + "\n", encoding="utf-8")
    was = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "speccheck", "stage", "replay", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, was)
    assert process.stderr is not None
    for line in process.stderr:
        if "A/A control: " in line:
            break
    while n_sockets(process.pid) < 4:  # the loop's own pair, and connections: requests are sent
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    told, said = process.communicate(timeout=300)
    assert process.returncode == json.loads(told)["exit_code"] == 130
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert command("receipts", "verify", cwd=folder).returncode == 0


def test_json_errors_are_json(tmp_path: Path) -> None:
    """With --json an error is an object whose exit code is the process's own."""
    done = speccheck("run", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode == 2
    assert "rollout.yaml" in told["error"]


def test_unknown_commands_and_options(tmp_path: Path) -> None:
    """A mistyped command is a usage error with a suggestion."""
    refused(command("stge", cwd=tmp_path), 2, "Did you mean")
    refused(command("run", "--rolout", "x", cwd=tmp_path), 2, "--rollout")


def test_every_help_shows_its_example_as_it_is_typed() -> None:
    """Help fits eighty columns, and an example keeps its lines."""
    import click
    from click.testing import CliRunner

    from speccheck.cli import cli

    def commands(group: click.Group, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [words]
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                found += commands(command, (*words, name))
            else:
                found.append((*words, name))
        return found

    for words in commands(cli, ()):
        page = CliRunner().invoke(cli, [*words, "--help"]).output
        assert "\\b" not in page
        assert all(len(line) <= 80 for line in page.splitlines())
        if "Example:" in page:
            lines = [line.strip() for line in page.splitlines()]
            assert lines[lines.index("Example:") + 1].startswith("speccheck ")


def test_init_writes_what_run_reads(tmp_path: Path) -> None:
    """`speccheck init` writes files that load, and does not overwrite them."""
    assert command("init", "new", cwd=tmp_path).returncode == 0
    done = command("run", "--dry-run", "--json", cwd=tmp_path / "new")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert [stage["stage"] for stage in planned["stages"]] == [
        "fixture",
        "replay",
        "shadow",
        "canary",
    ]
    assert not (tmp_path / "new" / "speccheck-run").exists()
    refused(command("init", "new", cwd=tmp_path), 2, "is there already", "--force")


def test_a_trace_fits_eighty_columns(tmp_path: Path) -> None:
    """The worked trace is readable on a narrow terminal."""
    done = command("trace", "--seed", "18", cwd=tmp_path)
    assert done.returncode == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for words in ("drafted A B C D", "discarded untested", "committed A B X"):
        assert words in done.stdout


def test_receipts_without_a_run(tmp_path: Path) -> None:
    """Commands that read a run say that there is none."""
    for words in (["receipts", "list"], ["decide"], ["packet"]):
        refused(command(*words, cwd=tmp_path), 4, "no receipts there")


def test_filters_that_nothing_can_fit(tmp_path: Path) -> None:
    """A mistyped stage or outcome is an error, not an empty list."""
    for option in ("--stage", "--outcome"):
        refused(command("receipts", "list", option, "canray", cwd=tmp_path), 2, option, "canray")


def test_corpus_import_and_check(tmp_path: Path) -> None:
    """Plain lines become a corpus that `corpus check` counts."""
    (tmp_path / "plain.txt").write_text("Hello\nWhat is new?\n", encoding="utf-8")
    done = command("corpus", "import", "plain.txt", "corpus.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("corpus", "check", "corpus.jsonl", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["prompts"] == 2
