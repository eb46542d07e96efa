"""Runs a container of an app's pod: `python -m capsule_gateway.pod ROLE`. The cluster starts this.

It starts faster than `capsule`, because it does not import the command line.
"""

from capsule_gateway import add_to_path


def main() -> None:
    """Runs the role that the command line names."""
    add_to_path()
    from workers.kubernetes.roles import main as run

    run()


if __name__ == "__main__":
    main()
