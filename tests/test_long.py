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
