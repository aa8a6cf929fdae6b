"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one small layer that reads the target's residual streams.

Row p of the draft pairs the token at p + 1 with the target's taps at p. `extend` runs the accepted rows with their true
taps, and only they are kept in pages. From the last one on drafted tokens take the place of the target's, and the
head's own output that of the taps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.cache import draft as draft_cache
from jaxspec.cache.draft import DraftPages
from jaxspec.checkpoint.eagle3_files import open_head
from jaxspec.checkpoint.restore import TensorReader, abstract_module, place
from jaxspec.drafts.eagle3_config import Eagle3Config, eagle3_tensor_shapes, read_eagle3_config, usual_taps
from jaxspec.drafts.eagle3_head import Eagle3Head, head_axes, pack_head
from jaxspec.drafts.growth import Candidates, Level, grow
from jaxspec.drafts.interface import DraftContext, Drafter, DraftTree
from jaxspec.errors import UserError
from jaxspec.mesh import split
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout
from jaxspec.speculate.attention import attend_to_pages
from jaxspec.speculate.sampling import draft_scores, split_top_k
from jaxspec.speculate.taps import check_taps
from jaxspec.speculate.trees import TreeSpec
from pallas_kernels.chunk_prefill import causal_attention
from pallas_kernels.lse_merge import join
from pallas_kernels.tree_attention import masked_attention

if TYPE_CHECKING:
    from jaxspec.speculate.state import StepSpec


@dataclasses.dataclass(frozen=True, eq=False)  # two heads of the same sizes are not the same
class Eagle3(Drafter):
    """Attributes:
    files: where its tensors are.
    """

    config: Eagle3Config
    files: TensorReader
    default_tree = "chain:4"

    @classmethod
    def open(cls, path: str | Path) -> "Eagle3":
        """A head as it was published, or as `jaxspec convert` stored it.

        Raises:
          UserError: there is none, or it is not one that jaxspec computes.
        """
        files = open_head(path)
        return cls(read_eagle3_config(files.config, files.shapes), files)

    def check_tree(self, tree: TreeSpec) -> None:
        if tree.num_nodes == 1:
            raise UserError("tree 'none' leaves the draft nothing to do: choose chain:D, static:… or dynamic:…")
        children = max(tree.parents.count(node) for node in range(tree.num_nodes))
        wanted = tree.beam.topk if tree.beam else children
        if wanted > self.config.draft_vocab_size:
            raise UserError(
                f"tree {tree.name!r} wants {wanted} children of a node, but the draft knows "
                f"{self.config.draft_vocab_size} tokens: choose fewer"
            )

    def fit(self, target: ModelConfig, taps: Sequence[int] | None = None) -> "Eagle3":
        """Taps are R indices: i is the residual stream after i layers of the target."""
        config = self.config
        for what, of_draft, of_target in (
            ("vocab_size", config.layer.vocab_size, target.vocab_size),
            ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ):
            if of_draft != of_target:
                raise UserError(
                    f"the draft was made for a target of {what}={of_draft}, but this one's is {of_target}: "
                    "give the draft of this model"
                )
        wanted = config.taps
        if taps is not None:
            wanted = tuple(taps)
        elif wanted is None:
            wanted = usual_taps(target.num_layers)
            if list(wanted) != sorted(set(wanted)):
                raise UserError(
                    f"the draft's files name no layers, and the usual taps {list(wanted)} of a target of "
                    f"{target.num_layers} layers are not ascending: give its taps (draft_taps, --draft-taps)"
                )
        elif wanted and wanted[-1] > target.num_layers:
            raise UserError(
                f"the draft's config.json lists layers that, read as those whose outputs it takes, mean the taps "
                f"{list(wanted)}, but the target has {target.num_layers} layers: say which are meant (draft_taps, "
                f"--draft-taps), perhaps {','.join(str(tap - 1) for tap in wanted)}"
            )
        check_taps(wanted, target.num_layers)
        if len(wanted) != config.num_taps and not (wanted == config.taps == ()):
            raise UserError(
                f"taps {list(wanted)} are {len(wanted)}, but the draft reads {config.num_taps} of its target: "
                "give as many"
            )
        if wanted and not config.has_fc:
            raise UserError(
                f"taps {list(wanted)} need a draft with tensor 'fc.weight', which this one lacks: without it jaxspec "
                "computes drafts of the target's final hidden state only"
            )
        return dataclasses.replace(self, config=dataclasses.replace(config, taps=wanted))

    # Weights and state

    def abstract_weights(self, layout: DecoderLayout) -> Any:
        return _abstract(self.config, layout)[1]

    def restore(self, layout: DecoderLayout, mesh: Mesh) -> Any:
        names = list(eagle3_tensor_shapes(self.config))
        packed = pack_head(self.config, layout, self.files.read(names))
        state = self.abstract_weights(layout)
        pure, specs = nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))
        placed = jax.tree.map(lambda x, spec, array: place(array, x.dtype, mesh, spec), pure, specs, packed)
        nnx.replace_by_pure_dict(state, placed)
        return state

    def init_state(self, spec: "StepSpec") -> DraftPages:
        layer, pages = self.config.layer, spec.num_pages
        shape = (layer.num_layers, 2, pages, spec.geometry.page_size, layer.num_kv_heads, layer.head_dim)
        return jnp.zeros(shape, spec.layout.dtype)

    def state_specs(self, layout: DecoderLayout) -> Any:
        return split(None, None, None, None, head_axes(self.config, layout))

    @property
    def taps(self) -> tuple[int, ...]:
        assert self.config.taps is not None, "`fit` says which"
        return self.config.taps

    # Drafting

    def draft(
        self, weights: Any, state: DraftPages, context: DraftContext, tree: TreeSpec
    ) -> tuple[DraftTree, DraftPages]:
        layout = context.target.layout
        head = self._head(weights, layout)
        output, pages = extend(head, context, state)

        def expand(drafted: Drafted, level: Level, k: int) -> tuple[Drafted, Candidates]:
            if level.depth > 0:
                drafted = run_level(head, context, pages, drafted, level)
            return drafted, propose(head, context, drafted.outputs, level.depth, k)

        grown = grow(tree, context.root, expand, Drafted((), output[:, None]))
        decided = jnp.stack([grown.tokens, grown.parents])
        tokens, parents = context.collectives.publish(decided, layout.mesh.pp)
        return DraftTree(tokens, parents), pages

    def _head(self, weights: Any, layout: DecoderLayout) -> Eagle3Head:
        return nnx.merge(_abstract(self.config, layout)[0], weights)


@functools.cache
def _abstract(config: Eagle3Config, layout: DecoderLayout) -> tuple[Any, Any]:
    return abstract_module(lambda: Eagle3Head(config, layout))


type LayerKV = tuple[tuple[Float[Array, "B N K D"], Float[Array, "B N K D"]], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted:
    """Rows of drafted tokens so far.

    Attributes:
      kv: of each layer, keys and values of all rows, level after level.
      outputs: of the newest level's rows (at first: of the last true row), before the final norm.
    """

    kv: LayerKV
    outputs: Float[Array, "B R H"]


def extend(head: Eagle3Head, context: DraftContext, pages: DraftPages) -> tuple[Float[Array, "B H"], DraftPages]:
    """Runs the accepted path and the prompt chunk with their true features, and keeps their K/V.

    Returns:
      The output at each slot's last row, position `length - 1`, and the pages with the new rows.
    """
    rows = TrueRows(context)
    # A head without taps takes the target's final states instead.
    taps = context.hidden[:, :, None] if context.taps is None else context.taps
    parts = [lax.collapse(jnp.take_along_axis(taps, context.path[..., None, None], axis=1), 0, 2)]
    tokens, positions = [context.emitted.reshape(-1)], [rows.positions.reshape(-1)]
    if context.lane is not None:
        assert context.lane_hidden is not None
        step = jnp.arange(len(context.lane.tokens))
        is_last = step == context.lane.length - 1
        parts.append(context.lane_hidden[:, None] if context.lane_taps is None else context.lane_taps)
        tokens.append(jnp.where(is_last, context.lane.next_token, jnp.roll(context.lane.tokens, -1)))
        positions.append(context.lane.start + step)
    features = head.features(jnp.concatenate(parts), context.collectives)
    embedded = head.embed(jnp.concatenate(tokens), context.target)
    return head.rows(features, embedded, jnp.concatenate(positions), rows.attend, pages, context.collectives)


@dataclasses.dataclass(frozen=True)
class TrueRows:
    """Attention of an extend pass: A rows of each of B paths, then C of a chunk.

    A slot whose prompt has just ended attends to that chunk, so a layer's rows are all written before any is read. The
    last row of a last chunk is not: there the token that follows was emitted in this round, and the row is the slot's.
    """

    context: DraftContext

    @property
    def positions(self) -> Int[Array, "B A"]:
        first = self.context.length - self.context.count
        return first[:, None] + jnp.arange(self.context.path.shape[1])

    def attend(
        self, pages: DraftPages, layer: int, residual: Array, q: Array, k: Array, v: Array
    ) -> tuple[Array, Array, DraftPages]:
        context, (b, a) = self.context, self.context.path.shape
        is_true = jnp.arange(a) < context.count[:, None]
        path_q, path_k, path_v = (x[: b * a].reshape(b, a, *x.shape[1:]) for x in (q, k, v))
        chunk_q, chunk_k, chunk_v = (x[b * a :] for x in (q, k, v))
        pages = draft_cache.write(pages, layer, context.page_table, self.positions, path_k, path_v, is_true)
        if context.lane is not None:
            lane, step = context.lane, jnp.arange(len(context.lane.tokens))
            is_written = step < lane.length - (lane.slot >= 0)
            pages = draft_cache.write(
                pages,
                layer,
                lane.page_row[None],
                (lane.start + step)[None],
                chunk_k[None],
                chunk_v[None],
                is_written[None],
            )
        scale = q.shape[-1] ** -0.5
        if layer == len(pages) - 1:
            # Only the newest row's output is wanted, and all that it sees is in pages.
            newest = jnp.maximum(context.count - 1, 0)
            last_q = jnp.take_along_axis(path_q, newest[:, None, None, None], axis=1)
            output, _ = attend_to_pages(context.attention, last_q, pages, layer, context.page_table, context.length)
            index = jnp.arange(b) * a + newest
            return residual[index], output.reshape(b, -1).astype(q.dtype), pages
        is_causal = jnp.broadcast_to(jnp.tril(jnp.ones((a, a), bool)), (b, a, a))
        outputs = [
            join(
                attend_to_pages(context.attention, path_q, pages, layer, context.page_table, self.positions[:, 0]),
                masked_attention(path_q, path_k, path_v, is_causal, scale=scale),
            ).reshape(b * a, -1)
        ]
        if context.lane is not None:
            lane = context.lane
            prefix = attend_to_pages(
                context.attention, chunk_q[None], pages, layer, lane.page_row[None], lane.start[None]
            )
            among = causal_attention(chunk_q, chunk_k, chunk_v, scale=scale)
            outputs.append(join((prefix[0][0], prefix[1][0]), among).reshape(len(chunk_q), -1))
        return residual, jnp.concatenate(outputs).astype(q.dtype), pages


def run_level(head: Eagle3Head, context: DraftContext, pages: DraftPages, drafted: Drafted, level: Level) -> Drafted:
    """Runs rows of drafted tokens: each sees the true rows, its ancestors and itself."""
    b, r = level.tokens.shape
    outputs = jnp.take_along_axis(drafted.outputs, level.parents[..., None], axis=1)
    positions = jnp.broadcast_to((context.length - 1 + level.depth)[:, None], (b, r))

    def attend(kv: LayerKV, layer: int, residual: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array, LayerKV]:
        q, k, v = (x.reshape(b, r, *x.shape[1:]) for x in (q, k, v))
        if layer < len(drafted.kv):
            old_k, old_v = drafted.kv[layer]
            k, v = jnp.concatenate([old_k, k], axis=1), jnp.concatenate([old_v, v], axis=1)
        scale = q.shape[-1] ** -0.5
        joined = join(
            attend_to_pages(context.attention, q, pages, layer, context.page_table, context.length),
            masked_attention(q, k, v, level.sees, scale=scale),
        )
        return residual, joined.reshape(b * r, -1).astype(q.dtype), (*kv, (k, v))

    none: LayerKV = ()
    rows, kv = head.rows(
        head.recycled(outputs).reshape(b * r, -1),
        head.embed(level.tokens.reshape(-1), context.target),
        positions.reshape(-1),
        attend,
        none,
        context.collectives,
    )
    return Drafted(kv, rows.reshape(b, r, -1))


def propose(head: Eagle3Head, context: DraftContext, outputs: Float[Array, "B R H"], depth: int, k: int) -> Candidates:
    """The k best tokens below each row of nodes at `depth`, with the noise that the target will use there."""
    scores, ids = head.logits(outputs, context.target)
    if not context.is_greedy:
        # The rows of a slot stand at one position, so they have the same noise.
        sampling = jax.tree.map(lambda x: x[:, None], context.sampling)
        scores = draft_scores(scores, ids, (context.length + depth + 1)[:, None], sampling)
    return Candidates(*split_top_k(scores, ids, k, context.tail_axes, context.collectives))
