"""What a run will take before it starts: bytes of each part on one GPU, and seconds of a step.

Generation and update take turns on a GPU, so two peaks must fit. The engine's pools are taken for
a generation and given back before the update; a packed row lives in the update alone.

    generation = weights + adapter + resident copy + optimizer + gradients + pools + one pass
    update     = weights + adapter + resident copy + optimizer + gradients + buckets + packed row

Parameters are counted from the configuration (`footprint.py`), pools by the engine's own rule
(`engine/sizes.py`), DeepSpeed's buffers from its defaults, seconds from what was measured on the
same card (`figures.py`). `RESERVE` stands for CUDA's context and fragmentation and is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octopus_trl.engine.paths import GPU_CHUNK
from octopus_trl.engine.sizes import (
    GPU_SHARE,
    OWN_STATES,
    Budget,
    Sizes,
    bytes_of,
    settle,
    step_bytes,
)
from octopus_trl.engine.widths import GPU_WIDTHS
from octopus_trl.errors import ConfigError
from octopus_trl.models.paged import bytes_per_page
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.figures import Figure
from octopus_trl.train.footprint import Footprint
from octopus_trl.train.zero import NO_TILES

GIB = 1 << 30
RESERVE = 2 * GIB  # assumed: CUDA's context, and what the allocator cannot hand out
BUCKET = 500_000_000  # numbers in DeepSpeed's reduce bucket, its default
LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps gathered at most, its default
MASTER_BYTES = 12  # ZeRO: float32 weight and two moments of AdamW
GRADIENT_BYTES = 4  # of a gradient that ZeRO keeps, at most
TILE = 16_384  # tokens of a tile that is advised, as in recipes/qwen3.5-4b


@dataclass(frozen=True, slots=True)
class Layout:
    """Machines, GPUs on each, and the ZeRO stage (0 is DDP, or one GPU alone)."""

    machines: int
    gpus: int
    zero: int

    @property
    def world(self) -> int:
        """Ranks."""
        return self.machines * self.gpus

    @property
    def name(self) -> str:
        """Such as 8 or 2x8."""
        return f"{self.machines}x{self.gpus}" if self.machines > 1 else str(self.gpus)

    @property
    def launch_file(self) -> str:
        """The file of `accelerate_configs/` that starts it."""
        if self.zero:
            several = self.machines > 1 and self.zero > 1
            return f"multinode_zero{self.zero}" if several else f"zero{self.zero}"
        return "ddp" if self.world > 1 else "single_gpu"


def parse_layout(text: str, zero: int | None = None) -> Layout:
    """Read `8` or `2x8`; without a stage one GPU takes none, several ZeRO-2.

    Raises:
        ConfigError: another form, no GPU, or a stage outside 0..3.
    """
    parts = text.lower().replace("×", "x").split("x")
    if not 1 <= len(parts) <= 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"gpus={text!r}: must be GPUs, or machines x GPUs, such as 8 or 2x8")
    if zero is not None and zero not in (0, 1, 2, 3):
        raise ConfigError(f"zero={zero}: must be 0 (DDP), 1, 2 or 3")
    machines, gpus = (1, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    usual = 2 if machines * gpus > 1 else 0
    return Layout(machines, gpus, usual if zero is None else zero)


@dataclass(frozen=True, slots=True)
class Episode:
    """Tokens given to and sampled by an episode that times are stated for."""

    given: int
    sampled: int

    @property
    def unique(self) -> int:
        """Packed tokens."""
        return self.given + self.sampled


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured rates of one rank: decode, prefill and update."""

    decode: Figure
    prefill: Figure
    update: Figure


@dataclass
class Plan:
    """A run on one layout, all bytes of one GPU.

    Attributes:
        parts: bytes of what lives through the whole run and of the update's buffers, by name.
        sizes: pages and states of the pools.
        problems: why it cannot run, each with value, rule and fix; empty where it can.
    """

    args: OctopusGRPOConfig
    footprint: Footprint
    layout: Layout
    card_bytes: int
    parts: dict[str, int] = field(init=False)
    sizes: Sizes = field(init=False)
    problems: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.parts = self._parts()
        self.sizes = self._sizes()
        self._check()

    # ---- how much work

    @property
    def questions_a_step(self) -> int:
        """Questions of an optimizer step over all ranks."""
        episodes = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return episodes * self.layout.world // (self.args.num_generations or 1)

    @property
    def episodes_a_rank(self) -> float:
        """Episodes that a rank draws for an optimizer step, on average."""
        episodes = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return episodes / self.args.num_iterations

    @property
    def threads_at_once(self) -> int:
        """Threads that may decode at once on a rank."""
        args = self.args
        a_generation = args.per_device_train_batch_size * args.steps_per_generation
        threads = min(args.max_threads, args.max_children + 1) if args.agent == "tree" else 1
        return min(args.max_live_episodes, a_generation) * threads

    @property
    def chain_tokens(self) -> int:
        """Most tokens of one chain: the windows above one another."""
        args = self.args
        above = args.max_depth if args.agent == "tree" and args.exchange != "summary" else 0
        return args.window * (1 + above)

    def seconds(self, speeds: Speeds, episode: Episode) -> dict[str, float | None]:
        """Give the seconds of decode, prefill and update of a step; None without a figure."""
        count = self.episodes_a_rank
        updates = count * self.args.num_iterations
        return {
            name: None if figure.value is None else tokens / figure.value
            for name, figure, tokens in (
                ("decode", speeds.decode, count * episode.sampled),
                ("prefill", speeds.prefill, count * episode.given),
                ("update", speeds.update, updates * episode.unique),
            )
        }

    # ---- bytes

    def _parts(self) -> dict[str, int]:
        print_, world, zero = self.footprint, self.layout.world, self.layout.zero
        # DeepSpeed narrows every weight when bf16 is on; elsewhere autocast leaves them.
        narrowed = zero > 0 and self.args.bf16
        size = 2 if narrowed else print_.dtype.itemsize
        weights = print_.frozen * 2 if narrowed else print_.frozen_bytes
        adapter = print_.trained * 2 if narrowed else print_.trained_bytes
        trained, wide = print_.trained, print_.trained_bytes
        whole = weights + adapter
        parts = {"weights": weights, "adapter": adapter}
        if zero == 3:
            parts = {
                "weights": _share(weights, world) + min(whole, LIVE * size),
                "adapter": _share(adapter, world),
                "resident copy": whole,
            }
        if zero:
            split = world if zero >= 2 else 1
            parts["optimizer"] = _share(MASTER_BYTES * trained, world)
            parts["gradients"] = _share(GRADIENT_BYTES * trained, split)
            parts["buckets"] = BUCKET * (GRADIENT_BYTES if zero == 1 else size)
        else:
            parts["optimizer"] = 2 * wide
            parts["gradients"] = wide
            parts["buckets"] = wide if world > 1 else 0
        return parts

    @property
    def held(self) -> int:
        """Bytes of weights, adapter and resident copy, there from the start to the end."""
        return sum(self.parts.get(name, 0) for name in ("weights", "adapter", "resident copy"))

    @property
    def trained_state(self) -> int:
        """Bytes of optimizer and gradients."""
        return self.parts["optimizer"] + self.parts["gradients"]

    @property
    def pass_bytes(self) -> int:
        """Bytes of the engine's widest pass, beside the pools."""
        spec, dtype = self.footprint.spec, self.footprint.dtype
        return step_bytes(spec, dtype, prefill_chunk=GPU_CHUNK, rows=GPU_WIDTHS[-1])

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        spec, args = self.footprint.spec, self.args
        return self.sizes.pages * bytes_per_page(spec, args.page_size, self.footprint.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state slots, the zero state counted."""
        return self.pool_bytes - self.page_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of both pools."""
        args, dtype = self.args, self.footprint.dtype
        return bytes_of(self.footprint.spec, self.sizes, args.page_size, dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of the fullest packed row."""
        return self.footprint.row_bytes(self.args.max_row_tokens)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the fullest packed row takes, of one rank."""
        return self.footprint.offloaded * self.args.max_row_tokens

    @property
    def generation_bytes(self) -> int:
        """The peak of a generation."""
        return RESERVE + self.held + self.trained_state + self.pool_bytes + self.pass_bytes

    @property
    def update_bytes(self) -> int:
        """The peak of an update."""
        return RESERVE + self.held + self.trained_state + self.parts["buckets"] + self.row_bytes

    @property
    def longest_row(self) -> int:
        """Most tokens of a packed row that the card would hold."""
        return self.footprint.longest_row(self.card_bytes - self.update_bytes + self.row_bytes)

    # ---- what cannot be

    def _sizes(self) -> Sizes:
        """Settle the pools as the engine would on a card that holds the weights alone."""
        left = self.card_bytes - RESERVE - self.held
        budget = Budget(max(0, int((left - self.pass_bytes) * GPU_SHARE)), max(0, left), 0)
        try:
            return settle(
                self.footprint.spec,
                budget,
                page_size=self.args.page_size,
                dtype=self.footprint.dtype,
                num_pages=self.args.num_pages,
                num_states=self.args.num_states,
            )
        except ConfigError as error:
            self.problems.append(f"the pools: {error}")
            return Sizes(self.args.num_pages or 0, self.args.num_states or 0, 0)

    def _check(self) -> None:
        args, card = self.args, self.card_bytes
        most = self.sizes.pages * args.page_size
        if not self.problems and most < self.chain_tokens:
            self.problems.append(
                f"num_pages={self.sizes.pages} of {args.page_size}: hold {most:,} tokens, one "
                f"chain may reach {self.chain_tokens:,} (window={args.window} on each of its "
                "threads); give more pages, or a smaller window or max_depth"
            )
        if not self.problems and self.generation_bytes > card:
            self.problems.append(
                f"a generation takes {gib(self.generation_bytes)}, the card has {gib(card)}; give "
                "smaller num_pages and num_states, or split the optimizer over more GPUs"
            )
        if self.layout.zero == 3 and args.mlp_tile_tokens is not None:
            self.problems.append(f"mlp_tile_tokens={args.mlp_tile_tokens}: {NO_TILES}")
        if self.update_bytes > card:
            longest = self.longest_row
            fix = f"set max_row_tokens to {longest} or less" if longest else "take a larger card"
            if longest and not args.gradient_checkpointing:
                fix += ", or gradient_checkpointing: true"
            elif (
                args.mlp_tile_tokens is None
                and self.layout.zero != 3
                and args.max_row_tokens > TILE
            ):
                fix += f", or mlp_tile_tokens: {TILE}"
            elif args.gradient_checkpointing and not args.activation_offloading:
                fix += ", or activation_offloading: true"
            self.problems.append(
                f"max_row_tokens={args.max_row_tokens}: an update with such a row takes "
                f"{gib(self.update_bytes)}, the card has {gib(card)}; {fix}"
            )

    def warnings(self, episode: Episode) -> list[str]:
        """Say what runs, but not as one may think."""
        args, layout, found = self.args, self.layout, []
        if layout.machines > 1 and layout.zero < 2:
            found.append(
                f"{layout.launch_file}.yaml is for one machine: add --num_machines "
                f"{layout.machines} --num_processes {layout.world} and, on each, --machine_rank "
                "RANK --main_process_ip HEAD --main_process_port PORT"
            )
        if episode.unique > args.max_row_tokens:
            found.append(
                f"an episode of {episode.unique:,} tokens fits no row of max_row_tokens="
                f"{args.max_row_tokens} and would be left out of the update whole; the card holds "
                f"rows of {self.longest_row:,}"
            )
        if self.footprint.spec.is_hybrid and self.sizes.states < OWN_STATES * self.threads_at_once:
            found.append(
                f"{self.threads_at_once} threads may live at once and the slots hold "
                f"{self.sizes.states // OWN_STATES} with {OWN_STATES} states each: the others' "
                "states are parked in host memory, or computed again"
            )
        if not str(args.optim.value).startswith("adamw"):
            found.append(f"optim={args.optim.value} is counted as AdamW, two moments a parameter")
        return found


def gib(num_bytes: float) -> str:
    """Write bytes in GiB."""
    return f"{num_bytes / GIB:.2f} GiB"


def _share(num_bytes: int, ranks: int) -> int:
    return -(-num_bytes // ranks)
