#include "step_views.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

namespace muon::detail {
namespace {

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

} // namespace muon::detail
