#include "step_views.h"

#include <algorithm>
#include <utility>

#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_real.h>

#include "state/quantized.h"
#include "state/wide.h"

namespace muon::detail {
namespace {

StateView view_state(const Step& step, const ActivePiece& piece, const SlotPlace& slot) {
  const std::int64_t param = piece.item->param;
  const Region& region = piece.item->region;
  const at::Tensor& state = step.state_of(param, slot.position);
  if (slot.is_quantized) {
    return {
        {},
        block_view(
            *step.plan.blocks_of(param), step.plan.spec_of(param).state_format, state,
            step.state_of(param, slot.position + 1), region, piece.first, piece.count)};
  }
  switch (slot.kind) {
    case StateSlot::Kind::LikeParam:
      return {region_view(state, region, piece.first, piece.count), {}};
    case StateSlot::Kind::PerRow:
      return {row_statistics_view(state, region, piece.first, piece.count), {}};
    case StateSlot::Kind::Step:
      break;
  }
  return {state, {}};
}

StateView view_remainder(const Step& step, const ActivePiece& piece) {
  const std::int64_t param = piece.item->param;
  const auto position = step.plan.rounding_of(param).remainder;
  if (!position) {
    return {};
  }
  const at::Tensor& low = step.state_of(param, *position);
  return {region_view(low, piece.item->region, piece.first, piece.count), {}};
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

} // namespace

bool is_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor).all().item<bool>();
}

void count_step(const Step& step, std::int64_t param) {
  const std::vector<StateTensor>& layout = step.plan.state[static_cast<std::size_t>(param)];
  for (std::size_t position = 0; position < layout.size(); ++position) {
    if (layout[position].kind == StateTensor::Kind::Step) {
      step.state_of(param, position).add_(1);
    }
  }
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
    for (const SlotPlace& slot : step.plan.slots_of(param)) {
      views.state.push_back(view_state(step, piece, slot));
    }
    views.remainders.push_back(view_remainder(step, piece));
    views.groups.push_back(step.group(param));
    views.factors.push_back(piece.item->factor);
  }
  return views;
}

std::vector<StateView> ChunkViews::slots(std::size_t first, std::size_t last) const {
  std::vector<StateView> selected;
  const std::size_t count = params.empty() ? 0 : state.size() / params.size();
  for (std::size_t piece = 0; piece < params.size(); ++piece) {
    const auto begin = state.begin() + static_cast<std::ptrdiff_t>(piece * count);
    selected.insert(
        selected.end(), begin + static_cast<std::ptrdiff_t>(first),
        begin + static_cast<std::ptrdiff_t>(last));
  }
  return selected;
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

std::vector<at::Tensor> stored_state(const std::vector<StateView>& views) {
  std::vector<at::Tensor> tensors;
  for (const StateView& view : views) {
    if (view.is_quantized()) {
      tensors.push_back(view.blocks.codes);
      tensors.push_back(view.blocks.scales);
    } else {
      tensors.push_back(view.plain);
    }
  }
  return tensors;
}

std::vector<at::Tensor> in_block_order(
    const Step& step, const std::vector<ActivePiece>& active,
    const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result = tensors;
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (const BlockLayout* layout = step.plan.blocks_of(active[i].item->param)) {
      result[i] = in_block_order(*layout, result[i], active[i].item->region);
    }
  }
  return result;
}

PlainState::PlainState(
    const Step& step, const std::vector<ActivePiece>& active, std::vector<StateView> views)
    : views_(std::move(views)) {
  const std::size_t slots = active.empty() ? 1 : views_.size() / active.size();
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (!views_[i].is_quantized()) {
      tensors_.push_back(views_[i].plain);
      decoded_.emplace_back();
      continue;
    }
    const ActivePiece& piece = active[i / slots];
    const BlockLayout& layout = *step.plan.blocks_of(piece.item->param);
    at::DimVector sizes{piece.count};
    sizes.append(piece.item->region.sizes.begin(), piece.item->region.sizes.end());
    decoded_.push_back(
        decode_state(views_[i].blocks, block_order_sizes(layout, sizes, piece.item->region)));
    tensors_.push_back(from_block_order(layout, decoded_.back(), piece.item->region));
  }
}

void PlainState::store() const {
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (views_[i].is_quantized()) {
      encode_state_(views_[i].blocks, decoded_[i]);
    }
  }
}

WideParams::WideParams(
    const Step& step, const std::vector<ActivePiece>& active, const ChunkViews& views)
    : step_(step), active_(active), views_(views) {
  for (std::size_t i = 0; i < active.size(); ++i) {
    at::Tensor wide = views.params[i];
    if (views.remainders[i].plain.defined()) {
      wide = join_halves(wide, views.remainders[i].plain);
    } else if (step.plan.rounding_of(active[i].item->param).step) {
      wide =
          wide.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous);
    }
    tensors_.push_back(std::move(wide));
  }
}

void WideParams::store_one(std::size_t i) const {
  const ActivePiece& piece = active_[i];
  const std::int64_t param = piece.item->param;
  const at::Tensor& target = views_.params[i];
  if (views_.remainders[i].plain.defined()) {
    split_halves_(tensors_[i], target, views_.remainders[i].plain);
  } else if (const auto step = step_.plan.rounding_of(param).step) {
    const auto steps = static_cast<std::int64_t>(step_.state_of(param, *step).item<float>());
    const std::int64_t first = piece.item->first_value +
        piece.first * (target.numel() / std::max<std::int64_t>(piece.count, 1));
    round_stochastically_(
        tensors_[i], target, rounding_seed(param, steps, piece.item->ordinal), first);
  }
}

void WideParams::store() const {
  for (std::size_t i = 0; i < active_.size(); ++i) {
    store_one(i);
  }
}

} // namespace muon::detail
