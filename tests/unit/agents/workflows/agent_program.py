"""An agent that is a program of its own: the row on its standard input, its reward in its last line."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

if __name__ == "__main__":
    row = json.load(sys.stdin)
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": [{"role": "user", "content": row["question"]}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))
    sys.stdout.write(f"thinking {sys.argv[1:]}\n{len(answer['choices'][0]['message']['content'])}\n")
