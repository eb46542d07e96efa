"""The times of lines in stored logs: in front of the text, in ms. The keeper of a sandbox imports this module too."""

MARK = "\x1f"  # between the time of a line and its text
FORMER = ".former"  # after the name of a log: the file with the lines before


def stamp_line(line: str, milliseconds: int) -> str:
    return f"{milliseconds}{MARK}{line}\n"


def split_stamp(line: str) -> tuple[int | None, str]:
    """Returns the time of a line, and its text. The time is None if the line has none."""
    time, mark, text = line.partition(MARK)
    return (int(time), text) if mark and time.isdecimal() else (None, line)
