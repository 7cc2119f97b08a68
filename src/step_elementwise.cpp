#include "step_elementwise.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ops/view_as_complex.h>

#include "call_stage.h"
#include "loan.h"
#include "offload.h"

namespace muon::detail {
namespace {

// Parameters that need no copies are updated in one call.
void update_stored(
    const Step& step, const ElementwiseRun& run, const std::vector<std::int64_t>& params) {
  if (params.empty()) {
    return;
  }
  std::vector<at::Tensor> tensors, grads, state;
  std::vector<std::int64_t> groups;
  std::vector<Borrowed> wholes;
  for (const std::int64_t i : params) {
    tensors.push_back(step.param(i));
    grads.push_back(step.grad(i).resolve_conj().resolve_neg());
    for (const SlotPlace& slot : step.plan.slots_of(i)) {
      state.push_back(step.state_of(i, slot.position));
    }
    groups.push_back(step.group(i));
    wholes.push_back({&step.name(i), nullptr, true});
  }
  Loan loan(run.algorithm->update, wholes);
  call_stage<Elementwise>(
      run.algorithm->update, loan.write(tensors), loan.read(grads), loan.write(state), step.hyper,
      groups, step.grad_scale, run.spec);
  loan.take_back();
}

// Values of a parameter that are decoded or widened at a time.
constexpr std::int64_t kSlice = 512 * 1024;

// libmuon's own algorithms are blind to where a parameter is cut, along its
// first dim; others get all of it.
std::vector<MatrixItem> slices_of(const Step& step, std::int64_t param, bool is_own) {
  const at::Tensor& tensor = step.param(param);
  const Region whole = whole_region(tensor.sizes(), tensor.is_complex());
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  const std::int64_t length = tensor.numel() / std::max<std::int64_t>(rows, 1);
  const std::int64_t at_once =
      is_own ? std::max<std::int64_t>(1, kSlice / std::max<std::int64_t>(length, 1)) : rows;
  std::vector<MatrixItem> slices;
  for (std::int64_t row = 0; row < rows; row += at_once) {
    slices.push_back({param, whole, 1.0, 0, row * length});
    if (rows > at_once) {
      slices.back().region.start[0] = row;
      slices.back().region.sizes[0] = std::min(at_once, rows - row);
    }
  }
  return slices;
}

// A view of a whole parameter, or of its state, in the parameter's own dims.
at::Tensor as_parameter(const at::Tensor& view, const at::Tensor& param) {
  if (view.dim() == 0) {
    return view;
  }
  const at::Tensor whole = view.squeeze(0);
  return param.is_complex() && whole.dim() > param.dim() ? at::view_as_complex(whole) : whole;
}

std::vector<at::Tensor> as_parameters(std::vector<at::Tensor> views, const at::Tensor& param) {
  for (at::Tensor& view : views) {
    view = as_parameter(view, param);
  }
  return views;
}

// A slice whose state, if it lives in host memory, is on its way.
struct PreparedSlice {
  MatrixItem item;
  std::vector<ActivePiece> active;
  std::optional<OffloadedViews> views;
};

// On the heap, since `active` points to `item`.
std::unique_ptr<PreparedSlice> prepare(const Step& step, const MatrixItem& item) {
  auto slice = std::make_unique<PreparedSlice>();
  slice->item = item;
  slice->active = {{&slice->item, 0, 1}};
  slice->views.emplace(step, slice->active);
  return slice;
}

// libmuon's own stage reads and writes codes.
void update_own(const Step& step, const ElementwiseRun& run, PreparedSlice& slice) {
  const ChunkViews& views = slice.views->use();
  const WideParams params(step, slice.active, views);
  // As a float32 parameter's, so that the same loop takes them.
  const at::Tensor grad = views.grads[0].to(params.tensors()[0].scalar_type());
  call_stage<Elementwise>(
      run.algorithm->update, params.tensors(), std::vector<at::Tensor>{grad},
      stored_state(views.state), step.hyper, views.groups, step.grad_scale, run.spec);
  params.store();
  slice.views->store();
}

void update_on_copies(const Step& step, const ElementwiseRun& run, PreparedSlice& slice) {
  const ChunkViews& views = slice.views->use();
  const WideParams params(step, slice.active, views);
  const PlainState state(step, slice.active, views.state);
  const at::Tensor& param = step.param(slice.item.param);
  const std::vector<Borrowed> pieces{{&step.name(slice.item.param), nullptr}};
  Loan loan(run.algorithm->update, pieces);
  call_stage<Elementwise>(
      run.algorithm->update, loan.write(as_parameters(params.tensors(), param)),
      loan.read(as_parameters(views.grads, param)),
      loan.write(as_parameters(state.tensors(), param)), step.hyper, views.groups, step.grad_scale,
      run.spec);
  loan.take_back();
  state.store();
  params.store();
  slice.views->store();
}

// The state of the next slice travels while one is updated.
void update_slices(
    const Step& step, const ElementwiseRun& run, const std::vector<MatrixItem>& slices) {
  std::unique_ptr<PreparedSlice> next = slices.empty() ? nullptr : prepare(step, slices.front());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const std::unique_ptr<PreparedSlice> current = std::move(next);
    if (i + 1 < slices.size()) {
      next = prepare(step, slices[i + 1]);
    }
    is_own_stage(run.algorithm->update) ? update_own(step, run, *current)
                                        : update_on_copies(step, run, *current);
  }
}

} // namespace

void run_elementwise(const Step& step, const ElementwiseRun& run) {
  std::vector<std::int64_t> stored;
  std::vector<MatrixItem> slices;
  for (const std::int64_t i : run.params) {
    if (!step.grad(i).defined()) {
      continue;
    }
    if (step.skips_nonfinite(i) && !is_finite(step.grad(i))) {
      step.count_skipped(i, 1);
      continue;
    }
    count_step(step, i);
    const RoundingPlace& rounding = step.plan.rounding_of(i);
    const bool is_as_stored = step.plan.blocks_of(i) == nullptr && !rounding.remainder &&
        !rounding.step && !step.plan.spec_of(i).offload;
    if (is_as_stored) {
      stored.push_back(i);
      continue;
    }
    for (MatrixItem& slice : slices_of(step, i, is_own_stage(run.algorithm->update))) {
      slices.push_back(std::move(slice));
    }
  }
  update_slices(step, run, slices);
  update_stored(step, run, stored);
}

} // namespace muon::detail
