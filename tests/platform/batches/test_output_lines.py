from __future__ import annotations

import json

from loramux.platform.batches.output_lines import answered


def test_every_line_is_one_line_for_clients_that_split_text() -> None:
    text = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e\r\n\u00c5 \u2027"
    content = answered(1, "bat_1", text, "req_1", 200, {"text": text})
    [line] = content.decode().splitlines()
    found = json.loads(line)
    assert (found["custom_id"], found["response"]["body"]["text"]) == (text, text)
