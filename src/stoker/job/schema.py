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
    pad: Text | None = Field(default=None, description="token that pads short rows")
    unk: Text | None = Field(default=None, description="token for unknown text")
    additional: list[Text] = Field(
        default_factory=list, description="additional special tokens, such as [<|im_start|>]"
    )


class ModelBlock(Block):
    """The model to train, and the sources of its weights and tokenizer."""

    name: str = Field(
        min_length=1,
        description="hub id (org/name), folder or .gguf file, local or at a URL, or a name from the offline catalogue",
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
        default=None, description="special tokens by role, or a list of additional ones; new tokens are added"
    )
    quantise: Literal["none", "8bit", "4bit", "int8", "int4"] = Field(
        default="none",
        description="quantise the frozen base to 8 or 4 bits (bitsandbytes), or to int8 or int4 (torchao); training "
        "needs an adapter",
    )
    trust_remote_code: bool = Field(default=False, description="run modelling code that comes with the model")
    allow_pickle: bool = Field(default=False, description="load pickled weights (.bin, .pt), which can run code")


class TemplateBlock(Block):
    """A chat template as one text for each role: ``{content}`` is the turn, ``{bos}`` and ``{eos}`` are tokens."""

    user: Text = Field(description='user turn, such as "Q: {content}\\n"')
    assistant: Text = Field(
        default="{content}",
        description='assistant turn, such as "A: {content}"; the text before {content} is the generation prompt',
    )
    stop: Text = Field(default="{eos}", description='text after each answer, such as "{eos}\\n"')
    system: Text = Field(default="{content}\n\n", description="system message")
    tool: Text | None = Field(
        default=None, description="tool result; without this template, rows with tool results are dropped"
    )
    begin: Text | None = Field(default=None, description="text before the first turn, such as {bos}")


class SourceBlock(Block):
    """One source of data."""

    path: str = Field(
        min_length=1,
        description="a file, glob, folder, URL (s3://, https:// ...), hub data set id, or catalogue name; "
        ".jsonl .json .csv .parquet .txt .tar, also .gz .zst",
    )
    format: TextFormat | LogFormat = Field(
        default="auto",
        description="row format, which gives the columns their meaning; by default detected from the first rows",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="your column for each column of the format, such as {instruction: question, output: answer}",
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
        default_factory=dict, description="variables of the template, such as {enable_thinking: false}"
    )
    train_on: Literal["all", "last", "everything"] = Field(
        default="all",
        description="trained turns of a conversation: all assistant turns, the last one, or everything with prompts",
    )
    special_tokens: Literal["auto", "text", "keep"] = Field(
        default="auto",
        description="special tokens such as <|im_end|> inside a row's content: read as text, or kept as control "
        "tokens; auto: kept in text and prompt rows",
    )
    too_long: Literal["auto", "cut", "drop", "split"] = Field(
        default="auto", description="handling of rows longer than seq_len"
    )
    max_dropped: Fraction = Field(
        default=0.1, description="refuse to train when more than this share of the rows is dropped"
    )
    stream: bool | Auto = Field(
        default="auto", description="start training before the whole source is tokenised; auto: for sources above 2 GiB"
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
        description="full; lora; qlora (lora on a 4-bit base); prefix (trained keys and values before those of every "
        "layer); prompt (trained embeddings before the input); p-tuning (the same, computed by an "
        "encoder)",
    )
    new_rows_first: NaturalInt = Field(
        default=0,
        description="number of first steps that train only the embeddings of newly added tokens",
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
        default="all", description="blocks that get an adapter, counted from 0: all, or ranges such as 0-3,20-"
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="layers trained in full beside the adapter, such as lm_head"
    )
    loraplus_ratio: Annotated[float, Field(ge=1.0)] = Field(
        default=1.0, description="ratio of the second LoRA matrix's learning rate to the first's (LoRA+)"
    )
    rslora: bool = Field(
        default=False, description="scale by alpha/sqrt(rank) instead of alpha/rank (rank-stabilised LoRA)"
    )
    dora: bool = Field(default=False, description="train magnitude and direction separately (DoRA)")
    tokens: PositiveInt = Field(default=20, description="number of virtual tokens before every sequence")
    text: str | None = Field(
        default=None,
        description="text whose embeddings initialise the virtual tokens of `prompt`; by default random words, drawn "
        "by seed",
    )
    projection: bool = Field(
        default=True, description="compute the prefix with a two-layer network, which is dropped after training"
    )
    deep: bool = Field(default=False, description="p-tuning: virtual tokens in every layer, no encoder (P-tuning v2)")
    encoder: Literal["mlp", "lstm"] = Field(
        default="mlp", description="network that computes the virtual tokens of p-tuning"
    )
    width: PositiveInt | Auto = Field(
        default="auto", description="width of the hidden layer of the encoder or the projection"
    )


class TrainBlock(Block):
    """The training settings: batch, optimizer, schedule and precision."""

    lr: Annotated[float, Field(gt=0, lt=10)] | Auto = Field(default="auto", description="peak learning rate")
    batch: PositiveInt | Auto = Field(default="auto", description="sequences per optimizer step, over all processes")
    micro_batch: PositiveInt | Auto = Field(default="auto", description="sequences per forward pass of one process")
    accumulation: PositiveInt | Auto = Field(default="auto", description="forward passes per optimizer step")
    seq_len: Annotated[int, Field(ge=8, le=LARGEST)] | Auto = Field(
        default="auto", description="maximum sequence length in tokens"
    )
    pack: bool | Auto = Field(
        default="auto",
        description="pack several documents into one sequence of up to seq_len tokens, kept separate in attention",
    )
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = Field(
        default="adamw",
        description="adamw; muon (orthogonalised momentum for the matrices of the blocks, adamw for the rest); "
        "adafactor (no per-weight second moment); sgd (with momentum)",
    )
    optimizer_states: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="data type of AdamW's moments: bf16 needs half of the memory, with stochastic rounding; 8bit a "
        "quarter, in blocks of 64",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="AdamW first-moment decay, SGD momentum"
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | Auto = Field(default="auto", description="AdamW second-moment decay")
    eps: Annotated[float, Field(gt=0)] | Auto = Field(default="auto", description="AdamW denominator term")
    schedule: Literal["linear", "cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="learning rate schedule after the warm-up; wsd: stable, then linear decay over the last fifth",
    )
    warmup: NaturalInt | Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.03, description="steps of linear warm-up, or a fraction of all steps"
    )
    min_lr: Fraction = Field(default=0.0, description="final learning rate of the schedule, as a fraction of lr")
    weight_decay: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto", description="decoupled weight decay, on matrices only"
    )
    clip: Annotated[float, Field(ge=0)] = Field(default=1.0, description="maximum gradient norm; 0 disables clipping")
    router_aux_loss: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto",
        description="weight of the load-balancing loss of a mixture of experts; auto: the model's own "
        "(router_aux_loss_coef) where its routers are trained",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = Field(
        default="auto", description="precision of the forward pass; fp64: double precision, for verification"
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description="compute the matrix products of the blocks in 8 bits, with a scale per tensor or per row",
    )
    compile: bool | Auto = Field(default="auto", description="torch.compile each block")
    deterministic: bool = Field(
        default=False, description="use deterministic kernels; an operation without one is an error"
    )
    average: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="decay of an exponential moving average of the weights, for --at average"
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard events into the run's folder")


class EvaluateBlock(Block):
    """The evaluation: its held-out data and its interval."""

    data: list[SourceBlock] = Field(default_factory=list, description="sources to evaluate on")
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | Auto = Field(
        default="auto", description="fraction of the training rows to hold out if evaluate.data is not given"
    )
    rows: PositiveInt | Literal["auto", "all"] = Field(
        default="auto", description="number of held-out sequences that an evaluation uses, or all"
    )
    every: PositiveInt | Auto = Field(default="auto", description="steps between evaluations")
    samples: NaturalInt = Field(
        default=0,
        description="number of answers to held-out prompts that each evaluation generates and logs, for people to read",
    )


class CheckpointBlock(Block):
    """Checkpoints: their interval, and which of them are kept."""

    every: PositiveInt | Auto = Field(default="auto", description="steps between checkpoints")
    keep: PositiveInt = Field(default=2, description="number of newest checkpoints to keep")
    keep_every: PositiveInt | None = Field(
        default=None, description="also keep every checkpoint whose step is a multiple of this number, without limit"
    )
    full_every: PositiveInt = Field(
        default=1,
        description="for embedding tables: every N-th checkpoint stores all rows, the others only changed rows",
    )
    best: bool = Field(default=True, description="also keep the checkpoint with the lowest held-out loss")
    to: str | None = Field(
        default=None, description="another folder or a URL for the checkpoints; by default inside the run's folder"
    )
    background: bool = Field(
        default=True, description="write checkpoints in the background; training waits only for the copy to host memory"
    )
    memory: NaturalInt | Auto = Field(
        default="auto",
        description="steps between copies of the state in host memory, for recovery after a process dies; 0: none",
    )


class NodesBlock(Block):
    """The number of nodes that train; each runs a supervisor, `stoker node`."""

    min: PositiveInt = Field(
        description="minimum number of nodes; more than half of max, or a network partition can split the run in two"
    )
    max: PositiveInt = Field(description="maximum number of nodes; additional nodes wait as spares")


class FaultsBlock(Block):
    """The handling of faults: restarts, lost devices, hangs and invalid numbers."""

    restarts: NaturalInt = Field(default=3, description="number of restarts of the processes before giving up")
    back_off: Annotated[float, Field(ge=0, le=LONGEST)] = Field(
        default=1.0, description="seconds before the first restart; doubled before each further restart"
    )
    lost: Literal["replace", "shrink"] = Field(
        default="replace",
        description="after a device is lost: wait for a replacement, or continue with fewer data-parallel processes",
    )
    hang: Annotated[float, Field(gt=0, le=LONGEST)] | Auto = Field(
        default="auto", description="seconds without progress after which a process counts as hung"
    )
    nodes: NodesBlock | None = Field(
        default=None,
        description="minimum and maximum number of nodes of `stoker node`; by default all nodes are required",
    )
    slow: Annotated[float, Field(gt=1)] = Field(
        default=1.5,
        description="multiple of the median time of all processes above which a process is reported as slow",
    )
    check: bool = Field(default=True, description="test every device before training and after a fault")
    not_finite: Literal["stop", "skip", "roll-back"] = Field(
        default="stop",
        description="if the loss or the gradient is not finite: stop; skip the step; or return to a checkpoint and "
        "skip the samples",
    )
    spike: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="robust z-score of the loss above which training returns to a checkpoint and skips the samples; "
        "0 disables it",
    )
    window: Annotated[int, Field(ge=8, le=LARGEST)] = Field(
        default=64, description="number of previous steps that a loss is compared with"
    )
    deadline: Annotated[float, Field(gt=0, le=LONGEST)] = Field(
        default=60.0, description="seconds after SIGTERM within which a run saves and exits"
    )
    requeue: Annotated[int, Field(ge=0, lt=256)] | None = Field(
        default=None,
        description="exit code after SIGTERM, on which the scheduler restarts the job; by default 128 + signal",
    )


class SyncBlock(Block):
    """Islands: groups of processes that train by themselves between two synchronisations (local SGD, DiLoCo)."""

    every: PositiveInt = Field(default=1, description="steps between two synchronisations; 1: no islands")
    outer: Outer = Field(
        default="nesterov",
        description="outer optimizer of the islands' changes: their average, or SGD with Nesterov momentum",
    )
    outer_lr: Annotated[float, Field(gt=0)] = Field(default=0.7, description="learning rate of outer: nesterov")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="momentum of outer: nesterov")
    islands: PositiveInt | Auto = Field(
        default="auto",
        description="number of islands; auto: one per node, or on a single node one per replica of the model",
    )


class ParallelBlock(Block):
    """The parallel layout: processes = data x tensor x pipeline x context."""

    data: PositiveInt | Auto = Field(
        default="auto", description="data-parallel processes, each with different samples; only they multiply the batch"
    )
    shard: Shard = Field(
        default="none",
        description="state sharded over the data-parallel processes: zero1 optimizer states, zero2 also gradients, "
        "zero3 also weights",
    )
    shard_size: PositiveInt | Auto = Field(
        default="auto",
        description="processes that one copy is sharded over; fewer than data: several replicas (hybrid)",
    )
    tensor: PositiveInt = Field(default=1, description="tensor-parallel processes, which split each matrix")
    sequence: bool | Auto = Field(
        default="auto", description="also split the activations outside of the matrices, along the sequence"
    )
    pipeline: PositiveInt = Field(
        default=1, description="pipeline-parallel processes, which split the blocks into stages"
    )
    schedule: ScheduleName | Auto = Field(
        default="auto",
        description="pipeline schedule of the micro-batches; interleaved, zero-bubble and zbv place two stages on "
        "each process",
    )
    stages: Annotated[list[PositiveInt], Field(min_length=1)] | Auto = Field(
        default="auto",
        description="number of blocks of each pipeline stage, first to last; auto distributes them evenly",
    )
    context: PositiveInt = Field(default=1, description="context-parallel processes, which split each sequence")
    context_by: ContextBy | Auto = Field(
        default="auto", description="attention over split sequences: gather keys and values, or ulysses (by heads)"
    )
    expert: PositiveInt | Auto = Field(
        default="auto",
        description="expert-parallel processes, which split the experts of a mixture; currently equal to tensor",
    )
    recompute: Recompute = Field(
        default="none",
        description="activations to recompute in the backward pass; full: all of a block except its input; "
        "selective: those that are large and cheap to compute",
    )
    offload: Offload = Field(
        default="none",
        description="state to keep in host memory: optimizer states; params: also weights and gradients, with zero3",
    )
    compile: bool | Auto = Field(default="auto", description="torch.compile each block, as train.compile")
    compress: Compress = Field(
        default="none",
        description="gradient compression between replicas: none, rounding to bf16, or products of two narrow "
        "matrices (powersgd) with error feedback",
    )
    compress_rank: PositiveInt = Field(default=4, description="rank of the matrices of compress: powersgd")
    sync: SyncBlock = Field(
        default_factory=SyncBlock,
        description="less frequent synchronisation of gradients, for slow links between nodes",
    )
    devices: Annotated[list[NaturalInt], Field(min_length=1)] | Auto = Field(
        default="auto", description="indices of the devices to use, one per process, such as [0, 2]"
    )


class ExportSyncBlock(Block):
    """A store of tables that follows a run of task ranking while it trains."""

    to: Text = Field(description="store that receives changed rows and the tower: lmdb://PATH or redis://HOST:PORT/DB")
    every_seconds: Annotated[float, Field(gt=0, le=LONGEST)] | None = Field(
        default=None,
        description="maximum age of a change in seconds before it is sent; alternatively, give every_steps",
    )
    every_steps: PositiveInt | None = Field(default=None, description="steps between two updates of the store")


class ExportBlock(Block):
    """Exports during training."""

    sync: ExportSyncBlock | None = Field(
        default=None, description="store of embedding tables that follows the run; for task ranking"
    )


class Job(Block):
    """A training job: parameters of Stoker's fixed code, and the dataset they are applied to."""

    version: Literal[1] = Field(default=1, description="schema version of this file")
    task: str = Field(description="training task")
    model: ModelBlock | None = Field(default=None, description="the model")
    data: list[SourceBlock] = Field(default_factory=list, description="the training data, one or several sources")
    mix: MixBlock = Field(default_factory=MixBlock, description="mixing of several sources")
    tune: TuneBlock = Field(default_factory=TuneBlock, description="tuning method: the parameters that are trained")
    steps: PositiveInt | None = Field(default=None, description="number of optimizer steps; alternatively, give epochs")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="number of passes over the data; alternatively, give steps"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="random seed for the data order, the initial weights and dropout"
    )
    output: str | None = Field(default=None, description="folder of the run; by default runs/<name of the job file>")
    train: TrainBlock = Field(
        default_factory=TrainBlock, description="training settings: batch, optimizer, schedule, precision"
    )
    evaluate: EvaluateBlock = Field(default_factory=EvaluateBlock, description="held-out evaluation")
    checkpoint: CheckpointBlock = Field(default_factory=CheckpointBlock, description="checkpoints")
    faults: FaultsBlock = Field(
        default_factory=FaultsBlock, description="fault handling: restarts, lost devices, hangs, invalid numbers"
    )
    parallel: ParallelBlock = Field(
        default_factory=ParallelBlock, description="parallel layout; or auto: chosen by the planner"
    )
    export: ExportBlock = Field(default_factory=ExportBlock, description="exports during training")
    target: Text | TargetBlock = Field(
        default="local",
        description="where `stoker submit` starts the job: a block ssh, slurm, ray or kubernetes, a file with one, "
        "or a name in targets.yaml",
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
