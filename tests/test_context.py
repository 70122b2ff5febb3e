"""An open run: what it refuses to go on with, and what it finds again."""

from __future__ import annotations

import json

import duckdb
import pytest
from attached_pair import attached_pair

from speccheck import context, launch, revisit
from speccheck.console import Reporter
from speccheck.errors import UsageError


def opened(pair):
    return context.open_run(pair.rollout, pair.folder / "run", Reporter(), fresh=False)


def test_a_waived_name_that_no_server_reports_is_refused(tmp_path):
    """A misspelt waiver would waive nothing; it is found before the first request."""
    with attached_pair(tmp_path, waive=["max_num_seq"]) as pair:
        for arm, n in zip(pair.servers.values(), (64, 32), strict=True):
            info = {"engine": "scripted", "max_num_seqs": n}
            arm.pages = {**arm.pages, "/server_info?config_format=json": info}
        with opened(pair) as run, pytest.raises(UsageError, match="reports 'max_num_seq'") as error:
            run.arms()
        assert "what differs between them is max_num_seqs" in str(error.value)
        text = pair.rollout.read_text(encoding="utf-8")
        pair.rollout.write_text(text.replace("max_num_seq", "max_num_seqs"), encoding="utf-8")
        with opened(pair) as run:
            assert run.arms()
        assert sum(len(arm.seen) for arm in pair.servers.values()) == 0


def test_servers_that_report_nothing_can_be_waived_anything(tmp_path):
    """Where no configuration is captured there is no name to know better by."""
    with attached_pair(tmp_path, waive=["scheduler.policy"]) as pair, opened(pair) as run:
        assert run.arms()


def test_a_run_goes_on_only_on_the_machine_it_was_begun_on(tmp_path, monkeypatch):
    """Times of two machines are not mixed; a kernel update is no other machine."""
    with attached_pair(tmp_path) as pair:
        with opened(pair) as run:
            run.arms()
        real = launch.machine()
        monkeypatch.setattr(launch, "machine", lambda: real | {"system": "a newer kernel"})
        with opened(pair) as run:
            assert run.arms()
        monkeypatch.setattr(launch, "machine", lambda: real | {"cores": 999})
        with opened(pair) as run, pytest.raises(UsageError, match=r"another machine \(cores"):
            run.arms()


def test_a_run_row_that_says_something_else_is_refused(tmp_path):
    """Coming back to a run compares it with what was begun, not with itself."""
    with attached_pair(tmp_path) as pair:
        with opened(pair):
            pass
        with duckdb.connect(tmp_path / "run" / context.STORE_NAME) as connection:
            connection.execute("UPDATE runs SET rules_digest = 'rules:other'")
        with pytest.raises(UsageError, match="begun with another rules_digest"), opened(pair):
            pass


def test_another_expiry_is_the_same_run(tmp_path):
    """Until when a decision holds changes nothing that was measured; the newest date is told."""
    with attached_pair(tmp_path) as pair:
        data = json.loads(pair.rollout.read_text(encoding="utf-8"))
        for expires, said in ((None, "something"), (30, "20"), ("2031-01-02", "2031-01-02")):
            pair.rollout.write_text(json.dumps(data | {"expires": expires}), encoding="utf-8")
            with opened(pair) as run:
                (only,) = run.store.runs()
                assert revisit.validity(only).startswith(said)
        pair.rollout.write_text(json.dumps(data | {"seed": 77}), encoding="utf-8")
        with opened(pair) as run:
            assert len(run.store.runs()) == 2
