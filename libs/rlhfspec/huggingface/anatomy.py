"""Where a causal LM can be cut: the trunk that turns tokens into hidden states, its attentions, and the head behind.

`examine` runs a few tokens with an attention that mixes nothing. Then every output of every module must be a function
of its own token and position alone, in any row and any company: this is what lets the engine put all tokens of all
sequences into one row. A module that looks at other tokens outside of `AttentionInterface`, or takes positions from
anywhere but `position_ids`, is refused by name.

Example:
    >>> from rlhfspec.tiny import random_model
    >>> anatomy = examine(random_model("mistral-window", seed=0), name="model", max_context=64)
    >>> anatomy.trunk, [spec.window for spec in anatomy.attentions]
    ('model', [7, 7])
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.attention import AttentionSpec, attending, refuse_unknown
from rlhfspec.huggingface.past import past_of

_ATTRIBUTE = "rlhfspec_anatomy"
_TRACE = "rlhfspec_trace"
_NEAR_TOKENS, _FAR_TOKENS = 12, 8
_SHUFFLED = (7, 2, 9, 3, 11)  # places of the tokens that are run again, in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What `examine` found. Kept on the model, so that whoever runs it goes by it."""

    trunk: str  # the module's path
    trunk_output: type  # what the trunk returns
    attentions: tuple[AttentionSpec, ...]  # in the order in which they run
    width: int  # of a hidden state
    vocab_size: int
    called: frozenset[str]  # paths of the modules that run; others lend their weights at most


def anatomy_of(model: Any) -> Anatomy:
    """What `examine` left on this model."""
    return getattr(model, _ATTRIBUTE)  # type: ignore[no-any-return]


@torch.inference_mode()
def examine(model: Any, *, name: str, max_context: int) -> Anatomy:
    """Finds the anatomy and leaves it on the model. name: what messages call it. Raises UnsupportedModel."""
    tracer = _Tracer(model, name)
    near = tracer.run(min(_NEAR_TOKENS, max_context))
    tracer.check_tokens_stay_apart(near)
    far = near
    if max_context > _NEAR_TOKENS + _FAR_TOKENS:
        far = tracer.run(_FAR_TOKENS, past=max_context - _FAR_TOKENS)
    anatomy = Anatomy(
        trunk=near.trunk,
        trunk_output=near.trunk_output,
        attentions=tracer.specs(near, far),
        width=near.width,
        vocab_size=near.vocab_size,
        called=frozenset(path for path, _, _ in near.modules),
    )
    object.__setattr__(model, _ATTRIBUTE, anatomy)
    return anatomy


class CausalLM:
    """A model in the two parts in which the engine and the trainer run it, head and all being the model's own code.

    Example:
        >>> from rlhfspec.tiny import random_model
        >>> model = random_model("gemma2", seed=0)      # caps its logits behind the head
        >>> _ = examine(model, name="model", max_context=64)
        >>> parts, tokens = CausalLM(model), torch.tensor([[5, 6, 7]])
        >>> hidden = parts.hidden(tokens, torch.tensor([[0, 1, 2]]))
        >>> torch.allclose(parts.logits(hidden[0]), model(tokens).logits[0], atol=1e-6)
        True
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.anatomy = anatomy_of(model)
        self.trunk = model.get_submodule(self.anatomy.trunk)
        self.width = self.anatomy.width
        self._head_guard: AbstractContextManager[object] = nullcontext()
        self._given = _Given(self.anatomy.trunk_output)
        self._behind = _with_submodule(model, self.anatomy.trunk, self._given)

    def hidden(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, N] tokens and positions -> [1, N, hidden]"""
        return run_trunk(self.trunk, token_ids, position_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, width] -> float32 [n, vocab], by the model's own forward behind its trunk."""
        self._given.hidden = hidden[None]
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            with self._head_guard:
                output = type(self.model).forward(self._behind, input_ids=nothing, use_cache=False)
        finally:
            self._given.hidden = None
        return output.logits[0].float()  # type: ignore[no-any-return]

    def guard_head(self, guard: AbstractContextManager[object]) -> None:
        """From now on the code behind the trunk runs inside `guard`."""
        self._head_guard = guard


def run_trunk(trunk: Any, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """[1, N] tokens and positions -> hidden states [1, N, width]"""
    return hidden_of(trunk(input_ids=token_ids, position_ids=position_ids, use_cache=False))


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden states in what a trunk returns."""
    return output[0] if isinstance(output, tuple) else output.last_hidden_state  # type: ignore[no-any-return]


class _Given(nn.Module):
    """In the trunk's place: returns what it was given."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden,) if self.output is tuple else self.output(last_hidden_state=self.hidden)


def _with_submodule(model: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """The same model with one module exchanged: all else is shared with the original, which stays as it is."""
    name, _, rest = path.partition(".")
    view = copy.copy(model)
    view._modules = dict(model._modules)
    inner = view._modules[name]
    assert inner is not None, path
    view._modules[name] = _with_submodule(inner, rest, replacement) if rest else replacement
    return view


# ---- the trace ------------------------------------------------------------------------------------------------------

FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@dataclass(slots=True)
class _Seen:
    """One call of an attention, as the trace heard it."""

    kind: str  # the module's class
    shape: tuple[int, int, int, int]  # heads, KV heads, key size, value size
    scale: float
    softcap: float
    has_sinks: bool
    starts: tuple[int, ...]  # of every query: the first position that it sees
    first_query: int  # position of the first of them

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Position of each query, and the first one that it sees."""
        return [(self.first_query + place, start) for place, start in enumerate(self.starts)]


Tensors = tuple[torch.Tensor, ...]


class _Run:
    """One forward: what every attention said, and what went into and came out of every module."""

    def __init__(self, model: Any, name: str, num_tokens: int) -> None:
        self.name = name
        self.num_tokens = num_tokens
        self.attentions: list[_Seen] = []
        self.modules: list[tuple[str, Tensors, Tensors]] = []  # path, inputs, outputs; inner ones first
        self.trunk = ""
        self.trunk_output: type = tuple
        self.width = 0
        self.vocab_size = 0
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[tuple[str, Tensors]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append((self._paths[module], tuple(_tensors((*args, *kwargs.values())))))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path, inputs = self._stack.pop()
        self.modules.append((path, inputs, tuple(_tensors(output))))
        if path and path == self.trunk:
            self.trunk_output = type(output)
            self.width = hidden_of(output).shape[-1]

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
               scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
               **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
        """An attention that mixes nothing: every token gets its own value."""
        refuse_unknown(module, keywords, name=self.name)
        kind, num_queries, num_keys = type(module).__name__, query.shape[2], key.shape[2]
        self.trunk = self.trunk or self._stack[1][0]
        if self._stack[1][0] != self.trunk:
            raise UnsupportedModel(self.name, kind, f"attention both in {self.trunk} and in {self._stack[1][0]}")
        self.attentions.append(
            _Seen(
                kind=kind,
                shape=(query.shape[1], key.shape[1], key.shape[3], value.shape[3]),
                scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                softcap=float(softcap or 0.0),
                has_sinks=s_aux is not None,
                starts=_first_seen(self.name, kind, attention_mask, num_queries, num_keys),
                first_query=num_keys - num_queries,
            )
        )
        own = value[:, :, num_keys - num_queries :]  # [1, Hkv, N, D]
        return own.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous(), None


class _Tracer:
    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.name = name
        self.tokens = torch.arange(1, _NEAR_TOKENS + 1) % model.get_input_embeddings().num_embeddings

    def run(self, num_tokens: int, *, past: int = 0) -> _Run:
        """Tokens in their order, as Hugging Face runs them of itself."""
        layers = getattr(text_config(self.model), "num_hidden_layers", 0) + 64
        try:
            return self._forward(self.tokens[:num_tokens], **past_of(past, layers))
        except FORWARD_ERRORS as error:
            if isinstance(error, UnsupportedModel) or not past:
                raise
            problem = f"cannot run behind a KV cache: {first_line(error)}"
            raise UnsupportedModel(self.name, type(self.model).__name__, problem) from error

    def check_tokens_stay_apart(self, near: _Run) -> None:
        """Some of the tokens again in another order: nothing but the order of rows may change."""
        places = torch.tensor([place for place in _SHUFFLED if place < near.num_tokens])
        shuffled = self._at(self.tokens[places], places)
        culprit = _first_that_differs(near, shuffled, places)
        if culprit is None:
            if not near.attentions:
                raise UnsupportedModel(self.name, type(self.model).__name__, "a model without attention")
            return
        other = self.tokens[places].clone()
        other[0] = self.tokens[0]
        changed = self._at(other, places)
        mixes = _first_that_differs(shuffled, changed, torch.arange(len(places)), first=1) == culprit
        problem = "mixes tokens outside of AttentionInterface" if mixes else "takes positions from the order of tokens"
        kind = type(self.model.get_submodule(culprit)).__name__
        raise UnsupportedModel(self.name, kind, f"{culprit or 'the model'} {problem}")

    def specs(self, near: _Run, far: _Run) -> tuple[AttentionSpec, ...]:
        if len(near.attentions) != len(far.attentions):
            problem = "runs other attentions at the beginning than behind it"
            raise UnsupportedModel(self.name, type(self.model).__name__, problem)
        pairs = zip(near.attentions, far.attentions, strict=True)
        return tuple(self._spec(index, begin, end) for index, (begin, end) in enumerate(pairs))

    def _spec(self, index: int, near: _Seen, far: _Seen) -> AttentionSpec:
        window, chunk = self._pattern(index, near, far)
        num_heads, num_kv_heads, key_dim, value_dim = near.shape
        return AttentionSpec(
            index=index,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            scale=near.scale,
            softcap=near.softcap,
            has_sinks=near.has_sinks,
            window=window,
            chunk=chunk,
        )

    def _pattern(self, index: int, near: _Seen, far: _Seen) -> tuple[int | None, int | None]:
        """The window or the chunk that explains what is seen near the beginning and far behind it."""
        rows = near.rows + far.rows
        last_start = rows[-1][1]
        if not any(start for _, start in rows):
            return None, None
        query, start = next(row for row in rows if row[1])
        window = query + 1 - start
        if all(start == max(0, query + 1 - window) for query, start in rows):
            return window, None
        if last_start > _FAR_TOKENS:  # chunks: how long is the one before the last?
            rows = self.run(_FAR_TOKENS, past=last_start - _FAR_TOKENS).attentions[index].rows + rows
        chunk = last_start - max(start for _, start in rows if start < last_start)
        if all(start == query - query % chunk for query, start in rows):
            return None, chunk
        raise UnsupportedModel(self.name, near.kind, "sees an irregular part of what is before a token")

    def _at(self, tokens: torch.Tensor, positions: torch.Tensor) -> _Run:
        try:
            return self._forward(tokens, position_ids=positions[None], use_cache=False)
        except FORWARD_ERRORS as error:
            if isinstance(error, UnsupportedModel):
                raise
            problem = f"cannot run tokens at any position: {first_line(error)}"
            raise UnsupportedModel(self.name, type(self.model).__name__, problem) from error

    def _forward(self, tokens: torch.Tensor, **keywords: Any) -> _Run:
        run = _Run(self.model, self.name, len(tokens))
        with attending(self.model, _TRACE, run.attend, masks=True), run.watching(self.model):
            run.vocab_size = self.model(input_ids=tokens[None], **keywords).logits.shape[-1]
        return run


def _first_seen(name: str, kind: str, mask: Any, num_queries: int, num_keys: int) -> tuple[int, ...]:
    """The first position that each query sees; from there on it must see all, up to itself."""
    if mask is None:
        raise UnsupportedModel(name, kind, "attention is not causal (some decoders need is_decoder: true)")
    visible, says_more = _visible(mask[..., :num_keys])
    if says_more:
        raise UnsupportedModel(name, kind, "adds a bias to attention scores through the mask")
    if visible.shape[-2:] != (num_queries, num_keys) or not (visible == visible[:1, :1]).all():
        raise UnsupportedModel(name, kind, f"an attention mask of shape {tuple(mask.shape)}")
    rows = visible[0, 0]  # [N, keys]
    place = torch.arange(num_keys)
    own = place[num_keys - num_queries :, None]
    if (rows & (place > own)).any():
        raise UnsupportedModel(name, kind, "attention is not causal (some decoders need is_decoder: true)")
    starts = torch.where(rows, place, num_keys).amin(dim=1)
    if not torch.equal(rows, (place >= starts[:, None]) & (place <= own)):
        raise UnsupportedModel(name, kind, "attention with gaps between the tokens that are seen")
    return tuple(starts.tolist())


def _visible(mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Which keys a mask lets through [b, h, N, keys], and whether it says anything else."""
    if mask.dtype == torch.bool:
        return mask, False
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden, not bool(((mask == 0) | hidden).all())


def _first_that_differs(one: _Run, other: _Run, places: torch.Tensor, first: int = 0) -> str | None:
    """The first module with the same inputs and other outputs: `other` ran the tokens of `one` at `places`.

    first: the tokens before are not looked at. What has no tokens in its inputs (an expert, say, that is given some of
    the rows) is judged with the module around it.
    """
    calls: dict[str, list[tuple[Tensors, Tensors]]] = {}
    for path, inputs, outputs in other.modules:
        calls.setdefault(path, []).append((inputs, outputs))
    for path, inputs, outputs in one.modules:
        if not calls.get(path):
            continue
        their_inputs, their_outputs = calls[path].pop(0)
        same_inputs = _same(inputs, their_inputs, places, one.num_tokens, first)
        if inputs and same_inputs is None:
            continue
        if same_inputs is not False and _same(outputs, their_outputs, places, one.num_tokens, first) is False:
            return path
    return None


def _same(these: Tensors, those: Tensors, places: torch.Tensor, num_tokens: int, first: int) -> bool | None:
    """Do the tokens agree? None where there are none to compare."""
    found = None
    for this, that in zip(these, those, strict=False):
        axis = _token_axis(this.shape, that.shape, num_tokens, len(places))
        if axis is None:
            continue
        size = len(places) - first
        a, b = this.index_select(axis, places).narrow(axis, first, size), that.narrow(axis, first, size)
        if not _close(a, b):
            return False
        found = True
    return found


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    atol = 1e-4 * float(a.abs().nan_to_num().max())
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=atol, equal_nan=True)


def _token_axis(this: torch.Size, that: torch.Size, num_tokens: int, num_others: int) -> int | None:
    """The dimension that counts tokens, where there is exactly one."""
    if len(this) != len(that):
        return None
    axes = [axis for axis, sizes in enumerate(zip(this, that, strict=True)) if sizes == (num_tokens, num_others)]
    rest = all(a == b for axis, (a, b) in enumerate(zip(this, that, strict=True)) if axis not in axes)
    return axes[0] if len(axes) == 1 and rest else None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def text_config(model: Any) -> Any:
    """The configuration of the decoder, also within a model for more than text."""
    return model.config.get_text_config(decoder=True)


def max_positions(model: Any) -> int | None:
    """How many positions the model was made for; None where it does not say."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
