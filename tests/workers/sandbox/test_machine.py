import os
import subprocess
import sys

import pytest

from tests.support.user_namespace import FAULT, enter_user_namespace
from workers.sandbox.sandbox import BUILD_USERS

REPORT = f"""
from workers.sandbox.machine import *
users = range({BUILD_USERS.start}, {BUILD_USERS.stop})
try:
    check_own_user(users)
except Unsafe as error:
    print(error)
else:
    print("changes users" if can_change_users(users) else "runs them as itself")
print(find_namespace_remedy())
"""
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root has these powers")


def report(*before: str) -> list[str]:
    done = subprocess.run([*before, sys.executable, "-c", REPORT], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@needs_root
def test_root_of_the_machine_changes_users() -> None:
    done = f"{REPORT}\nprint(can_change_users(users))"
    assert subprocess.check_output([sys.executable, "-c", done], text=True).splitlines()[-1] == "True"


def test_a_container_without_the_users_names_the_map_that_lacks_them() -> None:
    first = report(*enter_user_namespace())[0]
    assert first == (": ".join(FAULT) if ROOT else "runs them as itself")


def test_the_setting_that_refuses_namespaces_is_named() -> None:
    assert report(*enter_user_namespace())[-1] == "sudo sysctl -w user.max_user_namespaces=15000"


@needs_root
def test_root_without_capabilities_runs_nothing() -> None:
    """Otherwise it would run the code as root."""
    first = report("setpriv", "--bounding-set=-all", "--inh-caps=-all")[0]
    assert first == "builds would run as root: run the worker as an ordinary user"


@needs_root
def test_some_capabilities_are_refused() -> None:
    first = report("setpriv", "--bounding-set=-setuid,-sys_ptrace")[0]
    assert first.startswith("the worker has some of root's capabilities: give it CHOWN, KILL")
