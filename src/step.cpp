// One optimizer step, top to bottom: CHECK, then for each chunk of the plan
// ACCUMULATE, ORTHOGONALIZE, REFINE, APPLY, then the elementwise algorithms.
#include <muon/step.h>

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include "algorithm/hyper.h"
#include "loan.h"
#include "state/codec.h"
#include "step_views.h"

namespace muon {
namespace detail {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A stage is called through the dispatcher, wherever it is written.
template <typename Signature, typename... Args>
void call_stage(const std::string& op, Args&&... args) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(op.c_str(), "")
      .typed<Signature>()
      .call(std::forward<Args>(args)...);
}

using Accumulate = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    const OptionalTensor&);
using Orthogonalize = void(at::Tensor, const at::Tensor&, at::IntArrayRef, std::string_view);
using Refine = void(at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef);
using Apply =
    void(at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef, at::ArrayRef<double>);
using MatrixUpdate = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    at::ArrayRef<double>, const OptionalTensor&, std::string_view);
using Elementwise = void(
    at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, at::IntArrayRef,
    const OptionalTensor&, std::string_view);

void check_grad(const Step& step, std::int64_t i) {
  const at::Tensor& grad = step.grad(i);
  const at::Tensor& param = step.param(i);
  const std::string& name = step.plan.names[static_cast<std::size_t>(i)];
  TORCH_CHECK(
      grad.layout() == c10::kStrided, "Muon does not support sparse gradients, got layout ",
      grad.layout(), " (", name, "); convert it with to_dense()");
  TORCH_CHECK_VALUE(
      grad.sizes() == param.sizes() && grad.device() == param.device() &&
          grad.is_complex() == param.is_complex() &&
          (grad.is_floating_point() || grad.is_complex()),
      "muon: expected a gradient of shape ", param.sizes(), " on ", param.device(),
      " like its parameter, got ", grad.scalar_type(), " ", grad.sizes(), " on ", grad.device(),
      " (", name, ")");
}

void check_state(const Step& step, std::int64_t i) {
  const std::string& name = step.plan.names[static_cast<std::size_t>(i)];
  const std::vector<StateTensor>& layout = step.plan.state[static_cast<std::size_t>(i)];
  for (std::size_t slot = 0; slot < layout.size(); ++slot) {
    const at::Tensor& state = step.state_of(i, static_cast<std::int64_t>(slot));
    TORCH_CHECK_VALUE(
        state.defined() && state.sizes() == at::IntArrayRef(layout[slot].sizes) &&
            has_codec(c10::toRealValueType(state.scalar_type())) &&
            (!layout[slot].like_param || state.is_complex() == step.param(i).is_complex()),
        "muon: expected state \"", layout[slot].name, "\" of shape ",
        at::IntArrayRef(layout[slot].sizes), ", got ", state.scalar_type(), " ", state.sizes(),
        " (", name, ")");
  }
}

// Everything that could fail is asked before anything changes.
void check(const Step& step) {
  const StepPlan& plan = step.plan;
  std::size_t slots = 0;
  for (const std::vector<StateTensor>& layout : plan.state) {
    slots += layout.size();
  }
  TORCH_CHECK_VALUE(
      step.params.size() == plan.sizes.size() && step.grads.size() == plan.sizes.size() &&
          step.state.size() == slots,
      "muon: expected ", plan.sizes.size(), " parameters and gradients and ", slots,
      " state tensors as planned, got ", step.params.size(), ", ", step.grads.size(), " and ",
      step.state.size());
  TORCH_CHECK_VALUE(
      step.hyper.is_cpu() && step.hyper.scalar_type() == at::kDouble &&
          step.hyper.is_contiguous() && step.hyper.dim() == 2 &&
          step.hyper.size(0) >= static_cast<std::int64_t>(plan.specs.size()) &&
          step.hyper.size(1) >= plan.hyper_width,
      "muon: expected hyper as a contiguous float64 CPU tensor [", plan.specs.size(), ", ",
      plan.hyper_width, "], got ", step.hyper.scalar_type(), " ", step.hyper.sizes(), " on ",
      step.hyper.device());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(plan.sizes.size()); ++i) {
    TORCH_CHECK_VALUE(
        step.param(i).sizes() == at::IntArrayRef(plan.sizes[static_cast<std::size_t>(i)]),
        "muon: expected a parameter of shape ", plan.sizes[static_cast<std::size_t>(i)],
        " as planned, got ", step.param(i).sizes(), " (", plan.names[static_cast<std::size_t>(i)],
        ")");
    if (step.grad(i).defined()) {
      check_grad(step, i);
      check_state(step, i);
    }
  }
}

bool is_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor).all().item<bool>();
}

// Splits a piece at the matrices whose gradients are not finite.
void push_finite(
    const Step& step, const MatrixItem& item, const plan::Piece& piece,
    std::vector<ActivePiece>& active) {
  for (std::int64_t i = piece.first; i < piece.first + piece.count; ++i) {
    if (is_finite(region_view(step.grad(item.param), item.region, i, 1))) {
      active.push_back({&item, i, 1});
    } else {
      step.count_skipped(item.param, 1);
    }
  }
}

std::vector<ActivePiece> active_pieces(const Step& step, const plan::Chunk& chunk) {
  std::vector<ActivePiece> active;
  for (const plan::Piece& piece : chunk.pieces) {
    const MatrixItem& item = step.plan.items[static_cast<std::size_t>(piece.item)];
    if (!step.grad(item.param).defined()) {
      continue;
    }
    if (step.skips_nonfinite(item.param) &&
        !is_finite(region_view(step.grad(item.param), item.region, piece.first, piece.count))) {
      push_finite(step, item, piece, active);
    } else {
      active.push_back({&item, piece.first, piece.count});
    }
  }
  return active;
}

std::vector<Borrowed> borrowers(const Step& step, const std::vector<ActivePiece>& active) {
  std::vector<Borrowed> pieces;
  for (const ActivePiece& piece : active) {
    pieces.push_back(
        {&step.plan.names[static_cast<std::size_t>(piece.item->param)], &piece.item->region});
  }
  return pieces;
}

void accumulate(
    const Step& step, const Algorithm& algorithm, const std::vector<Borrowed>& pieces,
    const ChunkViews& views, const Workspace& matrices) {
  Loan loan(algorithm.accumulate, pieces);
  call_stage<Accumulate>(
      algorithm.accumulate, loan.read(views.grads),
      loan.write(select_slots(views, algorithm.state.size(), 0, 1)),
      loan.write(loan.is_own() ? matrices.real : matrices.pieces), step.hyper, views.groups,
      step.grad_scale);
  loan.take_back();
}

void orthogonalize(
    const Step& step, const Algorithm& algorithm, const std::vector<Borrowed>& pieces,
    const Workspace& matrices, const std::string& spec) {
  Loan loan(algorithm.orthogonalize, pieces);
  call_stage<Orthogonalize>(
      algorithm.orthogonalize, loan.write({matrices.all}).front(), step.hyper, matrices.groups,
      spec);
  loan.take_back();
}

void refine(
    const Step& step, const Algorithm& algorithm, const std::vector<Borrowed>& pieces,
    const ChunkViews& views, const Workspace& matrices) {
  if (algorithm.refine.empty()) {
    return;
  }
  Loan loan(algorithm.refine, pieces);
  const std::size_t slots = algorithm.state.size();
  call_stage<Refine>(
      algorithm.refine, loan.write(matrices.pieces),
      loan.write(select_slots(views, slots, 1, slots)), step.hyper, views.groups);
  loan.take_back();
}

void apply(
    const Step& step, const Algorithm& algorithm, const std::vector<Borrowed>& pieces,
    const ChunkViews& views, const Workspace& matrices) {
  Loan loan(algorithm.apply, pieces);
  call_stage<Apply>(
      algorithm.apply, loan.write(views.params),
      loan.read(loan.is_own() ? matrices.real : matrices.pieces), step.hyper, views.groups,
      views.factors);
  loan.take_back();
}

void update_matrices(
    const Step& step, const Algorithm& algorithm, const std::vector<Borrowed>& pieces,
    const ChunkViews& views, const std::string& spec) {
  Loan loan(algorithm.matrix_update, pieces);
  call_stage<MatrixUpdate>(
      algorithm.matrix_update, loan.write(views.params), loan.read(views.grads),
      loan.write(views.state), step.hyper, views.groups, views.factors, step.grad_scale, spec);
  loan.take_back();
}

void run_stages(
    const Step& step, const Algorithm& algorithm, const std::vector<ActivePiece>& active,
    const std::string& spec) {
  const ChunkViews views = make_views(step, active);
  const std::vector<Borrowed> pieces = borrowers(step, active);
  if (!algorithm.matrix_update.empty()) {
    update_matrices(step, algorithm, pieces, views, spec);
    return;
  }
  const Workspace matrices = make_workspace(step, active, views);
  accumulate(step, algorithm, pieces, views, matrices);
  orthogonalize(step, algorithm, pieces, matrices, spec);
  refine(step, algorithm, pieces, views, matrices);
  apply(step, algorithm, pieces, views, matrices);
}

void run_chunk(const Step& step, const plan::Chunk& chunk) {
  const std::vector<ActivePiece> active = active_pieces(step, chunk);
  if (active.empty()) {
    return;
  }
  const std::int64_t param = active.front().item->param;
  const auto group = static_cast<std::size_t>(step.plan.groups[static_cast<std::size_t>(param)]);
  const Algorithm& algorithm = step.plan.algorithm_of(param);
  try {
    run_stages(step, algorithm, active, step.plan.spec_texts[group]);
  } catch (c10::Error& error) {
    error.add_context(
        c10::str(
            "in a step of algorithm \"", algorithm.name, "\" on ",
            step.plan.names[static_cast<std::size_t>(param)],
            active.size() > 1 ? " and others" : ""));
    throw;
  }
}

// A matrix algorithm's parameter may be in several chunks: its steps are
// counted here, once.
void count_steps(const Step& step) {
  for (const MatrixItem& item : step.plan.items) {
    const std::vector<StateSlot>& slots = step.plan.slots_of(item.param);
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot].kind == StateSlot::Kind::Step && item.is_first &&
          step.grad(item.param).defined()) {
        step.state_of(item.param, static_cast<std::int64_t>(slot)).add_(1);
      }
    }
  }
}

void run_elementwise(const Step& step, const ElementwiseRun& run) {
  std::vector<at::Tensor> params, grads, state;
  std::vector<std::int64_t> groups;
  std::vector<Borrowed> wholes;
  for (const std::int64_t i : run.params) {
    if (!step.grad(i).defined()) {
      continue;
    }
    if (step.skips_nonfinite(i) && !is_finite(step.grad(i))) {
      step.count_skipped(i, 1);
      continue;
    }
    params.push_back(step.param(i));
    grads.push_back(step.grad(i).resolve_conj().resolve_neg());
    for (std::size_t slot = 0; slot < step.plan.slots_of(i).size(); ++slot) {
      state.push_back(step.state_of(i, static_cast<std::int64_t>(slot)));
    }
    groups.push_back(step.plan.groups[static_cast<std::size_t>(i)]);
    wholes.push_back({&step.plan.names[static_cast<std::size_t>(i)], nullptr});
  }
  if (params.empty()) {
    return;
  }
  Loan loan(run.algorithm->update, wholes);
  call_stage<Elementwise>(
      run.algorithm->update, loan.write(params), loan.read(grads), loan.write(state), step.hyper,
      groups, step.grad_scale, run.spec);
  loan.take_back();
}

} // namespace
} // namespace detail

void step_(
    PlanHandle handle, at::TensorList params, const std::vector<at::Tensor>& grads,
    at::TensorList state, const at::Tensor& hyper, const at::Tensor& grad_scale,
    const at::Tensor& found_inf, const at::Tensor& skipped) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto plan = detail::find_plan(handle);
  const auto scale = grad_scale.defined() ? std::optional(grad_scale) : std::nullopt;
  const detail::Step step{*plan, params, grads, state, hyper, scale, skipped};
  detail::check(step);
  if (found_inf.defined() && found_inf.item<double>() != 0.0) {
    return;
  }
  detail::count_steps(step);
  for (const plan::Chunk& chunk : plan->plan.chunks) {
    detail::run_chunk(step, chunk);
  }
  for (const detail::ElementwiseRun& run : plan->elementwise) {
    detail::run_elementwise(step, run);
  }
}

} // namespace muon
