import datetime

import numpy as np
import pytest
import torch

from rlhub.utils.children.wire import WireError, decode, encode


def test_plain_values_bytes_and_odd_text_come_back() -> None:
    value = {
        "text": "\ud800 line\nbreak \u2028 \x00 ünï",
        "blob": b"\x00\xff",
        "list": [1, 2.5, None, True],
        "deep": {"a": {"b": []}},
    }
    line = encode(value)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line) == value


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (torch.tensor(3.0), 3.0),
        ((1, 2), [1, 2]),
        (frozenset([7]), [7]),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (np.array([{"a": np.int64(1)}, None], dtype=object), [{"a": 1}, None]),
    ],
)
def test_arrays_and_containers_become_lists(value: object, plain: object) -> None:
    assert decode(encode({"v": value})) == {"v": plain}


def test_what_has_no_json_form_is_an_error() -> None:
    circular: list[object] = []
    circular.append(circular)
    for value in (object(), lambda: 0, circular, {(1, 2): 3}, 10**5000):
        with pytest.raises(WireError):
            encode(value)
    for line in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(WireError):
            decode(line)
