from __future__ import annotations

import shutil
from pathlib import Path

from tests.demo_base import DEMO_BASE

TEMPLATE = """\
{%- if tools %}<|system|>Tools:{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}
Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def make_tool_base(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        shutil.copy(DEMO_BASE / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
