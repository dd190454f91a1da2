"""Values as cells of a CSV file that people open in spreadsheet programs."""

import json
import re

FORMULA = re.compile(r"[=+\-@\t\r]")
"""How a cell begins that spreadsheet programs run (OWASP, CSV injection)."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_cell(value: object, *, escape_formulas: bool) -> str:
    """A value as CSV text; what is no text or number is JSON.

    Args:
        value: What to write.
        escape_formulas: Whether text that begins like a formula gets an apostrophe before it.
            Numbers stay as they are.
    """
    text = _plain(value)
    if escape_formulas and FORMULA.match(text) and not NUMBER.fullmatch(text):
        return "'" + text
    return text


def _plain(value: object) -> str:
    match value:
        case str():
            return value
        case None:
            return ""
        case bool() | list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
        case _:
            return str(value)
