"""libyaml's loader and PyYAML's own read the same config, and complain alike."""

from __future__ import annotations

from unittest import mock

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from iop.config import raw
from iop.config.raw import parse_yaml

pytestmark = pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML was built without libyaml")

PIECES = [
    *(
        "a",
        "b: ",
        "c:",
        "- ",
        "- x\n",
        "\n",
        "  ",
        "    ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        ": ",
        "'",
        '"',
        "#",
        " # z",
    ),
    *(
        "null",
        "~",
        "|",
        ">-",
        "\n\n",
        "&n ",
        "*n",
        "!t ",
        "<<: ",
        "? ",
        "%Y",
        "---\n",
        "...",
        "\t",
        "é",
        "\\n",
        "1:30",
    ),
    *("\x00", "\ud800", "\u2028", "\ufeff", "\r\n", "k: v\n", "k: {x: 1, y: [2, 3]}\n", "nodes:\n- id: n1\n"),
]

TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@given(TEXTS)
@example("a: 1\na: 2\n")
@example("a: [1, 2\nb: 3\n")
@example("a: 'b\n")
@example("- a\n")
@example("a: &x {b: *x}\n")
@example("? [a]\n: b\n")
@example("")
@example("a\t")
@example("? ")
@example("|#")
def test_both_loaders_give_the_same_tree_and_the_same_problems(text: str) -> None:
    fast = parse_yaml(text, where="edge.yaml")
    with mock.patch.object(raw, "_FAST_LOADER", None):
        own = parse_yaml(text, where="edge.yaml")
    assert fast == own


def test_a_file_of_many_nodes_is_read_by_libyaml() -> None:
    text = "nodes:\n" + "- {id: n, token: 'file:t'}\n" * 20
    with mock.patch.object(yaml, "SafeLoader", None):
        tree, problems = parse_yaml(text, where="edge.yaml")
    assert not problems
    nodes = tree.entries["nodes"]
    assert isinstance(nodes, raw.RawList)
    assert nodes.items[19].origin.where == "edge.yaml:21"
