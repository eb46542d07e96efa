"""Repositories of git on this machine, from which builds clone."""

import hashlib
import os
import subprocess
from pathlib import Path

AUTHOR = {f"GIT_{role}_{name}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for name in ("NAME", "EMAIL")}


class Repository:
    def __init__(self, folder: Path, branch: str = "main") -> None:
        self.folder, self.url = folder, f"file://{folder}"
        folder.mkdir()
        self.git("init", "--quiet", f"--initial-branch={branch}")

    def git(self, *arguments: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            **AUTHOR,
        }
        command = ["git", "-C", str(self.folder), "-c", "protocol.file.allow=always", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", name)
        return self.git("rev-parse", "HEAD")

    def commit_lfs(self, name: str, content: str) -> None:
        """Commits the pointer of a file, and stores the content where Git LFS does."""
        digest = hashlib.sha256(content.encode()).hexdigest()
        folder = self.folder / ".git" / "lfs" / "objects" / digest[:2] / digest[2:4]
        folder.mkdir(parents=True)
        (folder / digest).write_text(content)
        self.commit(name, f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n")
