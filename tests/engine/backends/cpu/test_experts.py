"""Mixtures of experts in a program: the numbers of MixtureOfExperts, and bits that depend on a row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import addressof, c_int32, c_void_p
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptserve.engine.backends.cpu import native
from gptserve.engine.backends.cpu.int4 import NativeInt4Linear
from gptserve.engine.backends.cpu.int8 import FORMAT
from gptserve.engine.backends.cpu.linear import NativeLinear
from gptserve.engine.backends.cpu.program import Experts, Gate, Program, route_bytes, router_data
from gptserve.engine.model.activation import gated
from gptserve.engine.model.experts import MixtureOfExperts
from gptserve.engine.model.routing import route
from gptserve.weights.config import Experts as Choice
from gptserve.weights.config import Router

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library is not built")

HIDDEN, FFN = 64, 96
LIMIT = 2.0
PLAIN = Router()
SPARE_ROWS = 3
NAN, INF = torch.nan, torch.inf

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}

by_variant = pytest.mark.parametrize("variant", native.supported_variants(32))
all_kinds = pytest.mark.parametrize(
    ("dtype", "int8"), [(dtype, int8) for dtype in DTYPES for int8 in (False, True)], ids=lambda value: str(value)
)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    num: int = 8
    num_active: int = 2
    is_gated: bool = True
    int8: bool = False
    dtype: torch.dtype = torch.bfloat16
    router: Router = PLAIN
    num_shared: int = 0
    has_shared_gate: bool = False
    shared_weight: float = 1.0

    @property
    def choice(self) -> Choice:
        return Choice(self.num, self.num_active, self.router, self.num_shared, self.has_shared_gate, self.shared_weight)


class Mixture:
    """Random experts, of a program and of torch."""

    def __init__(self, shape: Shape, variant: native.Variant | None = None) -> None:
        self.shape, self._variant = shape, variant
        generator = torch.Generator().manual_seed(0)
        activation = None if shape.is_gated else "relu"

        def linear(num_in: int, num_out: int, activation: str | None = None) -> NativeLinear:
            weight = torch.randn(num_out, num_in, generator=generator).mul(num_in**-0.5).to(shape.dtype)
            bias = torch.randn(num_out, generator=generator).to(shape.dtype)
            if not shape.int8:
                return NativeLinear(weight, bias, activation, variant=variant)  # type: ignore[arg-type]
            its_variant = variant if variant in native.supported_variants(native.CODED_VARIANTS) else None
            return NativeInt4Linear(weight, FORMAT, bias, activation, variant=its_variant)  # type: ignore[arg-type]

        ups = FFN * 2 if shape.is_gated else FFN
        self.experts = [(linear(HIDDEN, ups, activation), linear(FFN, HIDDEN)) for _ in range(shape.choice.num_all)]
        self.correction = torch.randn(shape.num, generator=generator) if shape.router.has_correction else None
        self.factors = torch.rand(shape.num, generator=generator) + 0.5 if shape.router.has_factors else None

    def by_torch(self, x: Tensor, scores: Tensor, residual: Tensor | None) -> Tensor:
        def expert(up: NativeLinear, down: NativeLinear) -> Callable[[Tensor], Tensor]:
            return lambda x: down(gated(up(x), "relu", LIMIT) if self.shape.is_gated else up(x))

        experts = [expert(*linears) for linears in self.experts]
        return MixtureOfExperts(lambda x: route(self.shape.choice, scores, self.correction, self.factors), experts)(
            x, residual
        )

    def __call__(self, x: Tensor, scores: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the mixtures of rows; nothing behind them may be written in any buffer."""
        choice, num_rows = self.shape.choice, len(x)
        num = choice.num_all
        of_pairs = {
            "pairs": HIDDEN,
            "up": FFN * (1 + self.shape.is_gated),
            "gated": FFN,
        }
        widths = {"x": HIDDEN, "residual": HIDDEN, "out": HIDDEN, "scores": choice.num_logits}
        widths |= {name: choice.num_per_row * width for name, width in of_pairs.items()}
        widths["routes"] = route_bytes(choice) // self.shape.dtype.itemsize
        wide = ("out", "residual") if residual is not None and residual.dtype is torch.float32 else ()
        if not choice.router.is_plain:
            wide += ("scores",)
        program = Program(widths, self.shape.dtype.itemsize, self._variant, wide)
        ups, downs = ((c_void_p * num)(*(addressof(pair[i].weight) for pair in self.experts)) for i in range(2))
        gate, ends = Gate(LIMIT, native.ACTIVATIONS.index("relu")), (c_int32 * (num + 1))(*[-7] * (num + 1))
        of_experts = (self.correction, self.factors)
        router = router_data(choice, *(None if its is None else its.data_ptr() for its in of_experts))
        data = Experts(
            ups=addressof(ups),
            downs=addressof(downs),
            router=addressof(router),
            gate=addressof(gate) if self.shape.is_gated else None,
            ends=addressof(ends),
            num=choice.num,
            num_active=choice.num_active,
            num_shared=choice.num_shared,
            **{name: program.number(name) for name in ("scores", "routes", "pairs", "up", "gated")},
        )
        program.add("experts", "x", "out", data, residual="" if residual is None else "residual")
        buffers = {
            name: torch.full(
                (num_rows + SPARE_ROWS, width), NAN, dtype=torch.float32 if name in wide else self.shape.dtype
            )
            for name, width in widths.items()
        }
        for name, rows in (("x", x), ("scores", scores), ("residual", residual)):
            if rows is not None:
                buffers[name][:num_rows] = rows
        for name, buffer in buffers.items():
            program.place(name, buffer.data_ptr())
        behind = {name: bits(buffer[num_rows:]).clone() for name, buffer in buffers.items()}
        program.run(num_rows)
        assert ends[num] == -7
        assert all(torch.equal(bits(buffer[num_rows:]), behind[name]) for name, buffer in buffers.items())
        return buffers["out"][:num_rows]


def bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int16)


def random_rows(num_rows: int, shape: Shape, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, scores, of which many are equal, and a residual."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, shape.choice.num_logits, generator=generator).mul(2).round() / 2
    x, residual = (torch.randn(num_rows, HIDDEN, generator=generator).to(shape.dtype) for _ in range(2))
    return x, scores.to(torch.bfloat16).to(shape.dtype), residual


ROUTERS = st.builds(
    Router,
    st.sampled_from(["softmax", "sigmoid"]),
    has_correction=st.booleans(),
    renormalised=st.booleans(),
    min_sum=st.sampled_from([0.0, 0.4]),
    sum_offset=st.sampled_from([0.0, 0.25]),
    scale=st.sampled_from([1.0, 2.5]),
    has_factors=st.booleans(),
)
SHAPES = st.builds(
    lambda num, share, *others: Shape(num, max(1, round(num * share)), *others),
    st.sampled_from([1, 2, 5, 8, 33]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.one_of(st.builds(Router, renormalised=st.booleans()), ROUTERS),
    st.sampled_from([0, 0, 1, 3]),
)
WITH_GATES = st.builds(lambda shape: replace(shape, has_shared_gate=shape.num_shared > 0), SHAPES)
WITH_WEIGHTS = st.builds(
    lambda shape, weight: replace(shape, shared_weight=weight), SHAPES, st.sampled_from([0.3, 0.5])
)
IN_GROUPS = st.builds(
    lambda router, groups: Shape(
        4 * groups[0], 3, router=replace(router, has_correction=True, num_groups=groups[0], num_active_groups=groups[1])
    ),
    ROUTERS,
    st.sampled_from([(2, 1), (4, 2), (5, 3), (9, 8)]),
)


@given(
    shape=st.one_of(SHAPES, WITH_GATES, WITH_WEIGHTS, IN_GROUPS),
    variant=st.sampled_from(native.supported_variants(32) or ("generic",)),
    num_rows=st.sampled_from([1, 2, 3, 17, 80]),
    has_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_mixtures_are_those_of_torch_and_bits_depend_on_a_row_alone(
    shape: Shape, variant: native.Variant, num_rows: int, has_residual: bool, seed: int
) -> None:
    mixture = Mixture(shape, variant)
    x, scores, residual = random_rows(num_rows, shape, seed)
    added = residual if has_residual else None
    native.set_num_threads(1)
    found = mixture(x, scores, added)
    tolerance = TOLERANCES[shape.dtype]
    torch.testing.assert_close(found, mixture.by_torch(x, scores, added), rtol=tolerance, atol=tolerance)
    if shape.num_active == 1 and not shape.num_shared and shape.router == Router():  # so that no exponential takes part
        assert torch.equal(found, mixture.by_torch(x, scores, added))
    native.set_num_threads(2)
    assert torch.equal(bits(mixture(x, scores, added)), bits(found))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    for rows in ([0], [num_rows - 1], order[:5].tolist()):
        part = mixture(x[rows], scores[rows], residual[rows] if has_residual else None)
        assert torch.equal(bits(part), bits(found[rows]))


@pytest.mark.some(1)
@all_kinds
@pytest.mark.skipif("avx512" not in native.supported_variants(16), reason="this CPU has no AVX-512")
def test_avx2_and_avx512_compute_the_same_bits(dtype: torch.dtype, int8: bool) -> None:
    for router in (
        Router(renormalised=False),
        Router("sigmoid", has_correction=True, scale=2.5),
        Router(has_correction=True, min_sum=1e-12),
        Router(has_factors=True),
    ):
        shape = Shape(19, 17, True, int8, dtype, router, 1, True)  # several vectors, the last ones not whole
        rows = random_rows(9, shape)
        assert torch.equal(bits(Mixture(shape, "avx2")(*rows)), bits(Mixture(shape, "avx512")(*rows)))


@by_variant
@all_kinds
def test_a_sum_of_two_is_rounded_before_the_residual_as_in_torch(
    dtype: torch.dtype, int8: bool, variant: native.Variant
) -> None:
    """With scores whose softmax is exact."""
    mixture = Mixture(Shape(int8=int8, dtype=dtype), variant)
    x, _, residual = random_rows(20, mixture.shape)
    scores = torch.zeros(20, 8).to(dtype)
    for added in (None, residual):
        assert torch.equal(bits(mixture(x, scores, added)), bits(mixture.by_torch(x, scores, added)))


@pytest.mark.parametrize("variant", native.supported_variants(32))
def test_a_sum_for_a_wide_residual_is_not_rounded(variant: native.Variant) -> None:
    mixture = Mixture(Shape(dtype=torch.bfloat16), variant)
    x, scores, residual = random_rows(20, mixture.shape)
    exact = mixture(x, scores, torch.zeros_like(residual, dtype=torch.float32))
    assert torch.equal(exact.bfloat16(), mixture(x, scores))
    assert not torch.equal(exact.bfloat16().float(), exact)
    wide = torch.randn(residual.shape)
    assert torch.equal(mixture(x, scores, wide), wide + exact)


@by_variant
def test_of_equal_scores_the_first_experts_are_chosen(variant: native.Variant) -> None:
    mixture = Mixture(Shape(num_active=3), variant)
    x, _, residual = random_rows(3, mixture.shape)
    tied = torch.tensor([[1.0] * 8, [0.0, 2, 1, 1, 1, 2, 1, 1], [0.0, -0.0, -1, 0, -1, 0, 0, 0]]).bfloat16()
    first = torch.full((3, 8), -INF)
    for row, chosen in enumerate(([0, 1, 2], [1, 2, 5], [0, 1, 3])):
        first[row, chosen] = tied[row, chosen].float()
    assert torch.equal(bits(mixture(x, tied, residual)), bits(mixture(x, first.bfloat16(), residual)))


@by_variant
@all_kinds
def test_a_row_with_nan_is_nan_and_changes_no_other_row(
    dtype: torch.dtype, int8: bool, variant: native.Variant
) -> None:
    mixture = Mixture(Shape(int8=int8, dtype=dtype), variant)
    x, scores, residual = random_rows(40, mixture.shape)
    before = mixture(x, scores, residual)
    spoiled = {
        3: torch.full((8,), NAN),
        5: torch.tensor([NAN, 9, 8, 7, 6, 5, 4, 3]),
        6: torch.tensor([9.0, 8, 7, 6, 5, 4, 3, NAN]),
        7: torch.tensor([9.0, 8, 7, -NAN, -NAN, 4, 3, 1]),
        8: torch.tensor([9.0, 8, INF, 6, 5, 4, 3, 2]),
        9: torch.full((8,), -INF),
    }
    for row, its_scores in spoiled.items():
        scores[row] = its_scores
    x[11] = NAN
    after = mixture(x, scores, residual)
    is_spoiled = torch.zeros(40, dtype=torch.bool)
    is_spoiled[[*spoiled, 11]] = True
    assert after[is_spoiled].isnan().all()
    assert mixture.by_torch(x, scores, residual)[is_spoiled].isnan().all()
    assert torch.equal(bits(after[~is_spoiled]), bits(before[~is_spoiled]))


@by_variant
def test_with_any_router_a_row_with_nan_is_nan(variant: native.Variant) -> None:
    shape = Shape(router=Router("sigmoid", True, num_groups=2, num_active_groups=1, scale=2.0), num_shared=1)
    mixture = Mixture(shape, variant)
    x, scores, residual = random_rows(40, mixture.shape)
    before = mixture(x, scores, residual)
    scores[3], scores[5, 7] = NAN, NAN
    after = mixture(x, scores, residual)
    is_spoiled = torch.zeros(40, dtype=torch.bool)
    is_spoiled[[3, 5]] = True
    assert after[is_spoiled].isnan().all()
    assert mixture.by_torch(x, scores, residual)[is_spoiled].isnan().all()
    assert torch.equal(bits(after[~is_spoiled]), bits(before[~is_spoiled]))


@all_kinds
def test_experts_that_nobody_chose_are_not_multiplied_with(dtype: torch.dtype, int8: bool) -> None:
    mixture = Mixture(Shape(int8=int8, dtype=dtype))
    x, scores, residual = random_rows(20, mixture.shape)
    scores[:, [0, 4, 7]] = -30
    expected = mixture.by_torch(x, scores, residual)
    for idle in (0, 4, 7):
        for linear in mixture.experts[idle]:
            linear.weight.weight = None  # to read it would end the process
    torch.testing.assert_close(mixture(x, scores, residual), expected, rtol=2**-7, atol=2**-7)


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    mixture = Mixture(Shape())
    x, scores, residual = random_rows(2, mixture.shape)
    scores[0] = torch.tensor([0.0] + [-INF] * 7)
    found, expected = mixture(x, scores, residual), mixture.by_torch(x, scores, residual)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7, equal_nan=True)
