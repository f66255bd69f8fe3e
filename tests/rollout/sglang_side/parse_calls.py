"""Parse texts with SGLang's parsers, in SGLang's environment. Reads and writes JSON."""

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

request = json.load(sys.stdin)
tools = [Tool(**tool) for tool in request["tools"]]
results = []
for parser, text in request["texts"]:
    _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    results.append([[call.name, json.loads(call.parameters)] for call in calls])
print("\n" + json.dumps(results))
