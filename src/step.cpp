// One optimizer step, top to bottom: CHECK, then for each chunk of the plan
// ACCUMULATE, ORTHOGONALIZE, REFINE, APPLY, then the elementwise algorithms.
#include <muon/step.h>

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_real.h>

#include "algorithm/hyper.h"
#include "state/codec.h"
#include "step_plan.h"

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

// The tensors of one step beside its plan.
struct Step {
  const StepPlan& plan;
  at::TensorList params;
  const std::vector<at::Tensor>& grads; // undefined: none in this step
  at::TensorList state;
  const at::Tensor& hyper;
  OptionalTensor grad_scale;
  at::Tensor skipped; // int64 a parameter, or undefined

  const at::Tensor& param(std::int64_t i) const {
    return params[static_cast<std::size_t>(i)];
  }
  const at::Tensor& grad(std::int64_t i) const {
    return grads[static_cast<std::size_t>(i)];
  }
  const at::Tensor& state_of(std::int64_t i, std::int64_t slot) const {
    return state[static_cast<std::size_t>(plan.first_state[static_cast<std::size_t>(i)] + slot)];
  }
  bool skips_nonfinite(std::int64_t i) const {
    return plan.spec_of(i).nonfinite == NonFinite::Skip;
  }
  void count_skipped(std::int64_t i, std::int64_t matrices) const {
    if (skipped.defined()) {
      skipped.select(0, i).add_(matrices);
    }
  }
};

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

// A piece of a chunk with a gradient in this step.
struct ActivePiece {
  const MatrixItem* item;
  std::int64_t first;
  std::int64_t count;
};

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

// The views of a chunk's active pieces that its stages work on.
// What the stages see of a chunk: one entry a piece.
struct ChunkViews {
  std::vector<at::Tensor> params, grads; // [batch, rows..., cols..., (2)], real
  std::vector<at::Tensor> state; // every slot of a piece: as above, [batch, rows, 1] or 0-d
  std::vector<std::int64_t> groups;
  std::vector<double> factors;
};

// The matrices of a chunk between ACCUMULATE and APPLY.
struct Workspace {
  at::Tensor all; // [count, rows, cols]
  std::vector<at::Tensor> pieces; // [batch, rows, cols]
  std::vector<at::Tensor> real; // the same in the shapes of ChunkViews::params
  std::vector<std::int64_t> groups; // one a matrix
};

at::Tensor view_state(
    const StateSlot& slot, const at::Tensor& state, const Region& region,
    const ActivePiece& piece) {
  switch (slot.kind) {
    case StateSlot::Kind::LikeParam:
      return region_view(state, region, piece.first, piece.count);
    case StateSlot::Kind::PerRow:
      return row_statistics_view(state, region, piece.first, piece.count);
    case StateSlot::Kind::Step:
      break;
  }
  return state;
}

ChunkViews make_views(const Step& step, const std::vector<ActivePiece>& active) {
  ChunkViews views;
  for (const ActivePiece& piece : active) {
    const std::int64_t param = piece.item->param;
    const Region& region = piece.item->region;
    const auto view = [&](const at::Tensor& tensor) {
      return region_view(tensor, region, piece.first, piece.count);
    };
    views.params.push_back(view(step.param(param)));
    views.grads.push_back(view(step.grad(param).resolve_conj().resolve_neg()));
    const std::vector<StateSlot>& slots = step.plan.slots_of(param);
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      views.state.push_back(view_state(
          slots[slot], step.state_of(param, static_cast<std::int64_t>(slot)), region, piece));
    }
    views.groups.push_back(step.plan.groups[static_cast<std::size_t>(param)]);
    views.factors.push_back(piece.item->factor);
  }
  return views;
}

// Slots first .. last of every piece.
std::vector<at::Tensor> select_slots(
    const ChunkViews& views, std::size_t slots, std::size_t first, std::size_t last) {
  std::vector<at::Tensor> selected;
  for (std::size_t piece = 0; piece < views.params.size(); ++piece) {
    const auto begin = views.state.begin() + static_cast<std::ptrdiff_t>(piece * slots);
    selected.insert(
        selected.end(), begin + static_cast<std::ptrdiff_t>(first),
        begin + static_cast<std::ptrdiff_t>(last));
  }
  return selected;
}

at::Tensor allocate_workspace(const Step& step, const std::vector<ActivePiece>& active) {
  const MatrixItem& item = *active.front().item;
  const at::Tensor& param = step.param(item.param);
  const auto dtype =
      item.region.is_complex ? c10::toComplexType(param.scalar_type()) : param.scalar_type();
  const Iteration iteration = make_iteration(step.plan.spec_of(item.param).orthogonalize, dtype);
  std::int64_t count = 0;
  for (const ActivePiece& piece : active) {
    count += piece.count;
  }
  return at::empty(
      {count, item.region.shape.rows, item.region.shape.cols},
      param.options().requires_grad(false).dtype(
          workspace_dtype(iteration, item.region.is_complex)));
}

// Many small matrices make views the larger part of a step: as few calls for
// each as there can be.
at::Tensor matrices_of(const at::Tensor& all, std::int64_t first, std::int64_t count) {
  return all.as_strided({count, all.size(1), all.size(2)}, all.strides(), first * all.stride(0));
}

at::Tensor real_view(const at::Tensor& matrices, at::IntArrayRef sizes) {
  const at::Tensor real = matrices.is_complex() ? at::view_as_real(matrices) : matrices;
  return real.sizes() == sizes ? real : real.view(sizes);
}

Workspace make_workspace(
    const Step& step, const std::vector<ActivePiece>& active, const ChunkViews& views) {
  Workspace workspace;
  workspace.all = allocate_workspace(step, active);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < active.size(); ++i) {
    const std::int64_t count = active[i].count;
    workspace.pieces.push_back(matrices_of(workspace.all, first, count));
    workspace.real.push_back(real_view(workspace.pieces.back(), views.params[i].sizes()));
    workspace.groups.insert(
        workspace.groups.end(), static_cast<std::size_t>(count), views.groups[i]);
    first += count;
  }
  return workspace;
}

void run_stages(
    const Step& step, const Algorithm& algorithm, const std::vector<ActivePiece>& active,
    const std::string& spec) {
  const ChunkViews views = make_views(step, active);
  if (!algorithm.matrix_update.empty()) {
    call_stage<MatrixUpdate>(
        algorithm.matrix_update, views.params, views.grads, views.state, step.hyper, views.groups,
        views.factors, step.grad_scale, spec);
    return;
  }
  const Workspace matrices = make_workspace(step, active, views);
  const std::size_t slots = algorithm.state.size();
  call_stage<Accumulate>(
      algorithm.accumulate, views.grads, select_slots(views, slots, 0, 1), matrices.real,
      step.hyper, views.groups, step.grad_scale);
  call_stage<Orthogonalize>(
      algorithm.orthogonalize, matrices.all, step.hyper, matrices.groups, spec);
  if (!algorithm.refine.empty()) {
    call_stage<Refine>(
        algorithm.refine, matrices.pieces, select_slots(views, slots, 1, slots), step.hyper,
        views.groups);
  }
  call_stage<Apply>(
      algorithm.apply, views.params, matrices.real, step.hyper, views.groups, views.factors);
}

void run_chunk(const Step& step, const plan::Chunk& chunk) {
  const std::vector<ActivePiece> active = active_pieces(step, chunk);
  if (active.empty()) {
    return;
  }
  const std::int64_t param = active.front().item->param;
  const auto group = static_cast<std::size_t>(step.plan.groups[static_cast<std::size_t>(param)]);
  run_stages(step, step.plan.algorithm_of(param), active, step.plan.spec_texts[group]);
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
  }
  if (!params.empty()) {
    call_stage<Elementwise>(
        run.algorithm->update, params, grads, state, step.hyper, groups, step.grad_scale, run.spec);
  }
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
