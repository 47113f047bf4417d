from __future__ import annotations

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}
            {{- message.content if message.content is string }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
                {%- set arguments = call.function.arguments %}
                {{- arguments if arguments is string else arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type != 'text' %}{%- continue %}{%- endif %}
                {{- part.text }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""Tools, thinking and tool results, with the markers of ChatML."""

HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|header|>system

{{ date_string or 'no date' }}
{{ system }}
{%- if tools is not none %}

{% for tool in tools %}
{{ tool.function | tojson(indent=4, sort_keys=true) }}
{% endfor %}
{%- endif %}
<|eot|>
{%- for message in messages %}
<|header|>{{ message['role'] }}

    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- for name, value in message.tool_calls[0].function.arguments.items() %}
{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
    {%- else %}
{{ message['content'] | trim }}
    {%- endif %}
<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}
<|header|>assistant

{% endif -%}
"""
"""Every kind of whitespace control, stripped messages, one call per turn, and `tojson` with arguments."""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS}

PARTS = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
    {%- endfor %}
    {{- '</>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}
"""
"""Reads only lists of parts. Strings appear as nothing, without an error."""

FIRST_PART = "{% for message in messages %}<{{ message.role }}>{{ message['content'][0]['text'] }}</>{% endfor %}"
"""Reads only the first part of a list."""

EITHER = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for part in message.content %}{{- '[' + part.text + ']' }}{%- endfor %}
    {%- endif %}
    {{- '</>' }}
{%- endfor %}
"""
"""Reads strings and lists of parts, and shows them differently."""

BY_ROLE = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.role == 'user' %}
        {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text }}{%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '</>' }}
{%- endfor %}
"""
"""Reads lists of the user and strings of all others. Lists of others would be printed as they are."""
