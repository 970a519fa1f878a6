"""The job file's schema: every key with its type, its default, and a one-sentence description.

The models hold the values that the user may write. ``auto`` is a value: it is resolved, with a stated reason, in
`stoker.job.resolve`. The one-sentence ``description`` of a field is shown by ``stoker new`` as its comment
and published in the JSON schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from stoker.job.block import LARGEST, Auto, Block, Fraction, NaturalInt, PositiveInt, Text
from stoker.job.layout import Compress, ContextBy, Offload, Outer, Recompute, ScheduleName, Shard
from stoker.job.targets import TargetBlock
from stoker.job.task_spec import TASKS

SCHEMA_VERSION = 1

TextFormat = Literal[
    "auto",
    "instruction",
    "messages",
    "sharegpt",
    "prompt",
    "question",
    "text",
    "preference",
    "ranked",
    "scored",
    "judged",
]
LogFormat = Literal["criteo", "libsvm", "libffm"]
"""Formats of task ranking that neither a suffix nor a header identifies."""

LONGEST = 1e7  # seconds, a third of a year: timers of the operating system refuse values far beyond


class SpecialTokensBlock(Block):
    """Special tokens by their role; those that the tokenizer lacks are added, with new rows in the model."""

    bos: Text | None = Field(default=None, description="token that begins a text")
    eos: Text | None = Field(default=None, description="token that ends a text and an answer; the same as model.stop")
    pad: Text | None = Field(default=None, description="token that fills short rows up")
    unk: Text | None = Field(default=None, description="token for text that has no other token")
    additional: list[Text] = Field(default_factory=list, description="further special tokens, such as [<|im_start|>]")


class ModelBlock(Block):
    """The model to train, and the sources of its weights and tokenizer."""

    name: str = Field(
        min_length=1,
        description="a hub id (org/name), a folder or a .gguf file, here or at a URL, or a name of the offline "
        "catalogue",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(
        default=None,
        description="another tokenizer: hub id, folder, URL or catalogue name; by default the model's own",
    )
    stop: Text | Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None,
        description="token that ends an answer, or a list of them; by default the tokenizer's end token",
    )
    special_tokens: SpecialTokensBlock | None = Field(
        default=None, description="special tokens by their role, or a list of them; new ones are added"
    )
    quantise: Literal["none", "8bit", "4bit", "int8", "int4"] = Field(
        default="none",
        description="hold the frozen base in 8 or 4 bits (by bitsandbytes), or as int8 or int4 (by torchao); "
        "needs an adapter to train",
    )
    trust_remote_code: bool = Field(default=False, description="run modelling code that comes with the model")
    allow_pickle: bool = Field(default=False, description="load pickled weights (.bin, .pt), which can run code")


class TemplateBlock(Block):
    """A chat template as one text for each role: ``{content}`` is the turn, ``{bos}`` and ``{eos}`` are tokens."""

    user: Text = Field(description='a question: "Q: {content}\\n"')
    assistant: Text = Field(
        default="{content}", description='an answer: "A: {content}"; what comes before {content} asks the model for it'
    )
    stop: Text = Field(default="{eos}", description='what follows each answer, such as "{eos}\\n"')
    system: Text = Field(default="{content}\n\n", description="a system message")
    tool: Text | None = Field(default=None, description="a tool's answer; rows with one are dropped without")
    begin: Text | None = Field(default=None, description="what comes before the first turn, such as {bos}")


class SourceBlock(Block):
    """One source of data."""

    path: str = Field(
        min_length=1,
        description="a file, glob, folder, URL (s3://, https:// ...), hub data set id, or catalogue name; "
        ".jsonl .json .csv .parquet .txt .tar, also .gz .zst",
    )
    format: TextFormat | LogFormat = Field(
        default="auto", description="what the columns mean; found from the first rows unless given"
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="names of your columns, as {instruction: question, output: answer}"
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="share of the samples drawn from this source, relative to the other weights"
    )
    split: str | None = Field(
        default=None, description="split of a hub data set, and/or a slice: train, [:1000], train[10%:]"
    )
    template: str | TemplateBlock = Field(
        default="auto",
        description="template: auto (the tokenizer's), chatml, plain, none (no markup), a .jinja file, or a text for "
        "each role",
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the template, as {enable_thinking: false}"
    )
    train_on: Literal["all", "last", "everything"] = Field(
        default="all",
        description="of a conversation: all assistant turns, the last one, or everything, prompts too",
    )
    special_tokens: Literal["auto", "text", "keep"] = Field(
        default="auto",
        description="what <|im_end|> and the like are inside of a row's content: text, or kept as control tokens; "
        "auto: kept in text and prompt rows",
    )
    too_long: Literal["auto", "cut", "drop", "split"] = Field(
        default="auto", description="what happens to a row longer than seq_len"
    )
    max_dropped: Fraction = Field(
        default=0.1, description="refuse to train when more than this share of the rows is dropped"
    )
    stream: bool | Auto = Field(
        default="auto", description="start training before the source is tokenised whole; auto: above 2 GiB"
    )


class MixBlock(Block):
    """The mixing of several sources."""

    temperature: Annotated[float, Field(ge=0.01)] | None = Field(
        default=None,
        description="sample sources by rows^(1/temperature); 1 is proportional, larger is flatter",
    )


class TuneBlock(Block):
    """The tuning method: which parameters are trained."""

    method: Literal["full", "lora", "qlora", "prefix", "prompt", "p-tuning"] = Field(
        default="full",
        description="full; lora; qlora (lora on a 4-bit base); prefix (keys and values in front, in every layer); "
        "prompt (embeddings in front); p-tuning (the same, made by an encoder)",
    )
    new_rows_first: NaturalInt = Field(
        default=0,
        description="first steps in which only the embeddings of tokens that the model did not have are trained",
    )
    rank: PositiveInt = Field(default=16, description="rank of the LoRA matrices")
    alpha: Annotated[float, Field(gt=0)] | Auto = Field(default="auto", description="LoRA scaling numerator")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="dropout before the LoRA matrices"
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="linear layers that get an adapter, by name or pattern (*.self_attn.*), or all-linear",
    )
    layers: str | Literal["all"] = Field(
        default="all", description="blocks that get an adapter, counted from 0: all, or such as 0-3,20-"
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="layers trained whole beside the adapter, such as lm_head"
    )
    loraplus_ratio: Annotated[float, Field(ge=1.0)] = Field(
        default=1.0, description="how many times as fast the second LoRA matrix learns (LoRA+)"
    )
    rslora: bool = Field(
        default=False, description="scale by alpha/sqrt(rank) instead of alpha/rank (rank-stabilised LoRA)"
    )
    dora: bool = Field(default=False, description="learn magnitude and direction apart (DoRA)")
    tokens: PositiveInt = Field(default=20, description="virtual tokens in front of every sequence")
    text: str | None = Field(
        default=None, description="whose embeddings the virtual tokens of `prompt` begin with; else words drawn by seed"
    )
    projection: bool = Field(default=True, description="make the prefix with a two-layer network, dropped afterwards")
    deep: bool = Field(default=False, description="p-tuning: virtual tokens in every layer, no encoder (P-tuning v2)")
    encoder: Literal["mlp", "lstm"] = Field(default="mlp", description="what makes the virtual tokens of p-tuning")
    width: PositiveInt | Auto = Field(default="auto", description="of the encoder's or the projection's hidden layer")


class TrainBlock(Block):
    """The training settings: batch, optimizer, schedule and precision."""

    lr: Annotated[float, Field(gt=0, lt=10)] | Auto = Field(default="auto", description="peak learning rate")
    batch: PositiveInt | Auto = Field(default="auto", description="sequences per optimizer step, over all processes")
    micro_batch: PositiveInt | Auto = Field(default="auto", description="sequences per forward pass of one process")
    accumulation: PositiveInt | Auto = Field(default="auto", description="forward passes per optimizer step")
    seq_len: Annotated[int, Field(ge=8, le=LARGEST)] | Auto = Field(
        default="auto", description="longest sequence, in tokens"
    )
    pack: bool | Auto = Field(
        default="auto", description="fill sequences to seq_len with several documents, kept apart"
    )
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = Field(
        default="adamw",
        description="adamw; muon (orthogonalised momentum for the matrices of the blocks, adamw for the rest); "
        "adafactor (no per-weight second moment); sgd (with momentum)",
    )
    optimizer_states: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="type of AdamW's moments: bf16 rounds them stochastically, in half of the memory; 8bit takes a "
        "quarter, in blocks of 64",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="AdamW first-moment decay, SGD momentum"
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | Auto = Field(default="auto", description="AdamW second-moment decay")
    eps: Annotated[float, Field(gt=0)] | Auto = Field(default="auto", description="AdamW denominator term")
    schedule: Literal["linear", "cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="learning rate after the warm-up; wsd: stable, then linear decay over the last fifth",
    )
    warmup: NaturalInt | Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.03, description="steps of linear warm-up, or a fraction of all steps"
    )
    min_lr: Fraction = Field(default=0.0, description="where the schedule ends, as a fraction of lr")
    weight_decay: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto", description="decoupled weight decay, on matrices only"
    )
    clip: Annotated[float, Field(ge=0)] = Field(default=1.0, description="largest gradient norm; 0 for none")
    router_aux_loss: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto",
        description="weight of the load-balancing loss of a mixture of experts; auto: the model's own "
        "(router_aux_loss_coef) where its routers are trained",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = Field(
        default="auto", description="arithmetic of the forward pass; fp64: double precision, for verification"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description="matrix products of the blocks in 8 bits, with a scale for each tensor or for each row of it",
    )
    compile: bool | Auto = Field(default="auto", description="torch.compile each block")
    deterministic: bool = Field(
        default=False, description="kernels that give the same bits each time; an operation without one is an error"
    )
    average: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="decay of an exponential moving average of the weights, for --at average"
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events into the run's folder")


class EvaluateBlock(Block):
    """The evaluation: its held-out data and its interval."""

    data: list[SourceBlock] = Field(default_factory=list, description="sources to evaluate on")
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | Auto = Field(
        default="auto", description="share of the training rows held out instead"
    )
    rows: PositiveInt | Literal["auto", "all"] = Field(
        default="auto", description="number of held-out sequences that an evaluation uses, or all"
    )
    every: PositiveInt | Auto = Field(default="auto", description="steps between evaluations")
    samples: NaturalInt = Field(
        default=0, description="answers to held-out prompts written at each evaluation, to be read by people"
    )


class CheckpointBlock(Block):
    """Checkpoints: their interval, and which of them are kept."""

    every: PositiveInt | Auto = Field(default="auto", description="steps between checkpoints")
    keep: PositiveInt = Field(default=2, description="newest checkpoints kept")
    keep_every: PositiveInt | None = Field(
        default=None, description="also keep the checkpoints of steps that this number divides, without limit"
    )
    full_every: PositiveInt = Field(
        default=1,
        description="of embedding tables: every N-th checkpoint has all rows, the others those that have changed",
    )
    best: bool = Field(default=True, description="also keep the checkpoint with the lowest held-out loss")
    to: str | None = Field(
        default=None, description="another folder or a URL for the checkpoints; by default inside the run's folder"
    )
    background: bool = Field(
        default=True, description="written while training goes on, which waits for a copy in host memory only"
    )
    memory: NaturalInt | Auto = Field(
        default="auto",
        description="steps between copies in host memory, from which training goes on when a process dies; 0 for none",
    )


class NodesBlock(Block):
    """The number of nodes that train; each runs a supervisor, `stoker node`."""

    min: PositiveInt = Field(
        description="with fewer none trains; more than half of max, or a cut network may split the run in two"
    )
    max: PositiveInt = Field(description="more wait as spares")


class FaultsBlock(Block):
    """The handling of faults: restarts, lost devices, hangs and invalid numbers."""

    restarts: NaturalInt = Field(default=3, description="times that the processes are started again before giving up")
    back_off: Annotated[float, Field(ge=0, le=LONGEST)] = Field(
        default=1.0, description="seconds before the first restart; twice as long before each further one"
    )
    lost: Literal["replace", "shrink"] = Field(
        default="replace",
        description="when a device stays away: wait for a replacement, or go on with fewer data-parallel processes",
    )
    hang: Annotated[float, Field(gt=0, le=LONGEST)] | Auto = Field(
        default="auto", description="seconds without a sign of life after which a process counts as hung"
    )
    nodes: NodesBlock | None = Field(
        default=None, description="fewest and most nodes of `stoker node`; by default all of them, and none fewer"
    )
    slow: Annotated[float, Field(gt=1)] = Field(
        default=1.5, description="times the median of all processes' own time from which one is reported as slow"
    )
    check: bool = Field(default=True, description="test every device before training and after a fault")
    not_finite: Literal["stop", "skip", "roll-back"] = Field(
        default="stop",
        description="when the loss or the gradient is not finite: stop; leave the step out; or go back to a checkpoint "
        "and skip the samples",
    )
    spike: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="robust z-score of the loss from which training goes back likewise; 0 for never"
    )
    window: Annotated[int, Field(ge=8, le=LARGEST)] = Field(
        default=64, description="steps that a loss is compared with"
    )
    deadline: Annotated[float, Field(gt=0, le=LONGEST)] = Field(
        default=60.0, description="seconds within which a run saves and ends after SIGTERM"
    )
    requeue: Annotated[int, Field(ge=0, lt=256)] | None = Field(
        default=None, description="exit code then, on which the scheduler starts the job again; by default 128 + signal"
    )


class SyncBlock(Block):
    """Islands: groups of processes that train by themselves between two synchronisations (local SGD, DiLoCo)."""

    every: PositiveInt = Field(default=1, description="steps between two synchronisations; 1: there are no islands")
    outer: Outer = Field(
        default="nesterov",
        description="what the islands' changes since the last one become: their average, or a step of SGD with "
        "Nesterov momentum along it",
    )
    outer_lr: Annotated[float, Field(gt=0)] = Field(default=0.7, description="learning rate of outer: nesterov")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="momentum of outer: nesterov")
    islands: PositiveInt | Auto = Field(
        default="auto",
        description="number of islands; auto: one a node, and on one node one for each copy of the model",
    )


class ParallelBlock(Block):
    """The parallel layout: processes = data x tensor x pipeline x context."""

    data: PositiveInt | Auto = Field(
        default="auto", description="processes that take different samples; only they multiply the batch"
    )
    shard: Shard = Field(
        default="none",
        description="what the data-parallel processes share instead of all holding it: zero1 optimizer states, "
        "zero2 gradients too, zero3 weights too",
    )
    shard_size: PositiveInt | Auto = Field(
        default="auto",
        description="processes that one copy is spread over; fewer than data: the copies are replicas (hybrid)",
    )
    tensor: PositiveInt = Field(default=1, description="processes that each matrix is split over")
    sequence: bool | Auto = Field(
        default="auto", description="split activations outside of the matrices too, along the sequence"
    )
    pipeline: PositiveInt = Field(default=1, description="processes that the blocks are split over, as stages")
    schedule: ScheduleName | Auto = Field(
        default="auto",
        description="order of the pipeline's micro-batches; interleaved, zero-bubble and zbv hold two stages a process",
    )
    stages: Annotated[list[PositiveInt], Field(min_length=1)] | Auto = Field(
        default="auto", description="blocks of each pipeline stage, first to last; auto spreads them evenly"
    )
    context: PositiveInt = Field(default=1, description="processes that each row of tokens is split over")
    context_by: ContextBy | Auto = Field(
        default="auto", description="how attention sees the whole row: gather keys and values, or ulysses (by heads)"
    )
    expert: PositiveInt | Auto = Field(
        default="auto", description="processes that the experts of a mixture are spread over; so far as tensor says"
    )
    recompute: Recompute = Field(
        default="none",
        description="computed again in the backward pass instead of kept; full: all of a block but its input; "
        "selective: what is cheap to compute and large to keep",
    )
    offload: Offload = Field(
        default="none",
        description="kept in the host's memory: optimizer states, or params (weights and gradients too, with zero3)",
    )
    compile: bool | Auto = Field(default="auto", description="torch.compile each block, as train.compile")
    compress: Compress = Field(
        default="none",
        description="how gradients are sent between copies: as they are, rounded to bf16, or as products of two "
        "narrow matrices (powersgd), whose error is added to the next step's",
    )
    compress_rank: PositiveInt = Field(default=4, description="width of the matrices of compress: powersgd")
    sync: SyncBlock = Field(
        default_factory=SyncBlock, description="gradients summed less often, for slow links between nodes"
    )
    devices: Annotated[list[NaturalInt], Field(min_length=1)] | Auto = Field(
        default="auto", description="numbers of the devices that are used, one for each process: [0, 2]"
    )


class ExportSyncBlock(Block):
    """A store of tables that follows a run of task ranking while it trains."""

    to: Text = Field(description="lmdb://PATH or redis://HOST:PORT/DB; changed rows and the tower are sent there")
    every_seconds: Annotated[float, Field(gt=0, le=LONGEST)] | None = Field(
        default=None, description="how old a change may be before it is sent; or give every_steps"
    )
    every_steps: PositiveInt | None = Field(default=None, description="steps between two updates of the store")


class ExportBlock(Block):
    """Exports during training."""

    sync: ExportSyncBlock | None = Field(
        default=None, description="a store of tables that follows the run; for task ranking"
    )


class Job(Block):
    """A training job: parameters of Stoker's fixed code, and the dataset they are applied to."""

    version: Literal[1] = Field(default=1, description="version of this file's schema")
    task: str = Field(description="what is learnt")
    model: ModelBlock | None = Field(default=None, description="the model")
    data: list[SourceBlock] = Field(default_factory=list, description="the training data, one or several sources")
    mix: MixBlock = Field(default_factory=MixBlock, description="how several sources are mixed")
    tune: TuneBlock = Field(default_factory=TuneBlock, description="which parameters are trained")
    steps: PositiveInt | None = Field(default=None, description="optimizer steps; or give epochs")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="passes over the data; or give steps"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="seed of the order, the initial weights and dropout"
    )
    output: str | None = Field(default=None, description="the run's folder; by default runs/<name of the job file>")
    train: TrainBlock = Field(default_factory=TrainBlock, description="how the parameters are trained")
    evaluate: EvaluateBlock = Field(default_factory=EvaluateBlock, description="held-out evaluation")
    checkpoint: CheckpointBlock = Field(default_factory=CheckpointBlock, description="saved states")
    faults: FaultsBlock = Field(default_factory=FaultsBlock, description="what follows when something breaks")
    parallel: ParallelBlock = Field(
        default_factory=ParallelBlock, description="how the work is spread; or auto: as the planner chooses"
    )
    export: ExportBlock = Field(default_factory=ExportBlock, description="what leaves the run while it trains")
    target: Text | TargetBlock = Field(
        default="local",
        description="where `stoker submit` starts it: a block ssh, slurm, ray or kubernetes, a file with one, or a "
        "name of targets.yaml",
    )


if not TYPE_CHECKING:  # depends on the tasks' names, and on the blocks that tasks add
    Job = create_model(
        "Job",
        __base__=Job,
        __module__=__name__,
        __doc__=Job.__doc__,
        task=(Literal[tuple(TASKS)], Job.model_fields["task"]),
        **{
            name: (task.block | None, Field(default=None, description=f"the block of task: {name}"))
            for name, task in TASKS.items()
            if task.block
        },
    )
