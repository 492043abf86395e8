"""EAGLE-3 (Li et al. 2025): one decoder layer that drafts from three hidden states of the target.

Numerically the module of vLLM's `llama_eagle3`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ace_learn.models.draft_layers import Attend, DraftAttention, DraftMLP, DraftOutput, RMSNorm, Rotary
from ace_learn.models.draft_module import Draft, DraftConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """What an EAGLE-3 draft is made of."""

    draft_vocab_size: int
    """Tokens that the draft can propose."""
    target_hidden_size: int
    """H of the target."""
    aux_layers: tuple[int, ...]
    """The target's layers whose inputs are fused, in order."""
    norm_before_residual: bool = False
    """The residual starts behind `hidden_norm` rather than before it."""
    norm_before_fc: bool = False
    """One norm over the concatenated hidden states, before they are fused."""
    fc_norm: bool = False
    """A norm for each hidden state, before they are fused."""
    norm_output: bool = False
    """The draft feeds back its state behind the last norm rather than before it."""
    attention_bias: bool = False
    """Biases in the attention's projections."""
    qk_norm: bool = False
    """Norms of queries and keys: the layer is one of Qwen3 rather than Llama."""
    own_embeddings: bool = False
    """The draft has embeddings of its own; else it shares the target's."""

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"the draft vocabulary must hold 1 to {self.vocab_size} tokens, not {self.draft_vocab_size}"
            )
        if not self.aux_layers or len(set(self.aux_layers)) != len(self.aux_layers):
            raise ValueError(f"need distinct target layers to fuse, not {self.aux_layers}")
        if list(self.aux_layers) != sorted(self.aux_layers):
            raise ValueError(f"target layers must ascend, as vLLM concatenates them; not {self.aux_layers}")
        if self.qk_norm and self.attention_bias:
            raise ValueError("a layer of Qwen3 (qk_norm) with attention_bias is not supported; choose one of them")
        if not self.own_embeddings and self.block.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a draft of hidden size {self.block.hidden_size} cannot share the embeddings of a target of hidden "
                f"size {self.target_hidden_size}; give it own_embeddings"
            )


class Eagle3Layer(nn.Module):
    """The decoder layer: attention over [embedding, hidden state], 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        """Makes the layer."""
        super().__init__()
        block = config.block
        bias = config.attention_bias
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.hidden_norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.self_attn = DraftAttention(
            block, input_size=2 * block.hidden_size, qkv_bias=bias, output_bias=bias, qk_norm=config.qk_norm
        )
        self.post_attention_layernorm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.mlp = DraftMLP(block)

    def forward(
        self,
        embeddings: Float[Tensor, "B Q H"],
        hidden: Float[Tensor, "B Q H"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Float[Tensor, "B Q H"]:
        """The residual stream behind the layer."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = residual + self.self_attn(both, rotary, attend)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Draft(Draft):
    """An EAGLE-3 draft."""

    kind = "eagle3"
    config: Eagle3Config
    to_draft: Tensor
    """Draft id of each token of the target, or -1, [V]."""

    def __init__(
        self,
        config: Eagle3Config,
        vocabulary: Int[Tensor, " Vd"] | None = None,
        embeddings: Float[Tensor, "V H"] | None = None,
    ) -> None:
        """Makes a draft with fresh weights.

        Args:
            config: Its sizes and variants.
            vocabulary: Token ids that it can propose, ascending; None: every token.
            embeddings: The target's embeddings, shared and never trained; None with `own_embeddings`.
        """
        assert (embeddings is None) == config.own_embeddings, "embeddings are either shared or own"
        super().__init__(config, embeddings, vocabulary)
        block = config.block
        fused = config.target_hidden_size * len(config.aux_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, block.rms_norm_eps)
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, block.rms_norm_eps) for _ in config.aux_layers]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(fused, block.hidden_size, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, block.hidden_size)
        self.midlayer = Eagle3Layer(config)
        self.rotary = Rotary(block)
        self.norm = RMSNorm(block.hidden_size, block.rms_norm_eps)
        self.lm_head = nn.Linear(block.hidden_size, config.draft_vocab_size, bias=False)
        self.make_signal_rows(config.signals)
        tokens = self.vocabulary
        assert len(tokens) == config.draft_vocab_size, "the vocabulary has another size than the config says"
        to_draft = torch.full((config.vocab_size,), -1).scatter(0, tokens, torch.arange(len(tokens)))
        self.register_buffer("to_draft", to_draft, persistent=False)

    @property
    def d2t(self) -> Int[Tensor, " Vd"]:
        """Offsets of the checkpoints: the target's token is the draft's id plus the offset at it."""
        return self.vocabulary - torch.arange(len(self.vocabulary), device=self.vocabulary.device)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the config names."""
        return self.config.aux_layers

    def embed(self, tokens: Int[Tensor, "B Q"]) -> Float[Tensor, "B Q H"]:
        """Embeddings of tokens of the target: its own, or the draft's."""
        if not self.config.own_embeddings:
            return super().embed(tokens)
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded

    def fuse(self, aux: Float[Tensor, "B Q A"]) -> Float[Tensor, "B Q H"]:
        """One hidden state of the tapped layers' concatenated ones."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        fused: Tensor = self.fc(aux)
        return fused

    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        attend: Attend,
    ) -> DraftOutput:
        """Runs rows of the draft; see `Draft.forward`."""
        stream = self.midlayer(self.embed(tokens), hidden, self.rotary(hidden, positions), attend)
        read = self.norm(stream)
        return DraftOutput(fed_back=read if self.config.norm_output else stream, read=read)

    def logits(self, read: Float[Tensor, "B Q H"]) -> Float[Tensor, "B Q Vd"]:
        """Logits over the draft's vocabulary, float32."""
        logits: Tensor = self.lm_head(read)
        return logits.float()
