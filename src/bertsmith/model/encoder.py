"""BERT as published (Devlin et al. 2019): post-LayerNorm blocks over packed tokens.

Each part says its arithmetic in plain torch, and hands it to the C kernels where those are at hand
(see fused.py): the two agree, dropout included.

Shape legend: T packed tokens, M of them whose hidden states are wanted, D width, F inner width,
H heads, K head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertsmith.batch import PackedBatch
from bertsmith.model.adapter import Adapter, PassPlace, add_low_rank
from bertsmith.model.attention import attention, body_for
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import Activation, EncoderConfig, num_ghost_rows
from bertsmith.model.dropout import Dropout, apply_dropout, dropout_at
from bertsmith.model.fused import EmbedPlan, compute_dtype, embed, fused_library, groups_of, ids_of
from bertsmith.model.fused_block import BlockParameters, BlockPlan, LastNorm, run_block
from bertsmith.model.kernels.calls import Tables

SITES_PER_BLOCK = 3
"""Independent dropouts in a block: attention probabilities, attention output, feed-forward."""


class Encoder(nn.Module):
    """Token ids to one vector a token.

    Dropout is asked for by the `dropout_seed` argument alone: None means inference, whatever
    `training` says, and the same seed gives the same masks.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Allocate the parameters; `initialize` or a checkpoint gives them values."""
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(
            Block(config, first_site=1 + SITES_PER_BLOCK * i)
            for i in range(config.num_hidden_layers)
        )

    def checkpoint_blocks(self, modes: Sequence[BlockMode]) -> None:
        """Say what each block keeps for the backward pass; changes no result."""
        following: Block | None = None
        for block, mode in reversed(list(zip(self.blocks, modes, strict=True))):
            assert isinstance(block, Block), "made above"
            block.mode = mode
            block.hands_on = (
                following is not None and following.mode != "none" and not following.adapters
            )
            following = block

    def forward(
        self, batch: PackedBatch, *, dropout_seed: int | None, rows_M: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last block, shape (T, D), or (M, D) of the rows wanted.

        Args:
            batch: The pack.
            dropout_seed: Of this pass; None for inference.
            rows_M: Tokens whose hidden states are wanted, int64, ascending, none twice. All
                tokens are attended to, but the last block's other work is done for these alone.
        """
        wanted = batch.num_tokens if rows_M is None else len(rows_M)
        return self.with_table(batch, dropout_seed=dropout_seed, rows_M=rows_M)[0][:wanted]

    def with_table(
        self, batch: PackedBatch, *, dropout_seed: int | None, rows_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and the token table as a decoder tied to it must use it in this pass.

        On a CPU some rows that nobody asked for follow the others (`with_ghosts`,
        `with_repeats`): a head with large products takes them along up to its loss.
        """
        if self.embeddings.token.weight.device.type == "cpu":
            batch = with_ghosts(batch)
            rows_M = None if rows_M is None else with_repeats(rows_M)
        hidden_TD, table_VD = self.embeddings(batch, dropout_seed=dropout_seed)
        last = len(self.blocks) - 1
        before: LastNorm | None = None
        for i, block in enumerate(self.blocks):
            hidden_TD, before = block(
                hidden_TD,
                batch,
                dropout_seed=dropout_seed,
                rows_M=rows_M if i == last else None,
                before=before,
            )
        return hidden_TD, table_VD


def with_ghosts(batch: PackedBatch) -> PackedBatch:
    """The pack with a last sequence nobody reads, so that few sizes of pack are ever computed.

    oneDNN compiles its products for each number of rows: a new number costs half a step's time and
    some megabytes that stay. The ghost sequence is attended to by itself alone, no loss reaches it
    and its gradient is zero, so all results are what they were.
    """
    num_ghosts = num_ghost_rows(batch.num_tokens)
    if num_ghosts == 0:
        return batch
    return replace(
        batch,
        input_ids_T=F.pad(batch.input_ids_T, (0, num_ghosts)),
        position_ids_T=F.pad(batch.position_ids_T, (0, num_ghosts)),
        segment_ids_T=F.pad(batch.segment_ids_T, (0, num_ghosts)),
        starts_N1=F.pad(batch.starts_N1, (0, 1), value=batch.num_tokens + num_ghosts),
        longest=max(batch.longest, num_ghosts),
    )


def with_repeats(rows_M: Tensor) -> Tensor:
    """The rows wanted, the last of them some times over: of these, too, there are few numbers."""
    return torch.cat([rows_M, rows_M[-1:].expand(num_ghost_rows(len(rows_M)))])


class Embeddings(nn.Module):
    """Sum of token, position and segment vectors, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        """Three tables and a LayerNorm."""
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, *, dropout_seed: int | None) -> tuple[Tensor, Tensor]:
        """Vectors for each token, shape (T, D); and the token table for a tied decoder."""
        config, table_VD = self.config, self.token.weight
        drop = dropout_at(
            drop_prob=config.hidden_dropout_prob,
            seed=dropout_seed,
            site=0,
            first_row=batch.first_row,
        )
        lib = fused_library(table_VD)
        if lib is None:
            hidden_TD = (
                self.token(batch.input_ids_T)
                + self.position(batch.position_ids_T)
                + self.segment(batch.segment_ids_T)
            )
            return apply_dropout(self.norm(hidden_TD), drop), table_VD
        tables = Tables(
            token_VD=table_VD,
            position_PD=self.position.weight,
            segment_SD=self.segment.weight,
            gain_D=self.norm.weight,
            shift_D=self.norm.bias,
        )
        plan = EmbedPlan(
            lib=lib,
            ids=ids_of(batch),
            eps=config.layer_norm_eps,
            drop=drop,
            dtype=compute_dtype(table_VD),
        )
        return embed(tables, plan)


class Block(nn.Module):
    """Self-attention and a feed-forward half, each added to its input and normalised."""

    def __init__(self, config: EncoderConfig, *, first_site: int) -> None:
        """Parameters of one block; `first_site` numbers its dropouts within the model."""
        super().__init__()
        self.config = config
        self.first_site = first_site
        self.mode: BlockMode = "none"
        self.hands_on = False
        """Whether the next block makes its input again."""

        width, inner = config.hidden_size, config.intermediate_size
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.inner = nn.Linear(width, inner)
        self.inner_out = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.adapters = nn.ModuleDict()
        """Low-rank additions to the products, by `LORA_TARGETS`; `lora.attach` puts them here. A
        block that has any is computed in plain torch, but for attention."""

    def forward(
        self,
        hidden_TD: Tensor,
        batch: PackedBatch,
        *,
        dropout_seed: int | None,
        rows_M: Tensor | None,
        before: LastNorm | None = None,
    ) -> tuple[Tensor, LastNorm | None]:
        """One block, shape (T, D) to (T, D), or to (M, D) of the rows wanted.

        Args:
            hidden_TD: The input.
            batch: The pack.
            dropout_seed: Of this pass; None for inference.
            rows_M: As of `Encoder.forward`.
            before: What the block before made the input of, if it handed that on.

        Returns:
            The output; and what it was made of, if the next block is to make it again.
        """
        config, site = self.config, self.first_site
        drop_probs = dropout_at(
            drop_prob=config.attention_probs_dropout_prob,
            seed=dropout_seed,
            site=site,
            first_row=batch.first_row * config.num_attention_heads,
        )
        drop_attended, drop_inner = (
            dropout_at(
                drop_prob=config.hidden_dropout_prob,
                seed=dropout_seed,
                site=site + i,
                first_row=batch.first_row,
            )
            for i in (1, 2)
        )
        mode: BlockMode = self.mode if torch.is_grad_enabled() else "none"
        lib = fused_library(self.qkv.weight)
        if lib is not None and not self.adapters:
            plan = BlockPlan(
                lib=lib,
                dtype=compute_dtype(self.qkv.weight),
                groups=groups_of(batch, heads=config.num_attention_heads, rows_M=rows_M),
                eps=config.layer_norm_eps,
                activation=config.hidden_act,
                drop_probs=drop_probs,
                drop_attended=drop_attended,
                drop_inner=drop_inner,
                mode=mode,
                hands_on=self.hands_on and torch.is_grad_enabled(),
            )
            return run_block(hidden_TD, self._parameters_in_order(), plan, before)

        assert before is None, "handed on to blocks on the kernels alone"
        place = PassPlace(dropout_seed=dropout_seed, first_row=batch.first_row, rows_M=rows_M)

        def attended(hidden_TD: Tensor) -> Tensor:
            return self._attended(
                hidden_TD, batch, place, drop_probs, drop_attended, again=mode == "selective"
            )

        def fed_forward(sum_MD: Tensor) -> tuple[Tensor, Tensor]:
            return self._fed_forward(sum_MD, place)

        # A region's last product is not made again: nothing within the region needs its result.
        if mode == "full":
            middle_MD, added_MD = _made_again(
                lambda hidden_TD: fed_forward(attended(hidden_TD)), hidden_TD
            )
        elif mode == "selective":
            middle_MD, added_MD = _made_again(fed_forward, attended(hidden_TD))
        else:
            middle_MD, added_MD = fed_forward(attended(hidden_TD))
        added_MD = apply_dropout(added_MD, drop_inner, rows_M)
        return self.output_norm(middle_MD + added_MD), None

    def _attended(
        self,
        hidden_TD: Tensor,
        batch: PackedBatch,
        place: PassPlace,
        drop_probs: Dropout,
        drop_attended: Dropout,
        *,
        again: bool,
    ) -> Tensor:
        """Attention added to its input, in plain torch.

        Args:
            hidden_TD: The input.
            batch: The pack.
            place: Of the rows wanted.
            drop_probs: Dropout of probabilities.
            drop_attended: Dropout of what is added.
            again: Whether to make probabilities again rather than keep them.
        """

        def attend(qkv_TD: Tensor) -> Tensor:
            return attention(
                qkv_TD,
                batch.starts_N1,
                longest=batch.longest,
                heads=self.config.num_attention_heads,
                drop=drop_probs,
            )

        rows_M = place.rows_M
        of_all = replace(place, rows_M=None)
        qkv_TD = self._product(self.qkv, hidden_TD, ("query", "key", "value"), of_all)
        # Without dropout no body keeps probabilities, and the kernels never do.
        body = body_for(qkv_TD, heads=self.config.num_attention_heads, drop=drop_probs)
        keeps_probs = drop_probs.threshold != 0 and body != "kernels"
        context_TD = _made_again(attend, qkv_TD) if again and keeps_probs else attend(qkv_TD)
        if rows_M is not None:  # from here on no token looks at another
            context_TD, hidden_TD = context_TD[rows_M], hidden_TD[rows_M]
        # Nested, so that the product is gone by the time of the sum.
        added_TD = apply_dropout(
            self._product(self.attention_out, context_TD, ("attention_out",), place),
            drop_attended,
            rows_M,
        )
        sum_TD: Tensor = hidden_TD + added_TD
        return sum_TD

    def _fed_forward(self, sum_MD: Tensor, place: PassPlace) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and what the feed-forward half adds to it, in plain torch."""
        middle_MD = self.attention_norm(sum_MD)
        inner_MF = activate(
            self._product(self.inner, middle_MD, ("inner",), place), self.config.hidden_act
        )
        return middle_MD, self._product(self.inner_out, inner_MF, ("inner_out",), place)

    def _product(
        self, linear: nn.Module, values_TI: Tensor, targets: Sequence[str], place: PassPlace
    ) -> Tensor:
        """A linear layer with its adapters; `targets` are equal shares of its output, in order."""
        made_TO: Tensor = linear(values_TI)
        share = made_TO.shape[1] // len(targets)
        adapters = [
            (i * share, cast(Adapter, self.adapters[target]))
            for i, target in enumerate(targets)
            if target in self.adapters
        ]
        return add_low_rank(made_TO, values_TI, adapters, place)

    def _parameters_in_order(self) -> BlockParameters:
        return BlockParameters(
            qkv_weight=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            out_weight=self.attention_out.weight,
            out_bias=self.attention_out.bias,
            attention_gain=self.attention_norm.weight,
            attention_shift=self.attention_norm.bias,
            inner_weight=self.inner.weight,
            inner_bias=self.inner.bias,
            inner_out_weight=self.inner_out.weight,
            inner_out_bias=self.inner_out.bias,
            output_gain=self.output_norm.weight,
            output_shift=self.output_norm.bias,
        )


_OutT = TypeVar("_OutT")


def _made_again(function: Callable[[Tensor], _OutT], values: Tensor) -> _OutT:
    """`function(values)`, of which nothing is kept but the argument.

    Dropout is a function of its place, so there is no random state to put back.
    """
    made: _OutT = checkpoint(function, values, use_reentrant=False, preserve_rng_state=False)
    return made


def activate(values: Tensor, activation: Activation) -> Tensor:
    """The config's activation: gelu is exact (erf), gelu_new its tanh approximation."""
    match activation:
        case "gelu":
            return F.gelu(values)
        case "gelu_new":
            return F.gelu(values, approximate="tanh")
        case "relu":
            return F.relu(values)
