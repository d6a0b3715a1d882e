"""Products by oneDNN: the same numbers and gradients as torch's own, and only where they are meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlhub.models import products
from rlhub.models.products import FastLinear, linear, matmul, onednn_is_faster, use_fast_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

ROWS, INPUTS, OUTPUTS = 128, 96, 176  # with gradients, of a few more multiplications than the smallest that oneDNN gets
TOLERANCE = 1e-6  # float32 has 6e-8 a number
RESULTS = ("product", "inputs", "weight", "bias")

Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second column": lambda tensor: torch.stack([tensor, tensor + 1], -1).flatten(-2)[..., ::2],
    "some columns of wider rows": lambda tensor: torch.cat([tensor, tensor + 1], -1)[..., : tensor.shape[-1]],
    "off alignment": lambda tensor: torch.cat([tensor.new_ones(1), tensor.flatten()])[1:].view_as(tensor),
    "equal rows": lambda tensor: tensor[..., :1, :].expand_as(tensor),
    "equal columns": lambda tensor: tensor[..., :1].expand_as(tensor),
}
SHAPES = {"2-D": (ROWS,), "3-D": (4, ROWS // 4), "4-D": (2, 2, ROWS // 4)}


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the first factors that oneDNN has got so far."""
    seen: list[tuple[int, ...]] = []
    onednn = products._onednn

    def spy(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(inputs.shape))
        return onednn(inputs, weight, bias)

    monkeypatch.setattr(products, "_onednn", spy)
    return seen


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, in L2."""
    assert found.shape == expected.shape
    exact = expected.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


class Operands(NamedTuple):
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None


def operands(*sizes: int, bias: bool = True) -> Operands:
    return Operands(draw(*sizes, INPUTS), draw(OUTPUTS, INPUTS, seed=1), draw(OUTPUTS, seed=2) if bias else None)


def leaves(given: Operands, trained: str = "inputs weight bias", dtype: torch.dtype = torch.float32) -> Operands:
    """Copies in the same layout, of which those named in `trained` want a gradient."""
    copies = [None if tensor is None else tensor.detach().clone().to(dtype) for tensor in given]
    for name, tensor in zip(Operands._fields, copies, strict=True):
        if tensor is not None:
            tensor.requires_grad_(name in trained)
    return Operands(*copies)  # type: ignore[arg-type]


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def results(multiply: Multiply, tensors: Operands, upstream: Layout) -> dict[str, Tensor]:
    """The product and all gradients under `RESULTS`' names; `upstream` lays out the gradient that the product gets."""
    product = multiply(*tensors)
    product.backward(upstream(draw(*product.shape, seed=3)).to(product.dtype))
    grads = [None if tensor is None else tensor.grad for tensor in tensors]
    return {name: value for name, value in zip(RESULTS, (product.detach(), *grads), strict=True) if value is not None}


def check_results(multiply: Multiply, given: Operands, trained: str = "inputs weight bias", upstream: str = "contiguous") -> None:
    found = results(multiply, leaves(given, trained), LAYOUTS[upstream])
    expected = results(functional.linear, leaves(given, trained, torch.float64), LAYOUTS[upstream])
    assert found.keys() == expected.keys()
    errors = {name: error(value, expected[name]) for name, value in found.items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.fixture(scope="module")
def distributed_weight() -> Iterator[DTensor]:
    """(OUTPUTS, INPUTS), on this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DTensor.from_local(draw(OUTPUTS, INPUTS), init_device_mesh("cpu", (1,)), [Replicate()])
    finally:
        dist.destroy_process_group()


class TestProduct:
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
    def test_linear(self, calls: list[tuple[int, ...]], sizes: tuple[int, ...], bias: bool) -> None:
        given = operands(*sizes, bias=bias)
        found = linear(*given)
        expected = functional.linear(*(None if tensor is None else tensor.double() for tensor in given))
        assert error(found, expected) <= TOLERANCE
        assert torch.equal(linear(*given), found)
        assert calls == [(*sizes, INPUTS)] * 2

    def test_the_error_finds_less_exact_products(self) -> None:
        given = operands(ROWS, bias=False)
        assert error(given.inputs.bfloat16() @ given.weight.t().bfloat16(), given.inputs @ given.weight.t()) > 1e3 * TOLERANCE

    @pytest.mark.parametrize("of_weight", LAYOUTS)
    @pytest.mark.parametrize("of_inputs", LAYOUTS)
    def test_any_layout(self, calls: list[tuple[int, ...]], of_inputs: str, of_weight: str) -> None:
        inputs, weight = LAYOUTS[of_inputs](draw(ROWS, INPUTS)), LAYOUTS[of_weight](draw(OUTPUTS, INPUTS, seed=1))
        expected = inputs.double() @ weight.double().t()
        for found in (linear(inputs, weight), matmul(inputs, weight.t()), matmul(weight, inputs.t()).t()):
            assert error(found, expected) <= TOLERANCE
        assert len(calls) == 3

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_weights_with_gaps_are_copied_before(self, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
        """oneDNN would take 24 ms for this product instead of 0.04."""
        got: list[Tensor] = []
        operator = torch.ops.mkldnn._linear_pointwise
        spy: Callable[..., Tensor] = lambda inputs, weight, *others: got.append(weight) or operator(inputs, weight, *others)  # noqa: E731
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
        weight = LAYOUTS[layout](draw(OUTPUTS, INPUTS))
        linear(draw(ROWS, INPUTS), weight)
        dense = layout in ("contiguous", "off alignment", "transposed")
        assert (got[0] is weight) == dense
        assert got[0].is_contiguous() or got[0].t().is_contiguous()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_layout_in_3d(self, calls: list[tuple[int, ...]], layout: str) -> None:
        given = operands(4, ROWS // 4)
        given = given._replace(inputs=LAYOUTS[layout](given.inputs))
        assert error(linear(*given), functional.linear(*(tensor.double() for tensor in given))) <= TOLERANCE
        assert len(calls) == 1

    @pytest.mark.parametrize("layout", ["every second number", "equal numbers"])
    def test_any_layout_of_the_bias(self, layout: str) -> None:
        given = operands(ROWS)
        bias = {"every second number": draw(2 * OUTPUTS)[::2], "equal numbers": draw(1).expand(OUTPUTS)}[layout]
        expected = functional.linear(given.inputs.double(), given.weight.double(), bias.double())
        assert error(linear(given.inputs, given.weight, bias), expected) <= TOLERANCE

    @pytest.mark.parametrize(("rows", "inner", "columns"), [(8, 2048, 512), (2048, 512, 8), (2048, 1, 1024)])
    def test_thin_factors(self, calls: list[tuple[int, ...]], rows: int, inner: int, columns: int) -> None:
        one, other = draw(rows, inner), draw(inner, columns, seed=1)
        assert error(matmul(one, other), one.double() @ other.double()) <= TOLERANCE
        assert error(matmul(other.t(), one.t()).t(), one.double() @ other.double()) <= TOLERANCE
        assert len(calls) == 2

    def test_sizes_that_do_not_match_are_refused(self, calls: list[tuple[int, ...]]) -> None:
        given = operands(ROWS)
        for inputs, bias in ((draw(ROWS, INPUTS + 1), given.bias), (given.inputs, draw(OUTPUTS - 1))):
            with pytest.raises(RuntimeError):
                linear(inputs, given.weight, bias)
        assert len(calls) == 2


class TestGradient:
    @pytest.mark.parametrize("upstream", LAYOUTS)
    @pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
    def test_of_everything(self, calls: list[tuple[int, ...]], sizes: tuple[int, ...], upstream: str) -> None:
        check_results(linear, operands(*sizes), upstream=upstream)
        assert len(calls) == 3

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("trained", ["inputs", "weight", "inputs weight"])
    @pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
    def test_of_some(self, calls: list[tuple[int, ...]], sizes: tuple[int, ...], trained: str, bias: bool) -> None:
        check_results(linear, operands(*sizes, bias=bias), trained=trained)
        assert len(calls) == 1 + len(trained.split())

    def test_of_the_bias_alone(self, calls: list[tuple[int, ...]]) -> None:
        check_results(linear, operands(4, ROWS // 4), trained="bias")
        assert len(calls) == 1

    def test_of_a_sum_and_of_a_transposed_product(self) -> None:
        for loss in (Tensor.sum, lambda product: product.transpose(0, 1).flatten()[:-1].square().sum()):
            mine, exact = leaves(operands(4, ROWS // 4)), leaves(operands(4, ROWS // 4), dtype=torch.float64)
            loss(linear(*mine)).backward()
            loss(functional.linear(*exact)).backward()
            for found, expected in zip(mine, exact, strict=True):
                assert error(found.grad, expected.grad) <= TOLERANCE

    def test_of_strided_weights_and_inputs(self) -> None:
        strided = operands(4, ROWS // 4)
        strided = strided._replace(inputs=LAYOUTS["transposed"](strided.inputs), weight=LAYOUTS["transposed"](strided.weight))
        assert not any(tensor.is_contiguous() for tensor in leaves(strided)[:2])
        check_results(linear, strided)

    def test_under_checkpointing(self, calls: list[tuple[int, ...]]) -> None:
        recomputed: Multiply = lambda *tensors: checkpoint(linear, *tensors, use_reentrant=False)  # noqa: E731
        check_results(recomputed, operands(4, ROWS // 4))
        assert len(calls) == 4  # forward, forward again, and two gradients
        plain, again = (results(multiply, leaves(operands(ROWS)), lambda grad: grad) for multiply in (linear, recomputed))
        assert all(torch.equal(plain[name], again[name]) for name in RESULTS)

    def test_accumulates(self) -> None:
        mine, exact = leaves(operands(ROWS)), leaves(operands(ROWS), dtype=torch.float64)
        for _ in range(2):
            found = results(linear, mine, lambda grad: grad)
            expected = results(functional.linear, exact, lambda grad: grad)
        once = results(linear, leaves(operands(ROWS)), lambda grad: grad)
        for name in RESULTS[1:]:
            assert error(found[name], expected[name]) <= TOLERANCE
            assert torch.equal(found[name], 2 * once[name])

    def test_twice_through_one_graph(self) -> None:
        mine = leaves(operands(ROWS))
        product = linear(*mine)
        product.backward(torch.ones_like(product), retain_graph=True)
        once = mine.weight.grad.clone()
        product.backward(torch.ones_like(product))
        assert torch.equal(mine.weight.grad, 2 * once)

    def test_of_a_gradient_is_refused(self) -> None:
        """For it would be zero."""
        mine = leaves(operands(ROWS))
        (grad,) = torch.autograd.grad(linear(*mine).square().sum(), mine.inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.square().sum().backward()

    @pytest.mark.parametrize("trained", ["inputs", "weight", "bias", "inputs weight bias"])
    def test_keeps_what_torch_keeps(self, trained: str) -> None:
        """A frozen weight's inputs are memory that a step of training low-rank adapters does not need."""
        mine = leaves(operands(ROWS), trained)
        kept: list[set[int]] = []
        for multiply in (linear, functional.linear):
            with saved_tensors_hooks(lambda tensor: kept[-1].add(tensor.data_ptr()) or tensor, lambda tensor: tensor):
                kept.append(set())
                multiply(*mine)
        assert kept[0] == kept[1]

    def test_nothing_is_kept_without_gradients(self) -> None:
        mine = leaves(operands(ROWS))
        assert linear(*mine).requires_grad
        with torch.no_grad():
            assert not linear(*mine).requires_grad
        assert not linear(*leaves(operands(ROWS), "")).requires_grad


class TestOtherSizes:
    """Numbers of rows that differ from batch to batch: oneDNN keeps code for each that it meets."""

    def test_rounded_up(self) -> None:
        numbers = range(1, 2**15 + 1)
        rounded = [products._rounded_up(number) for number in numbers]
        assert rounded[:64] == list(range(1, 65))
        assert all(number <= found <= 1.125 * number for number, found in zip(numbers, rounded, strict=True))
        assert len(set(rounded[64:])) == 9 * 8
        assert all(products._rounded_up(found) == found for found in rounded)

    @pytest.mark.parametrize("upstream", LAYOUTS)
    @pytest.mark.parametrize("sizes", [(513,), (701,), (3, 211), (2, 3, 103)], ids=str)
    def test_results(self, sizes: tuple[int, ...], upstream: str) -> None:
        check_results(linear, operands(*sizes), upstream=upstream)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_results_of_other_layouts(self, layout: str) -> None:
        given = operands(701)
        inputs = LAYOUTS[layout](given.inputs)
        exact = functional.linear(inputs.double(), given.weight.double(), given.bias.double())
        assert error(linear(inputs, given.weight, given.bias), exact) <= TOLERANCE
        grads = LAYOUTS[layout](draw(701, OUTPUTS, seed=3))
        exact = grads.double().t() @ inputs.double()
        tolerance = 5 * TOLERANCE if layout == "equal rows" else TOLERANCE  # whose roundings add up
        assert error(products.weight_gradient(grads, inputs), exact) <= tolerance

    def test_unused_rows_are_zeros(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A gradient of weights sums over them, whatever the memory held before."""
        monkeypatch.setattr(Tensor, "new_empty", lambda tensor, *sizes: tensor.new_full(sizes, torch.nan))
        check_results(linear, operands(701))

    def test_few_sizes_are_met(self, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 450 numbers of rows in three products each."""
        met: set[tuple[int, ...]] = set()
        operator = torch.ops.mkldnn._linear_pointwise
        spy: Callable[..., Tensor] = lambda *given: met.add((*given[0].shape, *given[1].shape)) or operator(*given)  # noqa: E731
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
        for rows in range(550, 1000):
            results(linear, leaves(operands(rows)), lambda grad: grad)
        assert len(calls) == 3 * 450 and len(met) <= 3 * 8, met

    def test_nothing_is_copied_for_sizes_that_are_met(
        self, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Tensor, "new_empty", lambda *_: pytest.fail("a copy is made"))
        for sizes in ((512,), (640,), (4, 256), (8, 13, 64)):
            check_results(linear, operands(*sizes))
        assert len(calls) == 12
        with pytest.raises(pytest.fail.Exception, match="a copy"):
            linear(*operands(513))


class TestChoice:
    def test_large_products(self, calls: list[tuple[int, ...]]) -> None:
        linear(draw(128, 128), draw(128, 128))
        linear(draw(8, 16, 128), draw(128, 128))
        matmul(draw(128, 128), draw(128, 128))
        assert calls == [(128, 128), (8, 16, 128), (128, 128)]

    def test_small_products(self, calls: list[tuple[int, ...]]) -> None:
        for rows, inner, columns in ((127, 128, 128), (128, 127, 128), (128, 128, 127), (0, 128, 128), (128, 0, 128)):
            one, other = draw(rows, inner), draw(inner, columns)
            assert torch.equal(linear(one, other.t()), functional.linear(one, other.t()))
            assert torch.equal(matmul(one, other), one @ other)
        assert not calls

    @pytest.mark.parametrize(("rows", "columns"), [(7, 4096), (4096, 7)])
    def test_few_rows(self, calls: list[tuple[int, ...]], rows: int, columns: int) -> None:
        one, other = draw(rows, 128), draw(128, columns)
        assert torch.equal(linear(one, other.t()), functional.linear(one, other.t()))
        assert not calls
        linear(draw(max(rows, 8), 128), draw(max(columns, 8), 128))
        assert len(calls) == 1

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_other_dtypes(self, calls: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        mine, torchs = leaves(operands(ROWS), dtype=dtype), leaves(operands(ROWS), dtype=dtype)
        found = results(linear, mine, lambda grad: grad)
        expected = results(functional.linear, torchs, lambda grad: grad)
        assert all(torch.equal(found[name], expected[name]) for name in RESULTS)
        assert torch.equal(matmul(mine.inputs, mine.weight.t()), mine.inputs @ mine.weight.t())
        assert not calls

    def test_two_dtypes_are_refused_as_by_torch(self, calls: list[tuple[int, ...]]) -> None:
        given = operands(ROWS)
        for inputs, weight in ((given.inputs, given.weight.double()), (given.inputs.double(), given.weight)):
            with pytest.raises(RuntimeError, match="dtype"):
                linear(inputs, weight)
        assert not calls

    def test_autocast(self, calls: list[tuple[int, ...]]) -> None:
        given = leaves(operands(ROWS))
        with torch.autocast("cpu", torch.bfloat16):
            found = results(linear, given, lambda grad: grad)
            assert torch.equal(found["product"], functional.linear(*given))
            assert matmul(given.inputs, given.weight.t()).dtype == torch.bfloat16
        assert found["product"].dtype == torch.bfloat16 and not calls
        with torch.autocast("cpu", enabled=False):
            assert linear(*given).dtype == torch.float32
        assert len(calls) == 1

    def test_other_devices(self, calls: list[tuple[int, ...]]) -> None:
        given = Operands(*(tensor.to("meta") for tensor in operands(ROWS)))
        assert linear(*given).device.type == matmul(given.inputs, given.weight.t()).device.type == "meta"
        assert not calls

    def test_distributed_weights(self, calls: list[tuple[int, ...]], distributed_weight: DTensor) -> None:
        inputs = DTensor.from_local(draw(ROWS, INPUTS), distributed_weight.device_mesh, [Replicate()])
        product = linear(inputs, nn.Parameter(distributed_weight))
        assert isinstance(product, DTensor) and not calls
        linear(inputs.to_local(), nn.Parameter(distributed_weight.to_local()))
        assert len(calls) == 1

    def test_slower_processors(self, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
        given = operands(ROWS)
        assert torch.equal(linear(*given), functional.linear(*given))
        assert torch.equal(matmul(given.inputs, given.weight.t()), given.inputs @ given.weight.t())
        assert not calls


class OtherLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def model() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.ModuleDict({"gate": nn.Linear(INPUTS, INPUTS, bias=False), "norm": nn.LayerNorm(INPUTS)})
    return nn.ModuleList([nn.Linear(INPUTS, OUTPUTS), OtherLinear(INPUTS, OUTPUTS), inner])


class TestLayers:
    def test_plain_linear_layers_alone_change(self, calls: list[tuple[int, ...]]) -> None:
        changed, untouched = model(), model()
        use_fast_products(changed)
        types = {name: type(module) for name, module in changed.named_modules()}
        expected = {name: type(module) for name, module in untouched.named_modules()}
        assert expected["0"] is expected["2.gate"] is nn.Linear
        assert types == expected | {"0": FastLinear, "2.gate": FastLinear}
        assert all(isinstance(changed.get_submodule(name), nn.Linear) for name in ("0", "1", "2.gate"))
        inputs = draw(2, ROWS, INPUTS)
        assert torch.equal(changed[1](inputs), untouched[1](inputs)) and not calls
        for name in ("0", "2.gate"):
            assert error(changed.get_submodule(name)(inputs), untouched.get_submodule(name)(inputs)) <= TOLERANCE
        assert len(calls) == 2

    def test_a_slower_processor_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
        unchanged = model()
        use_fast_products(unchanged)
        assert [type(module) for module in unchanged.modules()] == [type(module) for module in model().modules()]

    def test_parameters_stay(self) -> None:
        changed = model()
        names, parameters = list(changed.state_dict()), list(changed.parameters())
        use_fast_products(changed)
        use_fast_products(changed)
        assert list(changed.state_dict()) == names
        assert all(now is before for now, before in zip(changed.parameters(), parameters, strict=True))
        changed.load_state_dict(model().state_dict())

    def test_weights_given_later_are_read(self, calls: list[tuple[int, ...]]) -> None:
        layer = model()[0]
        use_fast_products(layer)
        inputs, before = draw(ROWS, INPUTS), layer(draw(ROWS, INPUTS))
        layer.weight.data, layer.bias.data = draw(OUTPUTS, 2 * INPUTS, seed=5)[:, ::2], draw(OUTPUTS, seed=6)
        after = layer(inputs)
        expected = functional.linear(inputs.double(), layer.weight.double(), layer.bias.double())
        assert error(after, expected) <= TOLERANCE < error(before, expected)
        with torch.no_grad():
            layer.weight.zero_()
        assert torch.equal(layer(inputs), layer.bias.expand(ROWS, OUTPUTS))
        assert len(calls) == 3

    def test_a_layer_learns_as_a_plain_one(self) -> None:
        """Ten steps of gradient descent end at the same weights."""
        ends = []
        for fast in (True, False):
            layer = model()[0] if fast else model()[0].double()
            if fast:
                use_fast_products(layer)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
            for step in range(10):
                optimizer.zero_grad()
                layer(draw(ROWS, INPUTS, seed=step).to(layer.weight.dtype)).square().mean().backward()
                optimizer.step()
            ends.append(layer.weight)
        assert error(*ends) <= TOLERANCE < 1e-2 < error(ends[0], model()[0].weight)


class TestProcessor:
    @pytest.fixture(autouse=True)
    def amd_with_avx512(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A processor that oneDNN is faster on, as long as a test changes nothing."""
        path = tmp_path / "cpuinfo"
        path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n\nprocessor\t: 1\nvendor_id\t: AuthenticAMD\n")
        monkeypatch.setattr(products, "CPU_INFO", path)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        for library in (torch.backends.mkl, torch.backends.mkldnn):
            monkeypatch.setattr(library, "is_available", lambda: True)
        return path

    def decision(self) -> bool:
        return onednn_is_faster.__wrapped__()

    def test_amd_with_avx512(self) -> None:
        assert self.decision() is True

    def test_intel(self, amd_with_avx512: Path) -> None:
        amd_with_avx512.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\n")
        assert self.decision() is False

    @pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
    def test_without_avx512(self, monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        assert self.decision() is False

    def test_where_nothing_tells_the_vendor(self, amd_with_avx512: Path) -> None:
        amd_with_avx512.unlink()
        assert self.decision() is False

    @pytest.mark.parametrize("library", ["mkl", "mkldnn"])
    def test_without_one_of_the_libraries(self, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
        monkeypatch.setattr(getattr(torch.backends, library), "is_available", lambda: False)
        assert self.decision() is False

    def test_decides_once(self, amd_with_avx512: Path) -> None:
        onednn_is_faster.cache_clear()
        try:
            assert onednn_is_faster() is True
            amd_with_avx512.write_text("vendor_id\t: GenuineIntel\n")
            assert onednn_is_faster() is True and self.decision() is False
        finally:
            onednn_is_faster.cache_clear()
