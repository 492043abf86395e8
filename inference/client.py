"""Asks a server for an answer with learned exits and a contract.

python inference/client.py "Compute 3 + 4."

The unmodified OpenAI client (`pip install openai`); the server's key stands in VLLM_API_KEY. docs/deploy.md lists the
keys that a request may send.
"""

import json
import os
import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=os.environ.get("VLLM_API_KEY", "none"))
reply = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": " ".join(sys.argv[1:]) or "Compute 62 + 35 - 18 + 4."}],
    temperature=0.0,
    max_completion_tokens=512,
    extra_body={
        "vllm_xargs": {"ace_enabled": True, "ace_contract": json.dumps({"kind": "json", "schema": {"type": "object"}})},
        "skip_special_tokens": False,  # show think markers that are special tokens
    },
)
audit = reply.kv_transfer_params["ace_learn"]
print(reply.choices[0].message.content)
print(f"answer {audit['answer']}: thinking ended by {audit['reason']} after {audit['tokens_thought']} tokens")
