"""The work plan of the Hopper kernel: static tile sizes, one small table in the graph, and scalar arithmetic on it.

A *tile* is `q_tile` consecutive query tokens of one sequence for one KV head; its cost is a number of KV tiles of
`block_kv` keys. The tokens past the last sequence form a sequence of their own without keys, so that every row of the
output is written by some tile. Two ways of handing tiles to programs:

* whole: programs take whole tiles from one queue, whoever is free the next, the longest first inside each (sequence, KV
  head) so that the end is even. Sequences of one tile (decoding) are spread evenly among the others (prefill): the ones
  need the memory, the others the tensor cores. Results do not depend on the batch.
* split: all KV tiles of all query tiles are laid on one line, and program c takes the c-th of C equal parts. A tile cut
  by a boundary is finished by the merge kernel. Every program streams the same number of bytes.

Everything that depends on lengths is either in `table` (one fused XLA kernel) or scalar arithmetic inside the kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import tuned
from pallas_kernels.hopper_new_kv import fresh_counts
from pallas_kernels.masks import key_span
from pallas_kernels.request import AttentionOperands, AttentionRequest
from pallas_kernels.work_plan import existing_keys

NUM_PROGRAMS = 132  # multiprocessors of an H100 or H200 (SXM); elsewhere only the balance suffers
SMEM_BYTES = 227 * 1024  # what one program may have
SMALL_BYTES = 10 * 1024  # for barriers, descriptions and the plan table, each at the next KiB
ROWS = 64  # rows of a wgmma tile: one warpgroup's share

# Rows of the table, int32 each; one column a sequence, one for the tokens past the last, one for the totals.
Q_START, Q_LEN, SEQ_LEN, CAUSAL, KV_START, TILES_BEFORE, COST_BEFORE, WIDTH = range(8)
FRESH_BEFORE = 8  # with new keys beside the cache only
SHORT_BEFORE = WIDTH  # whole: COST_BEFORE counts the tiles of long sequences, this those of sequences of one tile


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static sizes of one compiled kernel."""

    group: int  # query heads a KV head: rows of one token
    wgs: int  # compute warpgroups
    block_kv: int
    stages: int
    q_slots: int
    chunk: int  # keys of one TMA copy
    col: int  # columns of one swizzled tile
    split: bool
    programs: int = NUM_PROGRAMS
    registers: tuple[int, int, int] = (232, 40, 0)  # a thread of a computing, the loading, the converting warpgroup
    q_in_registers: bool = False  # keep a piece's queries there; otherwise each matmul reads them from shared memory
    convert: int = 0  # warpgroups that widen an 8-bit cache: one, or one for K and one for V

    @property
    def warpgroups(self) -> int:
        """All of them."""
        return self.wgs + 1 + self.convert

    @property
    def wg_tokens(self) -> int:
        """Query tokens of one warpgroup; row r is head r % group of token r // group."""
        return ROWS // self.group

    @property
    def q_tile(self) -> int:
        """Query tokens of one tile."""
        return self.wgs * self.wg_tokens

    @property
    def alloc_rows(self) -> int:
        """Rows that a warpgroup's query buffer needs so that it holds whole tokens and whole 8-row swizzle atoms."""
        unit = math.lcm(8, self.group)
        return -(-ROWS // unit) * unit


# What a tuned entry may change of the heuristic's sizes; the rest follows from the request.
TUNABLE = ("wgs", "block_kv", "stages", "q_slots", "split", "registers", "q_in_registers", "convert")
OTHER_REGISTERS = 40  # of a computing thread, beside scores, probabilities, output and queries


def choose_tiling(request: AttentionRequest) -> Tiling:
    """Tile sizes from static facts alone: measured ones where there are some near, else the heuristic's."""
    usual, work = heuristic(request), work_of(request)
    fields = tuned.lookup(tuned.gpu_arch(), "hopper", work, request)
    if fields is None:
        return usual
    tiling = with_fields(request, usual, fields)
    if reasons := misfits(request, tiling):
        tuned.say_once(f"the nearest tuned hopper tile for {work}, {fields}, does not fit: {'; '.join(reasons)}")
        return usual
    return tiling


def heuristic(request: AttentionRequest) -> Tiling:
    """Tile sizes for shapes that nobody has measured."""
    group, dim = request.group_size, request.head_dim
    wgs = _warpgroups(request)
    col = next(c for c in (64, 32, 16) if dim % c == 0)
    q_slots = 2 if dim <= 128 and group & (group - 1) == 0 else 1
    registers = (232, 40, 0)
    if request.quantized:  # room for K (two stages) and V (one) in 16 bits beside the stages of 8 bits
        q_slots = 2 if wgs == 1 and q_slots == 2 else 1
        registers = (200, 40, 72) if wgs == 2 else (240, 40, 152)  # without spills
    block_kv = block_of(dim)
    room = SMEM_BYTES - SMALL_BYTES - q_slots * query_bytes(group, wgs, dim)
    stages = 2 if request.quantized or room // (2 * block_kv * dim * 2) < 4 else 3
    return Tiling(
        group=group,
        wgs=wgs,
        block_kv=block_kv,
        stages=stages,
        q_slots=q_slots,
        chunk=math.gcd(request.page_size, block_kv),
        col=col,
        split=not (request.batch_invariant or _even(request, wgs) or _short(request, block_kv)),
        registers=registers,
        convert=int(request.quantized),
    )


def _warpgroups(request: AttentionRequest) -> int:
    group, dim = request.group_size, request.head_dim
    short = likely_query_len(request) <= ROWS // group
    # Four warpgroups leave each thread too few registers for an output row of more than 128.
    if short or (request.quantized and dim > 128):
        return 1
    return 1 if query_bytes(group, 2, dim) + kv_bytes(request) > SMEM_BYTES - SMALL_BYTES else 2


def _even(request: AttentionRequest, wgs: int) -> bool:
    """Whether whole tiles keep all programs busy."""
    tokens = wgs * (ROWS // request.group_size)
    if likely_query_len(request) <= tokens:  # one tile a sequence
        return fills_rounds(request.num_seqs * request.num_kv_heads)
    return max(request.num_tokens // tokens, 1) * request.num_kv_heads > 4 * NUM_PROGRAMS


def _short(request: AttentionRequest, block_kv: int) -> bool:
    """Whether no sequence is so long that cutting it saves what merging takes."""
    return request.max_pages * request.page_size <= 4 * block_kv


def work_of(request: AttentionRequest) -> str:
    """The kind of work, as the tuned tables name it: what its best sizes hang on beside the shape of heads and pages.

    Lengths of queries (mixed: of some sequences far longer than the mean), whether whole tiles fill the chip, and
    whether a window keeps each query's keys few.
    """
    query_len = likely_query_len(request)
    if query_len == 1:
        kind = "decode"
    elif query_len > 4 * -(-request.num_tokens // request.num_seqs):
        kind = "mixed"
    else:
        kind = "draft" if query_len <= ROWS // request.group_size else "prefill"
    load = "many tiles" if _even(request, _warpgroups(request)) else "few tiles"
    return f"{kind}, {load}" + (", window" if request.window[0] is not None else "")


def with_fields(request: AttentionRequest, tiling: Tiling, fields: dict[str, Any]) -> Tiling:
    """Other sizes, as a tuned entry has them.

    `batch_invariant` keeps what decides the order of a row's sums, for the kind of work hangs on the batch.
    """
    kept = ("split", "block_kv") if request.batch_invariant else ()
    changes: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items() if n not in kept}
    if unknown := changes.keys() - set(TUNABLE):
        raise ValueError(f"fields of a tuned hopper tile: got {sorted(unknown)}, expected some of {', '.join(TUNABLE)}")
    block_kv = changes.get("block_kv", tiling.block_kv)
    return dataclasses.replace(tiling, chunk=math.gcd(request.page_size, block_kv), **changes)


def misfits(request: AttentionRequest, t: Tiling) -> tuple[str, ...]:
    """Why the kernel of a tiling could not run a request, or not well; empty where it can."""
    reasons = []
    if t.wgs not in (1, 2):
        reasons.append(f"wgs={t.wgs}: one or two computing warpgroups")
    if t.block_kv % ROWS or not 0 < t.block_kv <= 256:
        reasons.append(f"block_kv={t.block_kv}: a multiple of {ROWS} up to 256, the widest matrix instruction")
    if t.q_slots not in (1, 2):  # the computing warpgroups wait for ever with more
        reasons.append(f"q_slots={t.q_slots}: one or two slots of queries")
    if t.stages < 2:
        reasons.append(f"stages={t.stages}: at least 2")
    if t.convert not in ((1, 2) if request.quantized else (0,)):
        reasons.append(f"convert={t.convert}: one or two warpgroups for an 8-bit cache, none for others")
    if request.batch_invariant and t.split:
        reasons.append("split: the batch would decide where sums are cut")
    if free_bytes(request, t) < 0:
        reasons.append(f"{-free_bytes(request, t)} bytes of shared memory too many")
    reasons += _register_misfits(t) if t.warpgroups > 2 else []  # with two, each thread has all that it can use
    if held_registers(request, t) > t.registers[0]:
        reasons.append(f"{held_registers(request, t)} registers a thread to hold, with {t.registers[0]}")
    return tuple(reasons)


def _register_misfits(t: Tiling) -> list[str]:
    """What is wrong with the shares that the warpgroups change their registers to."""
    start = 512 // t.warpgroups // 8 * 8  # a thread's at the launch; of these the loading gives and the computing takes
    shares = [t.registers[0]] * t.wgs + [t.registers[1]] + [t.registers[2]] * t.convert
    reasons = []
    if sum(shares) > start * t.warpgroups:
        reasons.append(f"registers={t.registers}: more than {start * t.warpgroups} for {t.warpgroups} warpgroups")
    if min(shares) < 24 or max(shares[t.wgs :]) > start or not start <= t.registers[0] <= 248:
        reasons.append(f"registers={t.registers}: {start} to 248 for computing, 24 to {start} for the others")
    if any(x % 8 for x in shares):
        reasons.append(f"registers={t.registers}: each a multiple of 8")
    return reasons


def held_registers(request: AttentionRequest, t: Tiling) -> int:
    """Registers of a computing thread: 64 rows of scores, of probabilities (16 bits) and output among 128 threads."""
    queries = request.head_dim // 4 if t.q_in_registers else 0
    return t.block_kv * 3 // 4 + request.head_dim // 2 + queries + OTHER_REGISTERS


def block_of(dim: int) -> int:
    """Keys of a KV tile."""
    return 128 if dim <= 128 else 64


def query_bytes(group: int, wgs: int, dim: int) -> int:
    """Shared memory of one slot of query tiles; an odd number of heads a group needs spare rows."""
    unit = math.lcm(8, group)
    return wgs * (-(-ROWS // unit) * unit) * dim * 2


def kv_bytes(request: AttentionRequest, block_kv: int | None = None, stages: int = 2) -> int:
    """Shared memory of K and V; of an 8-bit cache with its wide tiles."""
    tile = (block_kv or block_of(request.head_dim)) * request.head_dim
    if not request.quantized:
        return stages * 2 * tile * 2
    return stages * 2 * tile + (3 if request.head_dim <= 192 else 2) * tile * 2


def free_bytes(request: AttentionRequest, t: Tiling) -> int:
    """Shared memory that the large buffers leave, beside what small ones are promised."""
    queries = t.q_slots * query_bytes(t.group, t.wgs, request.head_dim)
    return SMEM_BYTES - SMALL_BYTES - queries - kv_bytes(request, t.block_kv, t.stages)


def likely_query_len(request: AttentionRequest) -> int:
    """The caller's hint; without one (it is then T, which several sequences cannot all have) the mean."""
    if request.max_query_len < request.num_tokens:
        return request.max_query_len
    return -(-request.num_tokens // request.num_seqs)


def fills_rounds(tiles: int) -> bool:
    """Whether that many equal tiles keep the programs busy to the end, nine parts in ten or more."""
    rounds = -(-tiles // NUM_PROGRAMS)
    return tiles >= 0.9 * rounds * NUM_PROGRAMS


def max_tiles(request: AttentionRequest, tiling: Tiling) -> int:
    """An upper bound on the number of query tiles of a KV head."""
    return -(-request.num_tokens // tiling.q_tile) + request.num_seqs + 1


def queued(request: AttentionRequest, tiling: Tiling) -> bool:
    """Whether programs take tiles from a queue: few have a program each, and the queue's counter costs a copy."""
    return not tiling.split and max_tiles(request, tiling) * request.num_kv_heads > tiling.programs


def sequence_span(row: dict[int, Array], tiling: Tiling, window: tuple[int | None, int | None]) -> tuple[Array, Array]:
    """The [first, end) KV tiles that any query of a sequence may need; never empty in cost, maybe in keys."""
    first, end = key_span(
        row[SEQ_LEN] - row[Q_LEN],
        row[SEQ_LEN] - 1,
        seq_len=row[SEQ_LEN],
        causal=row[CAUSAL] != 0,
        window=window,
        kv_start=row[KV_START],
    )
    first = lax.div(first, jnp.int32(tiling.block_kv))
    end = lax.div(end + (tiling.block_kv - 1), jnp.int32(tiling.block_kv))
    return first, jnp.maximum(end, first + 1)


def table(request: AttentionRequest, operands: AttentionOperands, tiling: Tiling) -> Array:
    """int32[8 * columns / 256, 256]: what the kernels need of each sequence, written by one to three small XLA kernels.

    All of it is elementwise in the column (with gathers) but for the sums, so that XLA makes no more kernels of it.
    """
    num_seqs, num_tokens = request.num_seqs, request.num_tokens
    column = jnp.arange(columns(request))
    real = column < num_seqs

    def of(x: Array | None, default: int) -> Array:
        assert x is not None
        return jnp.where(real, x[jnp.minimum(column, num_seqs - 1)], default)

    # Starts that decrease, which only bad input has, are not made to rise as in `work_plan.row_starts`: that would be one
    # more XLA kernel a call.
    start = jnp.clip(operands.query_start_loc[jnp.minimum(column, num_seqs)], 0, num_tokens)
    start = jnp.where(column == 0, 0, start)
    end = jnp.clip(operands.query_start_loc[jnp.minimum(column + 1, num_seqs)], 0, num_tokens)
    end = jnp.where(column == num_seqs, num_tokens, end)
    q_len = jnp.maximum(end - start, 0)
    row = {
        Q_START: start,
        Q_LEN: q_len,
        SEQ_LEN: existing_keys(of(operands.seq_lens, 0), q_len, request.max_pages * request.page_size, request.new_kv),
        CAUSAL: of(operands.causal, False).astype(jnp.int32)
        if request.causal is None
        else jnp.full_like(start, int(request.causal)),
        KV_START: jnp.zeros_like(start) if operands.kv_start is None else of(operands.kv_start, 0),
    }
    tiles = lax.div(q_len + (tiling.q_tile - 1), jnp.int32(tiling.q_tile))
    items = tiles * request.num_kv_heads
    sums = [tiles]
    if tiling.split:
        first, stop = sequence_span(row, tiling, request.window)
        row[WIDTH] = stop - first
        sums.append(items * row[WIDTH])
    else:
        sums += [jnp.where(tiles > 1, items, 0), jnp.where(tiles == 1, items, 0)]
    names = [TILES_BEFORE, COST_BEFORE] if tiling.split else [TILES_BEFORE, COST_BEFORE, SHORT_BEFORE]
    if request.new_kv:
        sums.append(fresh_counts(row[SEQ_LEN], q_len, request.page_size))
        names.append(FRESH_BEFORE)
    return _laid_out(row, dict(zip(names, sums, strict=True)), table_rows(request)).reshape(-1, FOLD)


FEW_KERNELS = (
    96  # columns up to which XLA makes one kernel (32) or two of a reduction over pairs; of sums apart two or three
)


def _laid_out(plain: dict[int, Array], summed: dict[int, Array], height: int) -> Array:
    """int32[height, columns]: rows as they are, and rows of which each column has the sum over the columns before it.

    For few columns all of it is one masked reduction over pairs of columns.
    """
    n = plain[Q_START].shape[0]
    if n > FEW_KERNELS:
        before = lax.optimization_barrier([_sum_before(x) for x in summed.values()])
        rows = plain | dict(zip(summed, before, strict=True))
        zero = jnp.zeros_like(plain[Q_START])
        return jnp.stack([rows.get(i, zero) for i in range(height)])
    shape = (height, n, n)
    name, to, of = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    picked = jnp.zeros(shape, jnp.int32)
    for i, x in (plain | summed).items():
        counts = of < to if i in summed else of == to
        picked = jnp.where((name == i) & counts, x[None, None, :], picked)
    return picked.sum(2, dtype=jnp.int32)


def table_rows(request: AttentionRequest) -> int:
    """Height of the table."""
    return 16 if request.new_kv else 8


FOLD = 256  # the longest row of a bulk copy; the table travels folded to it


def columns(request: AttentionRequest) -> int:
    """Width of the table, so that it folds evenly."""
    return -(-(request.num_seqs + 2) // 32) * 32


@dataclasses.dataclass(frozen=True)
class Table:
    """The folded table behind the indices [row, column]."""

    ref: Any
    columns: int

    def __getitem__(self, at: tuple[int, Array | int]) -> Array:
        place = at[0] * self.columns + at[1]
        return self.ref[lax.div(place, jnp.int32(FOLD)), lax.rem(place, jnp.int32(FOLD))]


def _sum_before(x: Array) -> Array:
    """[0, x0, x0 + x1, ...]; for short arrays as one masked reduction, which XLA fuses with what makes x."""
    n = x.shape[0]
    if n > 2048:
        return jnp.cumsum(x, dtype=x.dtype) - x
    earlier = jnp.arange(n)[None, :] < jnp.arange(n)[:, None]
    return jnp.where(earlier, x[None, :], 0).sum(1, dtype=x.dtype)


def queue(n: Array, long: Array, short: Array) -> tuple[Array, Array]:
    """Place n of the queue: (whether a short tile, its number among its kind). Shorts come at regular intervals."""
    every = lax.div(long + short, jnp.maximum(short, 1))
    every = jnp.where(short == 0, 1 << 30, jnp.maximum(every, 1))
    passed = lax.div(n + 1, every)
    is_short = (passed * every == n + 1) & (passed <= short)
    return is_short, jnp.where(is_short, passed - 1, n - jnp.minimum(passed, short))


def share(total: Array, tiling: Tiling) -> Array:
    """KV tiles of one program's part of the line (split)."""
    return jnp.maximum(lax.div(total + (tiling.programs - 1), jnp.int32(tiling.programs)), 2)


def find_sequence(before: Callable[[Array], Array], position: Array, num_rows: int) -> Array:
    """The sequence whose part of the line holds `position`: the last s with before(s) <= position."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = lax.shift_right_logical(low + high, jnp.int32(1))
        right = before(middle) <= position
        return jnp.where(right, middle, low), jnp.where(right, high, middle)

    steps = max(num_rows - 1, 1).bit_length()
    return lax.fori_loop(0, steps, halve, (jnp.int32(0), jnp.int32(num_rows)))[0]
