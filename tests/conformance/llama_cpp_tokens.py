"""Tokenizes texts with llama.cpp. Runs in an environment that has the `xllamacpp` package, not in the product's.

Reads JSON from standard input, one `{"model": PATH, "texts": [...]}` a line, and answers each with a line of token IDs.
"""

import http.client
import json
import os
import sys

import xllamacpp


def tokenized(model: str, texts: list[str]) -> list[list[int]]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 64, 1, False
    parameters.port = 0
    server = xllamacpp.Server(parameters)
    host, _, port = server.listening_address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port))
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True})
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        found.append(json.loads(connection.getresponse().read())["tokens"])
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to standard output
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(tokenized(request["model"], request["texts"])), file=answers, flush=True)
    # The server's threads do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
