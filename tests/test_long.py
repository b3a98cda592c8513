"""The page of the long tier: a run of a part leaves the other rows."""

import xml.etree.ElementTree as ElementTree

from tests import long


def test_rows_survive_being_written_and_read():
    case = ElementTree.fromstring(
        '<testcase classname="tests.agents.test_x" name="test_y[a|b]" time="3.4"><properties>'
        '<property name="returns" value="1 | 2"/></properties></testcase>'
    )
    one = long.row(case)
    assert one["test"] == "agents.test_x.test_y[a|b]"
    assert (one["outcome"], one["seconds"], one["measured"]) == ("passed", "3", "returns: 1 | 2")
    missing = ElementTree.fromstring(
        '<testcase classname="tests.envs.test_z" name="test_w" time="0">'
        '<skipped message="needs envpool"/></testcase>'
    )
    other = long.row(missing)
    assert (other["outcome"], other["measured"]) == ("skipped", "needs envpool")
    rows = {r["test"]: r for r in (one, other)}
    assert long.read(long.page(rows)) == rows
    assert "1 passed, 1 skipped" in long.page(rows)


def test_cases_that_differ_by_a_seed_are_one_row():
    def case(name, outcome="passed"):
        return {"test": name, "outcome": outcome, "date": "d", "seconds": "2", "measured": ""}

    rows = [case("a[100]"), case("a[101]"), case("b[10]"), case("a[102]", "failure")]
    first, second, third = long.folded(rows)
    assert (first["test"], first["seconds"], first["measured"]) == ("a", "4", "2 cases")
    assert (second["test"], third["test"], third["outcome"]) == ("b[10]", "a[102]", "failure")
