"""The CPUs of processes on machines of several kinds, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.utils.children.launch import Launch, Topology, cpus_of_processes, read_topology


def write_machine(root: Path, siblings: list[str], nodes: list[str]) -> None:
    """siblings: for each CPU the list of those of its core.  nodes: the CPUs of each memory node."""
    for cpu, text in enumerate(siblings):
        folder = root / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for number, text in enumerate(nodes):
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(text + "\n")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Topology:
    """Two nodes of two cores with two threads each."""
    write_machine(tmp_path, [f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)], ["0-1,4-5", "2-3,6-7"])
    return read_topology(tmp_path, allowed=range(8))


def test_a_machine_is_read(two_sockets: Topology) -> None:
    assert two_sockets.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert two_sockets.nodes == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(
    ("kind", "num_processes", "expected"),
    [
        ("none", 2, [(), ()]),
        ("cores", 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("cores", 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("cores", 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("cores", 6, [(0, 4), (1, 5), (2, 6), (3, 7), (0, 4), (1, 5)]),
        ("numa", 3, [(0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7)]),
    ],
)
def test_processes_share_cores_and_nodes(two_sockets: Topology, kind: str, num_processes: int, expected: list[object]) -> None:
    assert cpus_of_processes(kind, num_processes, two_sockets) == expected  # type: ignore[arg-type]


def test_cpus_that_may_not_be_used_are_left_out(tmp_path: Path) -> None:
    write_machine(tmp_path, ["0", "1", "2", "3"], ["0-1", "2-3"])
    few = read_topology(tmp_path, allowed=[1, 2])
    assert few.cores == ((1,), (2,)) and few.nodes == ((1,), (2,))
    one_node = read_topology(tmp_path, allowed=[3])
    assert one_node.nodes == ((3,),)


def test_a_machine_without_these_files_has_one_node_of_single_cores(tmp_path: Path) -> None:
    assert read_topology(tmp_path, allowed=[0, 1]) == Topology(cores=((0,), (1,)), nodes=((0, 1),))
    assert read_topology().nodes


def test_another_python_is_not_led_to_our_packages() -> None:
    variables = {"PYTHONPATH": "/a", "PYTHONHOME": "/b", "HOME": "/c"}
    assert Launch(python="/other/python", variables={"MUJOCO_GL": "egl"}).environment(variables) == {
        "HOME": "/c",
        "MUJOCO_GL": "egl",
    }
    assert Launch().environment(variables) == variables
