"""The specification of a command, as JSON from the worker to the keeper.

A TypedDict, not a struct of msgspec: each awake app has a keeper of its own, and its memory counts.
"""

from typing import TypedDict


class Limits(TypedDict):
    """`SandboxLimits` of the worker, which says what they mean."""

    memory: int  # 0: no limit, in a pod that has its own
    disk: int
    inodes: int
    free: int
    processes: int
    files: int
    cpus: float
    seconds: float
    grace: float
    nice: int


class Spec(TypedDict):
    trusted: bool  # the command runs without a sandbox
    bwrap: str  # path of bubblewrap
    command: list[str]
    environment: dict[str, str]
    folder: str  # the working folder, as the command sees it
    limits: Limits
    read: list[str]  # paths that the command can read
    write: list[str]  # folders that it can write to
    places: dict[str, str]  # path of the machine → where the command sees it, if that is elsewhere
    tools: list[str]  # folders of tools of the machine
    connect: list[int]  # TCP ports of public addresses
    hosts: list[str]  # addresses that may be reached although they are not public
    endpoints: list[tuple[str, int]]  # hosts that may be reached at one port each
    uid: int | None  # user of the command
    parent: int  # process id of the worker
    cgroups: list[str]  # folders below which the command's control groups are made; empty: without any
    filter: str  # of system calls, in hexadecimal digits
    report: int | None  # descriptor to which the keeper writes how the command ended; None: the keeper ends like it
    secrets: dict[str, str]  # variables whose values the output must not show
    inherited: list[int]  # descriptors that the keeper holds open
    # The rest is of a command that outlives the worker. For another one it is empty, 0 or None.
    link: str  # its removal ends the command
    socket: str  # connections to it reach the port
    listener: int | None  # descriptor of that socket, if it exists already
    control: str  # socket at which the worker asks whether the command is idle
    port: int
    output: str
    data: str  # folder of the app's data
