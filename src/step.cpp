// One optimizer step, top to bottom: CHECK, then for each chunk of the plan
// ACCUMULATE, ORTHOGONALIZE, REFINE, APPLY, then the elementwise algorithms.
#include <muon/step.h>

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "call_stage.h"
#include "loan.h"
#include "offload.h"
#include "state/codec.h"
#include "step_elementwise.h"
#include "step_views.h"

namespace muon {
namespace detail {
namespace {

void check_grad(const Step& step, std::int64_t i) {
  const at::Tensor& grad = step.grad(i);
  const at::Tensor& param = step.param(i);
  const std::string& name = step.name(i);
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

bool fits(
    const StateTensor& expected, const at::Tensor& state, const at::Tensor& param, bool offload) {
  const bool is_host = offload || expected.kind == StateTensor::Kind::Step;
  if (!state.defined() || state.sizes() != at::IntArrayRef(expected.sizes) ||
      (is_host ? !state.is_cpu() : state.device() != param.device())) {
    return false;
  }
  switch (expected.kind) {
    case StateTensor::Kind::Fixed:
      return state.scalar_type() == expected.dtype;
    case StateTensor::Kind::LikeParam:
      return has_codec(c10::toRealValueType(state.scalar_type())) &&
          state.is_complex() == param.is_complex();
    case StateTensor::Kind::Statistic:
    case StateTensor::Kind::Step:
      break;
  }
  return has_codec(state.scalar_type());
}

void check_state(const Step& step, std::int64_t i) {
  const std::vector<StateTensor>& layout = step.plan.state[static_cast<std::size_t>(i)];
  for (std::size_t position = 0; position < layout.size(); ++position) {
    const at::Tensor& state = step.state_of(i, position);
    TORCH_CHECK_VALUE(
        fits(layout[position], state, step.param(i), step.plan.spec_of(i).offload),
        "muon: expected state \"", layout[position].name, "\" of shape ",
        at::IntArrayRef(layout[position].sizes), ", got ", state.scalar_type(), " ", state.sizes(),
        " on ", state.device(), " (", step.name(i), ")");
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
        " as planned, got ", step.param(i).sizes(), " (", step.name(i), ")");
    if (step.grad(i).defined()) {
      check_grad(step, i);
      check_state(step, i);
    }
  }
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

// One chunk on its way through the stages.
struct ChunkRun {
  const Step& step;
  const Algorithm& algorithm;
  const std::vector<ActivePiece>& active;
  const std::string& spec;
  const ChunkViews& views;
  std::vector<Borrowed> pieces; // for stages of somebody else's
};

std::vector<Borrowed> borrowers(const Step& step, const std::vector<ActivePiece>& active) {
  std::vector<Borrowed> pieces;
  for (const ActivePiece& piece : active) {
    pieces.push_back({&step.name(piece.item->param), &piece.item->region});
  }
  return pieces;
}

// libmuon's own stage reads and writes the stored momentum, codes included.
void accumulate(const ChunkRun& run, const Workspace& matrices) {
  Loan loan(run.algorithm.accumulate, run.pieces);
  const std::vector<StateView> momenta = run.views.slots(0, 1);
  if (loan.is_own()) {
    call_stage<Accumulate>(
        run.algorithm.accumulate, in_block_order(run.step, run.active, run.views.grads),
        stored_state(momenta), in_block_order(run.step, run.active, matrices.real), run.step.hyper,
        run.views.groups, run.step.grad_scale);
    return;
  }
  const PlainState plain(run.step, run.active, momenta);
  call_stage<Accumulate>(
      run.algorithm.accumulate, loan.read(run.views.grads), loan.write(plain.tensors()),
      loan.write(matrices.pieces), run.step.hyper, run.views.groups, run.step.grad_scale);
  loan.take_back();
  plain.store();
}

void orthogonalize(const ChunkRun& run, const Workspace& matrices) {
  Loan loan(run.algorithm.orthogonalize, run.pieces);
  call_stage<Orthogonalize>(
      run.algorithm.orthogonalize, loan.write({matrices.all}).front(), run.step.hyper,
      matrices.groups, run.spec);
  loan.take_back();
}

void refine(const ChunkRun& run, const Workspace& matrices) {
  if (run.algorithm.refine.empty()) {
    return;
  }
  Loan loan(run.algorithm.refine, run.pieces);
  const PlainState plain(run.step, run.active, run.views.slots(1, run.algorithm.state.size()));
  call_stage<Refine>(
      run.algorithm.refine, loan.write(matrices.pieces), loan.write(plain.tensors()),
      run.step.hyper, run.views.groups);
  loan.take_back();
  plain.store();
}

void apply(const ChunkRun& run, const Workspace& matrices) {
  Loan loan(run.algorithm.apply, run.pieces);
  const WideParams params(run.step, run.active, run.views);
  call_stage<Apply>(
      run.algorithm.apply, loan.write(params.tensors()),
      loan.read(loan.is_own() ? matrices.real : matrices.pieces), run.step.hyper, run.views.groups,
      run.views.factors);
  loan.take_back();
  params.store();
}

void update_matrices(const ChunkRun& run) {
  Loan loan(run.algorithm.matrix_update, run.pieces);
  const PlainState plain(run.step, run.active, run.views.state);
  const WideParams params(run.step, run.active, run.views);
  call_stage<MatrixUpdate>(
      run.algorithm.matrix_update, loan.write(params.tensors()), loan.read(run.views.grads),
      loan.write(plain.tensors()), run.step.hyper, run.views.groups, run.views.factors,
      run.step.grad_scale, run.spec);
  loan.take_back();
  plain.store();
  params.store();
}

void run_stages(const ChunkRun& run) {
  if (!run.algorithm.matrix_update.empty()) {
    update_matrices(run);
    return;
  }
  const Workspace matrices = make_workspace(run.step, run.active, run.views);
  accumulate(run, matrices);
  orthogonalize(run, matrices);
  refine(run, matrices);
  apply(run, matrices);
}

// A chunk whose state, if it lives in host memory, is on its way.
struct PreparedChunk {
  std::vector<ActivePiece> active;
  OffloadedViews views;
};

PreparedChunk prepare(const Step& step, const plan::Chunk& chunk) {
  std::vector<ActivePiece> active = active_pieces(step, chunk);
  OffloadedViews views(step, active);
  return {std::move(active), std::move(views)};
}

void run_chunk(const Step& step, PreparedChunk& chunk) {
  if (chunk.active.empty()) {
    return;
  }
  const std::int64_t param = chunk.active.front().item->param;
  const Algorithm& algorithm = step.plan.algorithm_of(param);
  try {
    run_stages(
        {step, algorithm, chunk.active, step.plan.spec_text_of(param), chunk.views.use(),
         borrowers(step, chunk.active)});
    chunk.views.store();
  } catch (c10::Error& error) {
    error.add_context(
        c10::str(
            "in a step of algorithm \"", algorithm.name, "\" on ", step.name(param),
            chunk.active.size() > 1 ? " and others" : ""));
    throw;
  }
}

// The state of the next chunk travels while one is computed.
void run_chunks(const Step& step) {
  const std::vector<plan::Chunk>& chunks = step.plan.plan.chunks;
  if (chunks.empty()) {
    return;
  }
  PreparedChunk next = prepare(step, chunks.front());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    // NOLINTNEXTLINE(bugprone-use-after-move): assigned anew before the next turn
    PreparedChunk current = std::move(next);
    if (i + 1 < chunks.size()) {
      next = prepare(step, chunks[i + 1]);
    }
    run_chunk(step, current);
  }
}

// A matrix algorithm's parameter may be in several chunks, and counts once.
void count_steps(const Step& step) {
  for (const MatrixItem& item : step.plan.items) {
    if (item.ordinal == 0 && step.grad(item.param).defined()) {
      count_step(step, item.param);
    }
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
  detail::StateStreams offload;
  const detail::Step step{*plan, params, grads, state, hyper, scale, skipped, offload};
  detail::check(step);
  if (found_inf.defined() && found_inf.item<double>() != 0.0) {
    return;
  }
  detail::count_steps(step);
  detail::run_chunks(step);
  for (const detail::ElementwiseRun& run : plan->elementwise) {
    detail::run_elementwise(step, run);
  }
  offload.finish();
}

} // namespace muon
