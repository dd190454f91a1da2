"""One place of each kind of reason, and few of them."""

from bertsmith.data.checkup.reasons import Reasons


def told(*faults: str) -> str:
    reasons = Reasons()
    for line, fault in enumerate(faults, start=1):
        reasons.add(f"f:{line}", fault)
    (finding,) = reasons.unreadable_rows("rows cannot be read", total=9, advice="Correct them.")
    assert finding.count == len(faults)
    return finding.what


def test_one_kind_is_shown_by_its_first_and_several_by_a_place_each() -> None:
    first, other = "the span 0 to 4 lies outside", "a span of 'A' and one of 'B' overlap at 3"
    assert told(first, "the span 2 to 9 lies outside") == (
        "rows cannot be read (the first: the span 0 to 4 lies outside)"
    )
    assert told(first, first, other, "a span of 'C' and one of 'D' overlap at 7") == (
        f"rows cannot be read ({first}, f:1; {other}, f:3)"
    )
    assert told("a", "b", "c", "d", "e") == (
        "rows cannot be read (a, f:1; b, f:2; c, f:3; and others)"
    )


def test_bytes_that_are_told_already_are_no_finding() -> None:
    reasons = Reasons()
    for number in (3, 70):
        reasons.add("f:1", f"byte {number} of the file is not UTF-8; save the file as UTF-8")
    assert reasons.unreadable_rows("rows cannot be read", total=9, advice="") == []
    reasons.add("f:9", "3 fields where the header has 2")
    (finding,) = reasons.unreadable_rows("rows cannot be read", total=9, advice="")
    assert finding.count == 3
