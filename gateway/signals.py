"""What the processes of the service do at signals that most programs do not handle."""

import signal


def stop_at_hangup() -> None:
    """Lets SIGHUP stop this process as SIGTERM does. A closed terminal, logrotate and `systemctl reload` send it.

    It stays ignored in a process that nohup started. A forked child keeps this; any other calls it again.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
