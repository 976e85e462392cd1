"""Workspaces: every draft is kept, and nothing a Program leaves behind runs or leads outside."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from a3r.errors import CoderFault, UsageError
from vibe.workspace import Workspace, content_sha256


def test_every_draft_is_a_commit_with_its_reason(tmp_path: Path):
    workspace = Workspace.create(tmp_path / "w")
    workspace.write({"program.py": "first = 1\n"})
    first = workspace.commit("Draft\n\nbecause")
    workspace.write({"program.py": "second = 2\n", "words/list.txt": "a b\n"})
    second = workspace.commit("Repair 1")
    assert workspace.log() == [(second, "Repair 1"), (first, "Draft")]
    assert workspace.show(first, "program.py") == "first = 1\n"
    assert workspace.show(second, "words/list.txt") == "a b\n"


def test_a_draft_replaces_the_one_before(tmp_path: Path):
    workspace = Workspace.create(tmp_path)
    workspace.write({"program.py": "", "old.py": ""})
    workspace.commit("one")
    workspace.write({"program.py": ""})
    workspace.commit("two")
    assert [path.name for path in workspace.files.iterdir()] == ["program.py"]


def test_an_empty_draft_is_kept_too(tmp_path: Path):
    workspace = Workspace.create(tmp_path)
    workspace.write({})
    sha = workspace.commit("Draft\n\nI cannot help with that")
    assert workspace.log() == [(sha, "Draft")]


def test_reports_are_attached_without_changing_the_commit(tmp_path: Path):
    workspace = Workspace.create(tmp_path)
    workspace.write({"program.py": ""})
    sha = workspace.commit("Draft")
    workspace.annotate(sha, "[1]")
    assert workspace.note(sha).strip() == "[1]"
    assert workspace.log() == [(sha, "Draft")]


def test_opening_again_goes_on_with_the_history(tmp_path: Path):
    first = Workspace.create(tmp_path)
    first.write({"program.py": "1"})
    first.commit("one")
    again = Workspace.create(tmp_path)
    again.write({"program.py": "2"})
    again.commit("two")
    assert [subject for _, subject in again.log()] == ["two", "one"]


@pytest.mark.parametrize(
    "path", ["../escape.py", "/etc/escape", "a/../../b.py", ".git/config", "", "a\\b.py", "x\0.py"]
)
def test_paths_that_leave_the_workspace_are_refused_before_anything_is_written(tmp_path: Path, path: str):
    workspace = Workspace.create(tmp_path / "w")
    with pytest.raises(CoderFault):
        workspace.write({"program.py": "", path: "x"})
    assert list(workspace.files.iterdir()) == []


def test_links_left_by_a_program_are_not_followed(tmp_path: Path):
    workspace = Workspace.create(tmp_path / "w")
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim.py"
    victim.write_text("untouched")
    (workspace.files / "program.py").symlink_to(victim)
    (workspace.files / "folder").symlink_to(outside)
    workspace.write({"program.py": "new"})
    assert victim.read_text() == "untouched"
    assert (workspace.files / "program.py").read_text() == "new"
    with pytest.raises(CoderFault, match="leaves the workspace"):
        workspace.write({"folder/victim.py": "new"})


def test_files_that_a_program_left_behind_are_no_part_of_a_draft(tmp_path: Path):
    workspace = Workspace.create(tmp_path)
    (workspace.files / "scratch.bin").write_bytes(b"\0" * 10)
    workspace.write({"program.py": ""})
    sha = workspace.commit("Draft")
    listed = subprocess.run(
        ["git", "--git-dir", workspace.history, "ls-tree", "--name-only", sha],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == ["program.py"]


def test_hooks_and_configuration_of_others_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-commit", "post-commit", "commit-msg"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / ".gitconfig").write_text(f"[core]\nhooksPath = {hooks}\n[commit]\ngpgSign = true\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    workspace = Workspace.create(tmp_path / "w")
    nested = workspace.files / ".git"
    nested.mkdir()
    (nested / "config").write_text(f"[core]\nfsmonitor = touch {tmp_path}/ran\n")
    workspace.write({"program.py": ""})
    workspace.commit("Draft")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "elsewhere").exists()
    assert os.environ["GIT_DIR"] == str(tmp_path / "elsewhere")


def test_fingerprint_depends_on_paths_and_texts_and_not_on_their_order():
    one = content_sha256({"a.py": "1", "b.py": "2"})
    assert one == content_sha256({"b.py": "2", "a.py": "1"})
    assert one != content_sha256({"a.py": "12", "b.py": ""})
    assert one != content_sha256({"a.py": "2", "b.py": "1"})
    with pytest.raises(UsageError):
        content_sha256({})
