"""The options of `loramux bench`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

LOAD, SIZE, FIGURES = "When requests are sent", "What requests are", "What is reported"

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model to request. Repeat it for several, the most frequent first."),
]
Endpoint = Annotated[Literal["completions", "chat"], typer.Option(help="The endpoint to measure.")]
NumRequests = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, help="Number of requests (default: 100, or all of a file).", rich_help_panel=LOAD
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=1e-6,
        max=1e6,
        help="Requests per second, at random times. Without it, requests are sent as soon as --concurrency allows.",
        rich_help_panel=LOAD,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=1e-3,
        max=math.inf,
        help="Shape of the gaps between requests: 1 is a Poisson process, less is more bursty, inf is even.",
        rich_help_panel=LOAD,
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, max=60_000, help="Largest number of open requests.", rich_help_panel=LOAD)
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl", help="Lines with timestamp (in ms), input_length and output_length.", rich_help_panel=LOAD
    ),
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Lines with prompt or messages, and max_tokens or output_tokens.",
        rich_help_panel=SIZE,
    ),
]
PromptTokens = Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Tokens of a prompt.", rich_help_panel=SIZE)]
AnswerTokens = Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Tokens of an answer.", rich_help_panel=SIZE)]
TokenIds = Annotated[
    str | None,
    typer.Option(
        metavar="LOW-HIGH",
        help="Send prompts of random token ids from this range, which have exactly the wanted "
        "length, instead of random words.",
        rich_help_panel=SIZE,
    ),
]
Zipf = Annotated[
    float, typer.Option(min=0, max=10, help="Exponent of the models' popularity: 0 is uniform.", rich_help_panel=SIZE)
]
IgnoreEos = Annotated[
    bool, typer.Option(help="Ask for answers of the full length, with vLLM's field ignore_eos.", rich_help_panel=SIZE)
]
ExtraBody = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="An object whose fields are added to each request.", rich_help_panel=SIZE),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.", rich_help_panel=SIZE)]
Timeout = Annotated[float, typer.Option(min=0.1, max=86_400, help="Longest time of a request, in seconds.")]
Objectives = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ttft:MS tpot:MS",
        help="Objectives in milliseconds: ttft, tpot, e2el. Goodput is the rate of requests that meet them all.",
        rich_help_panel=FIGURES,
    ),
]
OutFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json", help="Write the result in the format of 'vllm bench serve'.", rich_help_panel=FIGURES
    ),
]
PlotFile = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the times.", rich_help_panel=FIGURES)]
Compared = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json",
        help="Send nothing. Compare two results of 'loramux bench' or 'vllm bench serve'.",
        rich_help_panel=FIGURES,
    ),
]
